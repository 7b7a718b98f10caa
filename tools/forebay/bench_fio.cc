// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_fio.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/process.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr std::chrono::minutes kRunLimit(10);

}  // namespace

absl::StatusOr<std::unique_ptr<FioLimit>> FioLimit::Create(const std::filesystem::path& folder,
                                                           uint64_t bytes) {
  std::unique_ptr<FioLimit> limit(
      new FioLimit(folder, std::max(protocol::kMiB, bytes / protocol::kMiB * protocol::kMiB)));
  RETURN_IF_ERROR(limit->RunWrites().status());  // allocates each piece on the disk
  return limit;
}

absl::StatusOr<Sample> FioLimit::Run(const std::string& transfers) {
  const std::string data = (folder_ / "fio.data").string();
  const std::string report_path = (folder_ / "fio.json").string();
  const ProcessOptions options{
      .arguments = {"fio", "--name=limit", absl::StrCat("--filename=", data),
                    absl::StrCat("--size=", bytes_), absl::StrCat("--rw=", transfers),
                    "--rwmixread=50", "--direct=1", "--ioengine=io_uring", "--bs=1M",
                    "--iodepth=16", "--overwrite=1", "--output-format=json",
                    absl::StrCat("--output=", report_path)},
      .environment = {},
      .null_stdin = true,
      .signal_mask = {}};
  ASSIGN_OR_RETURN(Process fio, Process::Start(options));
  const std::optional<int> ended = fio.WaitFor(kRunLimit);
  if (ended != 0) {
    return MakeError(ErrorId::kSwapIo,
                     absl::StrCat("fio over ", data, ": ",
                                  ended ? DescribeWaitStatus(*ended) : "it does not end"));
  }
  std::ifstream file(report_path);
  const auto report = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!report.is_object() || !report.contains("jobs") || report["jobs"].empty()) {
    return MakeError(ErrorId::kSwapIo, absl::StrCat("fio left no report in ", report_path));
  }
  const nlohmann::json& job = report["jobs"][0];
  const double rate =
      job["read"]["bw_bytes"].get<double>() + job["write"]["bw_bytes"].get<double>();
  return Sample{.value = rate / protocol::kGb};
}

}  // namespace forebay::tools
