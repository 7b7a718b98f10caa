// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/scrub.h"

#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/admin.h"
#include "protocol/error.h"
#include "protocol/json.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"
#include "tools/forebay/private_daemon.h"
#include "tools/forebay/process.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using json = nlohmann::ordered_json;
using protocol::ErrorId;
using protocol::MakeError;

constexpr size_t kParamsShown = 3;

// Runs a program to its end and returns its stdout.
absl::StatusOr<std::string> Run(const std::vector<std::string>& arguments) {
  ASSIGN_OR_RETURN(Pipe out, MakePipe());
  ProcessOptions options;
  options.arguments = arguments;
  options.null_stdin = true;
  options.stdout_fd = out.write_end.get();
  ASSIGN_OR_RETURN(Process process, Process::Start(options));
  out.write_end.Reset();
  std::string output;
  while (ReadSome(out.read_end.get(), output) > 0) {
  }
  // The program has closed its stdout, so it ends soon.
  if (process.WaitFor(std::chrono::minutes(1))) return output;
  return MakeError(ErrorId::kTimeout, absl::StrCat("forebayd ", arguments[1], " does not end"));
}

// "lm_head.weight, wte.weight and 3 more".
std::string ParamsText(const json& slot) {
  const json& params = slot["params"];
  std::vector<std::string> names;
  for (const json& param : params) {
    if (names.size() < kParamsShown) names.push_back(param);
  }
  const size_t more = params.size() - names.size() + slot["more_params"].get<size_t>();
  return absl::StrCat(absl::StrJoin(names, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

std::string JobName(const json& job) {
  return absl::StrCat(job["uid"].get<uint32_t>(), ":", job["name"].get<std::string>());
}

// Lists the damaged copies of labels, records and ledgers, each of which is stored in more than one copy.
std::string CopiesText(const json& report) {
  std::string text;
  for (const auto& [key, what] :
       {std::pair("damaged_labels", "labels"), std::pair("damaged_records", "records of ledgers"),
        std::pair("damaged_ledgers", "ledgers")}) {
    const auto copies = report[key].get<uint32_t>();
    if (copies > 0) absl::StrAppend(&text, text.empty() ? "" : ", ", copies, " of ", what);
  }
  if (text.empty()) return "";
  return absl::StrCat("copies that are not whole: ", text,
                      report["fell_back"] == true ? "" : "; the others are: nothing is lost", "\n");
}

absl::StatusOr<json> AskDaemon(const ScrubOptions& options) {
  uint64_t bytes_per_s = 0;
  if (!options.rate.empty()) {
    ASSIGN_OR_RETURN(bytes_per_s, protocol::ParseBytes(options.rate));
  }
  ASSIGN_OR_RETURN(const auto admin, client::AdminClient::Connect({.socket = options.socket}));
  ASSIGN_OR_RETURN(const client::ScrubReport report, admin->Scrub(bytes_per_s));
  return json::parse(protocol::JsonOf(*report));
}

}  // namespace

absl::StatusOr<std::optional<json>> Scrub(const ScrubOptions& options) {
  if (options.swap.empty() && options.config.empty()) return AskDaemon(options);
  ASSIGN_OR_RETURN(const std::string program, DaemonPath());
  std::vector<std::string> arguments = {program};
  arguments.emplace_back(options.extent == ScrubExtent::kSlots ? "--scrub" : "--jobs");
  arguments.insert(arguments.end(), {"--set", "log.level=warning"});
  if (!options.config.empty()) arguments.insert(arguments.end(), {"--config", options.config});
  if (!options.swap.empty()) {
    arguments.insert(arguments.end(), {"--set", SwapPathsSetting(options.swap)});
  }
  if (!options.rate.empty()) {
    arguments.insert(arguments.end(),
                     {"--set", absl::StrCat("swap.limit_rate=", QuotedPath(options.rate))});
  }
  ASSIGN_OR_RETURN(const std::string output, Run(arguments));
  json report = json::parse(output, nullptr, /*allow_exceptions=*/false);
  if (!report.is_object()) return std::nullopt;
  return report;
}

std::string ScrubText(const json& report) {
  if (report["sequence"] == 0) return "no durable jobs\n";
  Table jobs({"JOB", "DURABILITY", "DURABLE STEP", "SLOTS", "BYTES", "TIME", "DAMAGED SLOTS"});
  Table damaged({"JOB", "DAMAGED", "FILE", "OFFSET", "PARAMETERS"});
  for (const json& job : report["jobs"]) {
    jobs.Add({JobName(job), job["durability"], absl::StrCat(job["durable_step"].get<uint64_t>()),
              absl::StrCat(job["slots"].get<uint64_t>()),
              protocol::FormatBytes(job["bytes"].get<uint64_t>()),
              absl::StrFormat("%.3f s", job["seconds"].get<double>()),
              absl::StrCat(job["damaged_slots"].get<uint64_t>())});
    for (const json& slot : job["damaged"]) {
      damaged.Add({JobName(job), slot["what"], slot["path"],
                   absl::StrCat(slot["offset_bytes"].get<uint64_t>()), ParamsText(slot)});
    }
  }
  std::string text = jobs.empty() ? "no durable jobs\n" : jobs.Text();
  if (!damaged.empty()) absl::StrAppend(&text, "\n", damaged.Text());
  if (report["fell_back"] == true) {
    absl::StrAppend(
        &text,
        "\nthe newest ledger is not whole, by damage or because power was cut while it was "
        "written: jobs come back as the durable step before left them\n");
  }
  const std::string copies = CopiesText(report);
  if (!copies.empty()) absl::StrAppend(&text, "\n", copies);
  return text;
}

}  // namespace forebay::tools
