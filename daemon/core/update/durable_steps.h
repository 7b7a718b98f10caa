// SPDX-License-Identifier: Apache-2.0
// Brings published steps of a job to disk, and the job back from there.
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

// With the publication of a step that is due, the step is gathered: blocks on swap stay in their slots, those in
// DRAM that have changed are written to others, with the weights; what ranks committed is kept. Then the node
// makes a ledger durable that names all of them (DurableJob). Until it is, no step is decided: bytes in DRAM are
// changed by decided steps alone, and never more steps are undone than the level allows.
//
// A write that fails is repeated in another slot, a ledger that is not durable is made again, and first all that a
// failed flush has put in doubt is written again: the step waits meanwhile, and wait() says why.
//
// Ownership  What the constructor gets outlives it.
class DurableSteps {
 public:
  DurableSteps(const JobSpec& spec, JobTasks& io, StepPipeline& pipeline)
      : spec_(spec), io_(io), pipeline_(pipeline) {}

  // What a step is beside its blocks.
  struct Published {
    uint64_t step = 0;
    std::string run;
    std::vector<uint32_t> trace;
    std::vector<StatePart> extra_states;  // in the step arena, by rank
  };
  // The values of the step, without its bytes.
  DurableJob ValuesOf(Published published) const;
  bool IsDue(uint64_t step) const;
  // The step has been published, and is due. Nothing is in progress.
  void Begin(Published published);
  // Starts what can be started.
  void Pump();
  void OnSaved(const TaskDone& done);
  absl::Status OnKept(const TaskDone& done);

  // From Begin() on, until the ledger is durable.
  bool in_progress() const { return next_ != nullptr; }
  // Everything is saved: the job is part of the next ledger.
  bool is_gathered() const { return is_gathered_; }
  // That a ledger names now; is_gathered(): with the step in progress. Null: none.
  std::shared_ptr<const DurableJob> ForLedger() const { return is_gathered_ ? next_ : last_; }
  // That the newest durable ledger names; null: none.
  const std::shared_ptr<const DurableJob>& durable() const { return last_; }
  // The ledger with what ForLedger() gave is durable, or (an error) perhaps not.
  void OnCommitted(const absl::Status& status);
  // A flush failed, so the content of these slots of the node is unknown. Entries whose copies are in DRAM are saved
  // again. `paths`: as BlockLedger::Doubt.
  void OnDoubted(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths);
  // A block in doubt cannot be read: a step in progress waits for that.
  void OnReadFailed(const absl::Status& status);
  // Blocks on swap are in doubt, and move to other slots (Relocation) before the step is gathered.
  bool is_awaiting_moves() const {
    return in_progress() && !is_abandoned_ && !is_saving() && pipeline_.ledger().is_next_doubted();
  }

  // Of a job that a ledger has named: its arenas get their bytes back, each by a task that ends in OnRestored().
  void StartRestore();
  bool is_restoring() const { return !restoring_.empty() || next_restore_ < to_restore_.size(); }
  absl::Status OnRestored(const TaskDone& done);
  uint64_t restored_bytes() const { return restored_bytes_; }
  uint64_t to_restore_bytes() const { return to_restore_bytes_; }

  // The job failed or is deleted: nothing is started any more.
  void Abandon() { is_abandoned_ = true; }

  uint64_t durable_step() const { return last_ == nullptr ? 0 : last_->step; }
  // Of a job over several nodes, the one before: 0: none.
  uint64_t durable_before() const {
    return last_ == nullptr || last_->before == nullptr ? 0 : last_->before->step;
  }
  // OK, or what the step in progress waits for.
  const absl::Status& wait() const { return wait_; }

 private:
  bool is_part(uint32_t entry) const { return entry >= pipeline_.map().blocks(); }
  StatePart PartOf(uint32_t entry) const;
  absl::Status Describe(const absl::Status& status, uint32_t entry) const;
  // Parts of arenas that are on their way to or from swap.
  size_t at_once() const { return kSavesPerPath * std::max(1U, pipeline_.path_table().paths()); }
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
  std::shared_ptr<DurableJob> next_;  // in progress
  std::shared_ptr<const DurableJob> last_;
  bool is_gathered_ = false;
  bool is_abandoned_ = false;
  bool is_keeping_ = false;        // what ranks committed is being copied
  std::vector<uint32_t> unsaved_;  // entries of the ledger; the last one is next
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
