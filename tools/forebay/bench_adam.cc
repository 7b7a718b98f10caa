// SPDX-License-Identifier: Apache-2.0
// Bench adam: measures the optimizer's passes without a daemon. Each result is compared with the speed at which bare loops
// read and write the same arrays.

#include <algorithm>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_adam/targets.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/status_macros.h"
#include "protocol/standard_output.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_adam_gradients.h"
#include "tools/forebay/bench_adam_measure.h"
#include "tools/forebay/bench_adam_pass.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {
namespace {

using protocol::Optimizer;
using protocol::StateFormat;

constexpr uint32_t kSamples = 7;
constexpr uint64_t kParams = 100'000'000;
constexpr uint64_t kManyParameters = 1000;

struct Case {
  std::string name;
  uint64_t memory_bytes = 0;
  std::string target;  // "": the one in use
  std::function<absl::StatusOr<BenchResult>(const AdamFixture& fixture, const BenchCase& what)>
      measure;
};

class CaseList {
 public:
  CaseList(uint64_t params, int cores) : params_(params), cores_(cores) {
    if (cpu_adam::ChosenTarget() != cpu_adam::SupportedTargets().front()) {
      suffix_ = absl::StrCat("/target=", cpu_adam::ChosenTarget());
    }
  }

  std::vector<Case> All() {
    for (const StateFormat& format : protocol::kStateFormats) AddFormat(format);
    for (const protocol::OptimizerInfo& info : protocol::kOptimizers) {
      if (info.optimizer == Optimizer::kAdamW) continue;  // AddFormat() has added the AdamW cases
      AddPass({.optimizer = info.optimizer, .threads = cores_});
    }
    for (const int threads : ThreadCounts()) {
      AddPass({.threads = threads, .hash = AdamPass::Hash::kOn});
    }
    for (const int threads : ThreadCounts()) {
      AddPass({.threads = threads, .data = AdamPass::Data::kDenormal});
    }
    for (const GradientTask& task : kGradientTasks) {
      for (const int threads : ThreadCounts()) AddGradientTask(task, threads);
    }
    AddAvx2Cases();
    return std::move(cases_);
  }

 private:
  // Returns the measured numbers of threads: one, two and all cores, as far as the machine has them.
  std::vector<int> ThreadCounts() const {
    std::vector<int> counts = {1};
    if (cores_ >= 2) counts.push_back(2);
    if (cores_ > 2) counts.push_back(cores_);
    return counts;
  }

  void AddFormat(const StateFormat& format) {
    for (const int threads : ThreadCounts()) {
      AddPass({.format = format, .threads = threads});
      AddPass({.format = format, .threads = threads, .parameters = kManyParameters});
      AddPass({.format = format, .threads = threads, .task = AdamPass::Task::kWeights});
    }
  }

  // Adds cases that run with AVX2 if the CPU has AVX2 and a better instruction set is the default.
  void AddAvx2Cases() {
    const std::vector<std::string> targets = cpu_adam::SupportedTargets();
    if (!suffix_.empty() || targets.front() == "avx2") return;
    if (std::ranges::find(targets, "avx2") == targets.end()) return;
    const size_t first = cases_.size();
    suffix_ = "/target=avx2";
    for (const StateFormat& format : protocol::kStateFormats) {
      for (const int threads : ThreadCounts()) AddPass({.format = format, .threads = threads});
    }
    for (size_t c = first; c < cases_.size(); ++c) cases_[c].target = "avx2";
  }

  void AddPass(const AdamPass& pass) {
    std::string shape = "flat";
    if (pass.parameters > 1) shape = absl::StrCat(pass.parameters, "x", params_ / pass.parameters);
    const std::string dtype = tools::NameOf(pass.format.weights);
    const bool is_weights_pass = pass.task == AdamPass::Task::kWeights;
    cases_.push_back(
        {.name = absl::StrCat(
             is_weights_pass ? "adam/task=weights/opt=" : "adam/opt=",
             std::string(protocol::Name(pass.optimizer)), "/format=",
             std::string(protocol::Name(pass.format.format)), "/grad=", dtype, "/param=", dtype,
             is_weights_pass ? "/place=second" : "/place=inplace", "/threads=", pass.threads,
             "/shape=", shape, pass.hash == AdamPass::Hash::kOn ? "/hash=on" : "",
             pass.data == AdamPass::Data::kDenormal ? "/data=denormal" : "", suffix_),
         .memory_bytes = MemoryFor(pass, params_),
         .target = "",
         .measure = [pass](const AdamFixture& fixture, const BenchCase& what) {
           return MeasurePass(fixture, what, pass);
         }});
  }

