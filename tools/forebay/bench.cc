#include "tools/forebay/bench.h"

#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/standard_output.h"
#include "protocol/units.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {
namespace {

using List = BenchOptions::List;

struct Entry {
  std::string_view name;
  absl::Status (*run)(const BenchOptions& options, const Report& report);
};

constexpr std::array kBenches = {
    Entry{"adam", BenchAdam},     Entry{"cluster", BenchCluster}, Entry{"commit", BenchCommit},
    Entry{"copies", BenchCopies}, Entry{"fetch", BenchFetch},     Entry{"pipeline", BenchPipeline},
    Entry{"step", BenchStep},     Entry{"swap", BenchSwap},       Entry{"update", BenchUpdate}};

constexpr uint64_t kParamsMax = uint64_t{1} << 30;  // of a job that is made

absl::StatusOr<std::vector<uint64_t>> ParseRates(const std::string& text) {
  std::vector<uint64_t> rates;
  if (text.empty()) return rates;
  const std::vector<std::string> words = absl::StrSplit(text, ',');
  for (const std::string& rate : words) {
    const absl::StatusOr<uint64_t> bytes = protocol::ParseBytes(rate);
    if (!bytes.ok() || *bytes == 0) {
      return protocol::MakeError(
          protocol::ErrorId::kOption, absl::StrCat("--limit-rate ", text, " is no size"),
          "write bytes a second as 500MiB or 2GiB, or for each path 1GiB,500MiB");
    }
    rates.push_back(*bytes);
  }
  return rates;
}

}  // namespace

std::string BenchNames() {
  std::string names;
  for (const Entry& entry : kBenches) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(entry.name));
  }
  return names;
}

absl::Status Bench(const BenchOptions& options, bool as_json) {
  for (const Entry& entry : kBenches) {
    if (entry.name != options.what) continue;
    if (entry.run != BenchAdam && (!options.only.empty() || options.list == List::kNames)) {
      return protocol::MakeError(protocol::ErrorId::kOption,
                                 absl::StrCat("bench ", options.what, " has no list of cases"),
                                 "leave out --case and --list: they belong to adam");
    }
    if (entry.run != BenchCopies && !options.driver.empty()) {
      return protocol::MakeError(protocol::ErrorId::kOption,
                                 absl::StrCat("bench ", options.what, " needs no driver"),
                                 "leave out --driver: it belongs to copies");
    }
    if (entry.run != BenchCluster && options.params > kParamsMax) {
      return protocol::MakeError(
          protocol::ErrorId::kOption,
          absl::StrCat("--params ", options.params, " is more than bench ", options.what, " makes"),
          absl::StrCat("give ", kParamsMax, " at most; a cluster may have more"));
    }
    if (entry.run != BenchCluster && (options.plan.cluster.nodes > 0 || !options.staging.empty())) {
      return protocol::MakeError(protocol::ErrorId::kOption,
                                 absl::StrCat("bench ", options.what, " has no cluster"),
                                 "leave out --nodes and --staging: they belong to cluster");
    }
    const bool computes = entry.run == BenchStep || entry.run == BenchCluster;
    if (!computes && options.compute_ms != 0) {
      return protocol::MakeError(protocol::ErrorId::kOption,
                                 absl::StrCat("bench ", options.what, " computes nothing"),
                                 "leave out --compute-ms: it belongs to step and cluster");
    }
    if (entry.run != BenchStep && entry.run != BenchUpdate && !options.limit_rate.empty()) {
      return protocol::MakeError(protocol::ErrorId::kOption,
                                 absl::StrCat("bench ", options.what, " limits no rate"),
                                 "leave out --limit-rate: it belongs to step and update");
    }
    BenchOptions parsed = options;
    ASSIGN_OR_RETURN(parsed.limit_rates, ParseRates(options.limit_rate));
    if (!options.staging.empty()) {
      ASSIGN_OR_RETURN(parsed.staging_bytes, protocol::ParseBytes(options.staging));
    }
    std::vector<BenchResult> results;
    RETURN_IF_ERROR(entry.run(parsed, [&](const BenchResult& result) {
      if (as_json) return protocol::WriteOutput(ToJson(result).dump() + "\n");
      results.push_back(result);
      return absl::OkStatus();
    }));
    return results.empty() ? absl::OkStatus() : protocol::WriteOutput(ResultsText(results));
  }
  return protocol::MakeError(protocol::ErrorId::kOption,
                             absl::StrCat("no bench is called ", options.what),
                             absl::StrCat("one of: ", BenchNames()));
}

}  // namespace forebay::tools
