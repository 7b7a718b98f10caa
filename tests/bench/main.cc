// SPDX-License-Identifier: Apache-2.0
// forebay-bench: every bench, those of `forebay bench` and those that serve Forebay's own work. Exit codes as forebay's:
// 0 good, 1 error, 2 usage.

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "cpu_adam/targets.h"
#include "protocol/error.h"
#include "protocol/standard_output.h"
#include "tests/bench/lab.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/plan_options.h"

namespace forebay::tools {
namespace {

int Exit(const absl::Status& status, int exit_code) {
  if (status.ok()) return exit_code;
  if (!absl::IsCancelled(status)) {
    protocol::PrintError(status);
  }
  return 1;
}

std::vector<NamedBench> AllBenches(const ClusterBenchOptions& cluster) {
  std::vector<NamedBench> benches = UserBenches();
  benches.push_back({.name = "cluster",
                     .about = "a step of a cluster, in virtual time",
                     .options = {"--compute-ms"},
                     .params_max = uint64_t{1} << 50,
                     .run = [&cluster](const BenchOptions& options, const Report& report) {
                       return BenchCluster(options, cluster, report);
                     }});
  benches.push_back({.name = "commit",
                     .about = "a durable step, beside one that is not",
                     .options = {},
                     .run = BenchCommit});
  benches.push_back({.name = "fetch",
                     .about = "from the request to the lease of a group, in DRAM and on swap",
                     .options = {},
                     .run = BenchFetch});
  benches.push_back({.name = "pipeline",
                     .about = "a group's cost in a loop in C++, each way",
                     .options = {},
                     .run = BenchPipeline});
  benches.push_back({.name = "update",
                     .about = "a whole step of AdamW, in DRAM and on swap",
                     .options = {"--limit-rate"},
                     .run = BenchUpdate});
  std::ranges::sort(benches, {}, &NamedBench::name);
  return benches;
}

// Adds the options that only bench cluster has.
void AddClusterBenchOptions(CLI::App& app, ClusterBenchOptions& cluster) {
  app.add_option("--workers", cluster.workers, "cluster: of a node's daemon (2)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--blocks", cluster.blocks, "cluster: of a node at most (4096)")
      ->check(CLI::Range(16, 1 << 24));
  app.add_option("--ranks", cluster.ranks, "cluster: of a node at most, shared by its GPUs (4)")
      ->check(CLI::Range(1, 1024));
  app.add_flag("!--no-drain", cluster.drain, "cluster: step waits for its update");
  app.add_flag("--in-turn", cluster.in_turn,
               "cluster: nothing crosses a link while GPUs compute, as with FSDP2 over gloo");
  app.add_option("--staging", cluster.staging, "cluster: the daemon's swap.staging");
  AddModelOptions(&app, cluster.plan);
  AddClusterOptions(&app, cluster.plan.cluster);
}

std::vector<std::string> OptionNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) names.push_back(option->get_name());
  return names;
}

int Main(std::vector<std::string> words, BenchOptions options, const std::string& cpu_target) {
  CLI::App app("Forebay's benches: results beside this machine's limits, measured in the same run",
               "forebay-bench");
  bool as_json = false;
  app.add_flag("--json", as_json, "JSON instead of a table");
  ClusterBenchOptions cluster;
  std::vector<NamedBench> benches = AllBenches(cluster);
  AddBenchOptions(app, benches, options);
  const std::vector<std::string> common = OptionNames(app);
  AddClusterBenchOptions(app, cluster);
  const auto of_cluster = std::ranges::find(benches, "cluster", &NamedBench::name);
  for (const std::string& name : OptionNames(app)) {
    if (std::ranges::count(common, name) == 0) of_cluster->options.push_back(name);
  }

  std::ranges::reverse(words);  // CLI11 takes words in reverse order
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    const int code = app.exit(error, text, std::cerr) == 0 ? 0 : 2;
    return Exit(protocol::WriteOutput(text.str()), code);
  }
  if (!cpu_target.empty()) {
    const absl::Status forced = cpu_adam::ForceTarget(cpu_target);
    if (!forced.ok()) return Exit(forced, 1);
  }
  return Exit(RunBench(benches, options, as_json), 0);
}

}  // namespace
}  // namespace forebay::tools

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  forebay::tools::BenchOptions options;
  options.runtime_folders = {variable("XDG_RUNTIME_DIR"), variable("TMPDIR")};
  return forebay::tools::Main(std::move(words), std::move(options), variable("FOREBAY_CPU_TARGET"));
}
