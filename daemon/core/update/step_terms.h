// SPDX-License-Identifier: Apache-2.0
// The terms of a step: its order, the pass over the blocks, and the scalars of each parameter.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <utility>
#include <vector>

#include "cpu_adam/update_kernel.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/update/block_store.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// LAMB makes two passes over all blocks. The first pass computes the norms of parameters, and changes nothing. The norms are
// summed in the order of blocks. The second pass updates with the trust ratios from these sums.
//
// Ownership  The arguments of the constructor outlive this object.
class StepTerms {
 public:
  StepTerms(JobTasks& io, const protocol::Layout& layout, const MemoryPlan& plan,
            const BlockStore& store, bool keeps_jobs);

  // Sets the step whose blocks are updated from now on, and its first pass.
  void Set(StepOrder order, UpdatePass pass);
  // Ends the step: no masters are set any more.
  void Close() { pass_ = UpdatePass::kWhole; }
  void SetTrust(std::vector<float> trust) { trust_ = std::move(trust); }
  const StepOrder& order() const { return order_; }
  UpdatePass pass() const { return pass_; }
  // True if the step sets masters, before the first update.
  bool sets_masters() const { return pass_ == UpdatePass::kMasters; }
  // True if the optimizer needs the norms of parameters first.
  bool needs_norms() const { return protocol::Info(layout_.spec().optimizer).passes == 2; }
  // IsNeeded() is true if any parameter in the block has a gradient in the step, IsWhole() if all parameters in the block have.
  bool IsNeeded(uint32_t block) const;
  bool IsWhole(uint32_t block) const;
  std::pmr::vector<UpdateSegment> SegmentsOf(uint32_t block);

  void AddNorms(uint32_t block, const std::pmr::vector<SegmentNorms>& norms) {
    norms_[block] = norms;
  }
  // Ends the pass of norms, and computes the trust ratios. Returns these ratios, by parameter.
  const std::vector<float>& EndNorms();

  // Returns the number of updates that each parameter has had. Publish() raises it for the parameters of the step. SetUpdates()
  // sets all numbers of a recovered job, or one number between steps.
  const std::vector<uint64_t>& updates() const { return param_updates_; }
  void SetUpdates(std::vector<uint64_t> updates);
  void SetUpdates(uint32_t param, uint64_t updates);
  void Publish();

 private:
  const cpu_adam::StepScalars& ScalarsOf(uint32_t param_group, uint64_t t);

  JobTasks& io_;
  const protocol::Layout& layout_;
  const MemoryPlan& plan_;
  const BlockStore& store_;
  bool keeps_jobs_;
  std::vector<uint64_t> param_updates_;  // by parameter
  StepOrder order_;
  UpdatePass pass_ = UpdatePass::kWhole;
  // Scalars of the step, by parameter group and t.
  std::pmr::map<std::pair<uint32_t, uint64_t>, cpu_adam::StepScalars> scalars_;
  // Norms from UpdatePass::kNorms, by block.
  std::pmr::map<uint32_t, std::pmr::vector<SegmentNorms>> norms_;
  std::vector<float> trust_;  // trust ratios by parameter, once the norms are known
};

}  // namespace forebay::daemon
