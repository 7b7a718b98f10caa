// SPDX-License-Identifier: Apache-2.0
// Makes published steps of a job durable on disk, and restores the job from the disk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/update/step_pipeline.h"
#include "protocol/durability.h"

namespace forebay::daemon {

// When a step that is due is published, the step is gathered. Blocks on swap stay in their slots. Changed blocks in DRAM and
// changed parts of the weights arena are written to free slots. What the ranks committed is copied. Then the node makes a
// ledger durable that names all these bytes (DurableJob). No step is decided before that ledger is durable. Only decided steps
// change bytes in DRAM, so never more steps are undone than the level allows.
//
// A write that fails is repeated in another slot. If the ledger could not be made durable, everything that a failed flush has
// put in doubt is written again, and then the ledger. Until then the step waits, and wait() returns the error.
//
// Ownership  The arguments of the constructor outlive this object.
class DurableSteps {
 public:
  DurableSteps(const JobSpec& spec, JobTasks& io, StepPipeline& pipeline)
      : spec_(spec), io_(io), pipeline_(pipeline), store_(pipeline.store()) {}

  // Values of a published step, apart from its blocks.
  struct Published {
    uint64_t step = 0;
    std::string run;
    std::vector<uint32_t> trace;
    std::vector<StatePart> extra_states;  // ranges of the step arena, by rank
  };
  // Returns the job's values at the step. Blocks, weights and extra states are empty.
  DurableJob ValuesOf(Published published) const;
  bool IsDue(uint64_t step) const;
  // Begins to make a step durable that is due and has just been published. Called while no other step is in progress.
  void Begin(Published published);
  // Starts the saves that can start. Gathers the step once everything is saved.
  void Pump();
  void OnSaved(const TaskDone& done);
  absl::Status OnKept(const TaskDone& done);

  // True from Begin() until a ledger with the step is durable.
  bool in_progress() const { return next_ != nullptr; }
  // True if everything of the step is saved, so that the next ledger names the step.
  bool is_gathered() const { return is_gathered_; }
  // Returns the step that the next ledger names: the step in progress if is_gathered(), otherwise durable(). Null if no step is
  // durable yet.
  std::shared_ptr<const DurableJob> ForLedger() const { return is_gathered_ ? next_ : last_; }
  // Returns the step that the newest durable ledger names, or null if no ledger names the job.
  const std::shared_ptr<const DurableJob>& durable() const { return last_; }
  // Reports that the ledger with the step of ForLedger() is durable. After an error the ledger may be durable or not.
  void OnCommitted(const absl::Status& status);
  // Reports that a flush failed, so the content of these slots of the node is unknown. Entries whose copies were written from
  // DRAM are saved again. `paths`: see BlockLedger::Doubt().
  void OnDoubted(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths);
  // Reports that a block in doubt cannot be read. If the step in progress has bytes in doubt, wait() returns the error.
  void OnReadFailed(const absl::Status& status);
  // True if the step in progress waits only for blocks in doubt, which Relocation moves to other slots.
  bool is_awaiting_moves() const {
    return in_progress() && !is_abandoned_ && !is_saving() && store_.ledger().is_next_doubted();
  }

  // Restores a job that a ledger has named. Tasks that end in OnRestored() read the bytes of the arenas, unless these bytes
  // were retained in memory.
  void StartRestore();
  bool is_restoring() const { return !restoring_.empty() || next_restore_ < to_restore_.size(); }
  absl::Status OnRestored(const TaskDone& done);
  uint64_t restored_bytes() const { return restored_bytes_; }
  uint64_t to_restore_bytes() const { return to_restore_bytes_; }

  // Stops starting tasks, because the job failed or is deleted.
  void Abandon() { is_abandoned_ = true; }

  uint64_t durable_step() const { return last_ == nullptr ? 0 : last_->step; }
  // Returns the durable step before durable_step(), in a job over several nodes. 0 if the job has no such step.
  uint64_t durable_before() const {
    return last_ == nullptr || last_->before == nullptr ? 0 : last_->before->step;
  }
  // OK, or the error because of which the step in progress waits.
  const absl::Status& wait() const { return wait_; }

 private:
  bool is_part(uint32_t entry) const { return entry >= store_.map().blocks(); }
  StatePart PartOf(uint32_t entry) const;
  absl::Status Describe(const absl::Status& status, uint32_t entry) const;
  // Maximum number of concurrent transfers of parts of arenas to or from swap.
  size_t at_once() const { return kSavesPerPath * std::max(1U, store_.path_table().paths()); }
  bool replaces_last() const {
    return spec_.is_over_nodes() && last_ != nullptr && last_->step == next_->step;
  }
  bool is_saving() const { return !unsaved_.empty() || !saving_.empty(); }
  void StartSaves();
  void StartRestores();
  void TryGather();

  const JobSpec& spec_;
  JobTasks& io_;
  StepPipeline& pipeline_;
  BlockStore& store_;
  std::shared_ptr<DurableJob> next_;  // the step in progress
  std::shared_ptr<const DurableJob> last_;
  bool is_gathered_ = false;
  bool is_abandoned_ = false;
  bool is_keeping_ = false;        // extra states of the ranks are being copied
  std::vector<uint32_t> unsaved_;  // entries of the ledger to save, the last one first
  struct Save {
    uint32_t entry = 0;
    uint32_t path = 0;
  };
  std::map<TaskId, Save> saving_;
  std::vector<uint32_t> to_restore_;
  size_t next_restore_ = 0;
  std::map<TaskId, uint32_t> restoring_;
  uint64_t restored_bytes_ = 0;
  uint64_t to_restore_bytes_ = 0;
  absl::Status wait_;
};

}  // namespace forebay::daemon
