// SPDX-License-Identifier: Apache-2.0
// `forebay bench WHAT`: compares each result with a limit of this machine that the same run measures. `forebay-bench` of
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
  uint32_t samples = 0;                      // samples of each case; 0: the bench decides
  uint64_t params = 0;                       // elements of the synthetic job; 0: the bench decides
  std::string swap_folder = ".";             // folder for the cases on swap
  std::vector<std::string> runtime_folders;  // candidates for the private daemon's folder
  std::string driver;                        // bench copies: name for dlopen(3); empty: NVIDIA's
  std::string only;                          // bench adam: runs cases whose name contains this
  // Limits of the swap paths in bytes a second, reads and writes together: "500MiB" for one path, "500MiB,250MiB" for two.
  // Empty: one path without a limit. RunBench() parses limit_rate into limit_rates.
  std::string limit_rate;
  std::vector<uint64_t> limit_rates;
  // Milliseconds of compute in one forward and backward together. 0: as long as the update takes, or as the GPUs' rate says.
  uint32_t compute_ms = 0;
  enum class List { kNo, kNames } list = List::kNo;  // bench adam: kNames only lists cases
  std::vector<std::string> given;                    // options on the command line, "--case"
};

struct NamedBench {
  std::string name;
  std::string about;                 // description in the help text
  std::vector<std::string> options;  // options that not every bench has, "--case"
  uint64_t params_max = uint64_t{1} << 30;
  std::function<absl::Status(const BenchOptions& options, const Report& report)> run;
};

// The benches of `forebay bench`, by name: adam, copies, disk, step.
std::vector<NamedBench> UserBenches();

// Returns true if `forebay-bench` has the bench and `forebay bench` does not.
bool IsLabBench(const std::string& name);
// Returns an E_OPTION error which says that `forebay-bench` has the bench, and how to build `forebay-bench`.
absl::Status LabBenchError(const std::string& name);

// Adds the bench's name and the options of all benches to `app`. Parsing sets `options.given`.
void AddBenchOptions(CLI::App& app, std::span<const NamedBench> benches, BenchOptions& options);

// Runs all cases of a bench and prints a line for each case: JSON after each case, or a table at the end. Starts a private
// daemon if the bench needs one. The name `swap`, used for `disk` until 0.2, still works with a message on stderr.
//
// Errors  E_OPTION  the bench does not exist, lacks a given option, or has no case of the given name. Otherwise the
//                   daemon's errors.
absl::Status RunBench(std::span<const NamedBench> benches, const BenchOptions& options,
                      bool as_json);

}  // namespace forebay::tools