  void AddGradientTask(const GradientTask& task, int threads) {
    cases_.push_back(
        {.name = absl::StrCat(task.ranks == 0 ? "adam/task=sum_squares"
                                              : absl::StrCat("adam/task=add/ranks=", task.ranks),
                              "/grad=", tools::NameOf(task.source), "/threads=", threads,
                              "/shape=flat", suffix_),
         .memory_bytes = MemoryFor(task, params_),
         .target = "",
         .measure = [&task, threads](const AdamFixture& fixture, const BenchCase& what) {
           return MeasureGradientTask(fixture, what, task, threads);
         }});
  }

  uint64_t params_;
  int cores_;
  std::string suffix_;  // end of the name of each case
  std::vector<Case> cases_;
};

absl::StatusOr<BenchResult> MeasureOne(const AdamFixture& fixture, const Case& one) {
  const BenchCase what{.bench = "adam",
                       .name = one.name,
                       .unit = "GB/s",
                       .limit_what =
                           "best of the loops over the same streams: plain and non-temporal "
                           "stores, pages of 2 MiB and 4 KiB",
                       .measure = Measure::kRate};
  if (one.target.empty()) return one.measure(fixture, what);
  RETURN_IF_ERROR(cpu_adam::ForceTarget(one.target));
  absl::StatusOr<BenchResult> result = one.measure(fixture, what);
  RETURN_IF_ERROR(cpu_adam::ForceTarget("best"));
  return result;
}

}  // namespace

absl::Status BenchAdam(const BenchOptions& options, const Report& report) {
  AdamFixture fixture;
  fixture.params = options.params == 0 ? kParams : options.params;
  fixture.samples = options.samples == 0 ? kSamples : options.samples;
  ASSIGN_OR_RETURN(fixture.pools.emplace_back(), cpu_adam::WorkerPool::Create({}));
  const int cores = fixture.pools.back()->threads();
  const uint64_t params_min = kLoopElems * static_cast<uint64_t>(cores);
  if (fixture.params < params_min) {
    return protocol::MakeError(protocol::ErrorId::kOption,
                               absl::StrCat("bench adam: ", fixture.params,
                                            " parameters are too few for the loops of its limit"),
                               absl::StrCat("--params ", params_min, " or more"));
  }
  std::vector<Case> cases = CaseList(fixture.params, cores).All();
  std::erase_if(cases, [&](const Case& one) { return !absl::StrContains(one.name, options.only); });
  if (cases.empty()) {
    return protocol::MakeError(protocol::ErrorId::kOption,
                               absl::StrCat("no case of bench adam contains ", options.only),
                               "forebay bench adam --list");
  }
  if (options.list == BenchOptions::List::kNames) {
    std::string names;
    for (const Case& one : cases) absl::StrAppend(&names, one.name, "\n");
    return protocol::WriteOutput(names);
  }
  fixture.pools.clear();
  uint64_t memory_bytes = 0;
  for (const Case& one : cases) memory_bytes = std::max(memory_bytes, one.memory_bytes);
  using Pages = BenchMemory::Pages;
  ASSIGN_OR_RETURN(fixture.huge, BenchMemory::Create(Pages::k2MiB, memory_bytes));
  ASSIGN_OR_RETURN(fixture.small, BenchMemory::Create(Pages::k4KiB, memory_bytes));
  for (int threads = 1; threads <= cores; ++threads) {
    ASSIGN_OR_RETURN(fixture.pools.emplace_back(),
                     cpu_adam::WorkerPool::Create({.threads = threads}));
  }
  for (const Case& one : cases) {
    ASSIGN_OR_RETURN(const BenchResult result, MeasureOne(fixture, one));
    RETURN_IF_ERROR(report(result));
  }
  return absl::OkStatus();
}

}  // namespace forebay::tools
