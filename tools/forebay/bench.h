// SPDX-License-Identifier: Apache-2.0
// `forebay bench WHAT`: results beside the limits of this machine, measured in the same run. `forebay-bench` of
// tests/bench/ has the same benches and more.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/forebay/bench_harness.h"

namespace CLI {
class App;
}  // namespace CLI

namespace forebay::tools {

struct BenchOptions {
  std::string what;                          // the name of a bench
  uint32_t samples = 0;                      // per case; 0: the bench's own number
  uint64_t params = 0;                       // of the synthetic job; 0: the bench's own number
  std::string swap_folder = ".";             // for the cases on swap
  std::vector<std::string> runtime_folders;  // of the private daemon
  std::string driver;                        // copies: as dlopen(3) takes it; empty: NVIDIA's
  std::string only;                          // adam: the cases whose name contains this
  // "500MiB" or "500MiB,250MiB": bytes a second of swap at most, reads and writes together, of as many paths;
  // empty: one path and no limit. RunBench() makes the numbers of it.
  std::string limit_rate;
  std::vector<uint64_t> limit_rates;
  // Milliseconds of compute in one forward and backward together. 0: as long as the update takes, or as the GPUs' rate says.
  uint32_t compute_ms = 0;
  enum class List { kNo, kNames } list = List::kNo;  // adam: kNames measures nothing
  std::vector<std::string> given;                    // options on the command line, "--case"
};

struct NamedBench {
  std::string name;
  std::string about;                 // in the help text
  std::vector<std::string> options;  // those that some benches lack, "--case"
  uint64_t params_max = uint64_t{1} << 30;
  std::function<absl::Status(const BenchOptions& options, const Report& report)> run;
};

// The benches of `forebay bench`, by name: adam, copies, disk, step.
std::vector<NamedBench> UserBenches();

// Returns true if `forebay-bench` alone has the bench.
bool IsLabBench(const std::string& name);
// Errors  E_OPTION  says that `forebay-bench` has it, and how it is built.
absl::Status LabBenchError(const std::string& name);

// The bench's name and the options that NamedBench::options may name. `app` sets `options.given` when it is parsed.
void AddBenchOptions(CLI::App& app, std::span<const NamedBench> benches, BenchOptions& options);

// Runs every case of one bench, on a private daemon where it needs one, and prints a line a case:
// JSON as each comes, or a table at the end. `swap`, the name of `disk` until 0.2, still runs it and says so on stderr.
//
// Errors  E_OPTION  no such bench, one that has not the option, or none of its cases is meant. Else what the daemon
//                   answers.
absl::Status RunBench(std::span<const NamedBench> benches, const BenchOptions& options,
                      bool as_json);

}  // namespace forebay::tools
