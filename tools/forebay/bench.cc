// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/standard_output.h"
#include "protocol/units.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr std::array<std::string_view, 5> kLabBenches = {"cluster", "commit", "fetch", "pipeline",
                                                         "update"};

absl::StatusOr<std::vector<uint64_t>> ParseRates(const std::string& text) {
  std::vector<uint64_t> rates;
  if (text.empty()) return rates;
  const std::vector<std::string> words = absl::StrSplit(text, ',');
  for (const std::string& rate : words) {
    const absl::StatusOr<uint64_t> bytes = protocol::ParseBytes(rate);
    if (!bytes.ok() || *bytes == 0) {
      return MakeError(ErrorId::kOption, absl::StrCat("--limit-rate ", text, " is no size"),
                       "write bytes a second as 500MiB or 2GiB, or for each path 1GiB,500MiB");
    }
    rates.push_back(*bytes);
  }
  return rates;
}

std::string NamesOf(std::span<const NamedBench> benches) {
  return absl::StrJoin(benches, ", ",
                       [](std::string* names, const NamedBench& bench) { *names += bench.name; });
}

std::vector<std::string> BenchesWith(std::span<const NamedBench> benches,
                                     const std::string& option) {
  std::vector<std::string> names;
  for (const NamedBench& bench : benches) {
    if (std::ranges::count(bench.options, option) > 0) names.push_back(bench.name);
  }
  return names;
}

absl::Status CheckOptions(std::span<const NamedBench> benches, const NamedBench& bench,
                          const BenchOptions& options) {
  for (const std::string& option : options.given) {
    const std::vector<std::string> having = BenchesWith(benches, option);
    if (having.empty() || std::ranges::count(having, bench.name) > 0) continue;
    return MakeError(
        ErrorId::kOption, absl::StrCat("bench ", bench.name, " has no ", option),
        absl::StrCat("leave out ", option, ": it belongs to ", absl::StrJoin(having, " and ")));
  }
  if (options.params > bench.params_max) {
    return MakeError(
        ErrorId::kOption,
        absl::StrCat("--params ", options.params, " is more than bench ", bench.name, " makes"),
        absl::StrCat("give ", bench.params_max, " at most"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<NamedBench> UserBenches() {
  return {{.name = "adam",
           .about = "the fused passes of the optimizers, without a daemon",
           .options = {"--case", "--list"},
           .run = BenchAdam},
          {.name = "copies",
           .about = "a GPU's, from and to the daemon's memory",
           .options = {"--driver"},
           .run = BenchCopies},
          {.name = "disk",
           .about = "the daemon's transfers of blocks, without a daemon",
           .options = {},
           .run = BenchDisk},
          {.name = "step",
           .about = "forward, backward and update on swap, beside the longer of both",
           .options = {"--compute-ms", "--limit-rate"},
           .run = BenchStep}};
}

bool IsLabBench(const std::string& name) { return std::ranges::count(kLabBenches, name) > 0; }

absl::Status LabBenchError(const std::string& name) {
  return MakeError(
      ErrorId::kOption,
      absl::StrCat("`forebay bench` has no ", name, ": `forebay-bench ", name, "` has it"),
      absl::StrCat("in the source tree: cmake --build --preset default --target forebay-bench "
                   "forebayd && build/bin/forebay-bench ",
                   name));
}

void AddBenchOptions(CLI::App& app, std::span<const NamedBench> benches, BenchOptions& options) {
  std::string help = absl::StrCat("one of: ", NamesOf(benches));
  for (const NamedBench& bench : benches) {
    absl::StrAppend(&help, "; ", bench.name, ": ", bench.about);
  }
  app.add_option("WHAT", options.what, help)->required();
  app.add_option("--samples", options.samples, "per case")->check(CLI::Range(1, 100000));
  app.add_option("--params", options.params, "of the synthetic job; adam: 100000000")
      ->check(CLI::Range(uint64_t{1024}, uint64_t{1} << 50));
  app.add_option("--swap", options.swap_folder, "a directory for the cases on swap");
  app.add_option("--driver", options.driver, "copies: a driver in the place of libcuda.so.1");
  app.add_option("--case", options.only, "adam: only cases whose name contains this");
  const auto with = [&](const char* option, const char* meaning) {
    return absl::StrCat(absl::StrJoin(BenchesWith(benches, option), ", "), ": ", meaning);
  };
  app.add_option("--compute-ms", options.compute_ms,
                 with("--compute-ms",
                      "of forward and backward together; else as long as the "
                      "update takes, or as the GPUs' rate says"))
      ->check(CLI::Range(1, 3600000));
  app.add_option(
      "--limit-rate", options.limit_rate,
      with("--limit-rate",
           "bytes a second of swap at most, reads and writes together, \"500MiB\", or of "
           "several paths, \"500MiB,250MiB\"; the daemon's swap.limit_rate"));
  app.add_flag_callback(
      "--list", [&options] { options.list = BenchOptions::List::kNames; },
      "adam: print the names of the cases and measure nothing");
  app.parse_complete_callback([&app, &options] {
    options.given.clear();
    for (const CLI::Option* option : app.get_options()) {
      if (option->count() > 0) options.given.push_back(option->get_name());
    }
  });
}

absl::Status RunBench(std::span<const NamedBench> benches, const BenchOptions& options,
                      bool as_json) {
  std::string what = options.what;
  if (what == "swap") {
    std::fprintf(stderr, "note: bench swap is now called disk; the old name ends with 0.3\n");
    what = "disk";
  }
  const auto bench = std::ranges::find(benches, what, &NamedBench::name);
  if (bench == benches.end()) {
    if (IsLabBench(what)) return LabBenchError(what);
    return MakeError(ErrorId::kOption, absl::StrCat("no bench is called ", what),
                     absl::StrCat("one of: ", NamesOf(benches)));
  }
  RETURN_IF_ERROR(CheckOptions(benches, *bench, options));
  BenchOptions parsed = options;
  ASSIGN_OR_RETURN(parsed.limit_rates, ParseRates(options.limit_rate));
  std::vector<BenchResult> results;
  RETURN_IF_ERROR(bench->run(parsed, [&](const BenchResult& result) {
    if (as_json) return protocol::WriteOutput(ToJson(result).dump() + "\n");
    results.push_back(result);
    return absl::OkStatus();
  }));
  return results.empty() ? absl::OkStatus() : protocol::WriteOutput(ResultsText(results));
}

}  // namespace forebay::tools
