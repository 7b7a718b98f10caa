// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/sum_swap.h"

#include <algorithm>

#include "protocol/os/check.h"

namespace forebay::daemon {

SumSwap::SumSwap(JobTasks& io, const MemoryPlan& plan, const Options& options)
    : io_(io),
      plan_(plan),
      swap_(options.swap),
      path_table_(options.path_table),
      slots_(options.slots.begin(), options.slots.end()),
      free_slots_(options.slots.begin(), options.slots.end(), io.memory()),
      copies_(plan.sum_pages),
      tasks_(io.memory()) {
  for (const KeptUpdate::Sums& sums : options.recorded) {
    copies_[sums.page] = {.slot = sums.slot, .checksum = sums.checksum, .writes = sums.spills};
    if (sums.slot) FOREBAY_CHECK(std::erase(free_slots_, *sums.slot) == 1);
  }
}

BlockIdentity SumSwap::IdentityOf(uint32_t page) const {
  return {.job = io_.job(),
          .part = BlockPart::kGradients,
          .block = page,
          .written_step = copies_[page].writes};
}

void SumSwap::FreeSlot(uint32_t page) {
  free_slots_.push_back(*copies_[page].slot);
  copies_[page].slot.reset();
}

// Allocates the job's free slot that was freed longest ago on a working path. Otherwise takes a slot of the node on a working
// path. Otherwise allocates the job's free slot that was freed longest ago on any path.
nvme::Slot SumSwap::AllocateSlot() {
  const auto works = std::ranges::find_if(
      free_slots_, [this](const nvme::Slot& slot) { return path_table_.works(slot.path); });
  if (works == free_slots_.end()) {
    const auto slot = path_table_.AllocateOnWorking(swap_, plan_.sum_page_bytes);
    if (slot) return *slots_.insert(*slot).first;
  }
  const auto chosen = works == free_slots_.end() ? free_slots_.begin() : works;
  const nvme::Slot slot = *chosen;
  free_slots_.erase(chosen);
  return slot;
}

void SumSwap::Write(uint32_t page, uint64_t offset_bytes, const absl::Status& error) {
  if (!error.ok()) {
    write_error_ = error;
    FreeSlot(page);  // slots that were freed earlier are tried first
  }
  copies_[page].slot = AllocateSlot();
  ++copies_[page].writes;
  ++writes_;
  const TaskId task = io_.Start(TaskKind::kSpillSums, 0,
                                SpillSums{.identity = IdentityOf(page),
                                          .offset_bytes = offset_bytes,
                                          .bytes = plan_.sum_page_bytes,
                                          .slot = *copies_[page].slot,
                                          .pause = !error.ok()});
  tasks_.emplace(task, Transfer{.page = page, .direction = Direction::kWrite});
}

void SumSwap::Read(uint32_t page, uint64_t offset_bytes) {
  const TaskId task = io_.Start(TaskKind::kLoadSums, 0,
                                LoadSums{.identity = IdentityOf(page),
                                         .checksum = copies_[page].checksum,
                                         .offset_bytes = offset_bytes,
                                         .bytes = plan_.sum_page_bytes,
                                         .slot = *copies_[page].slot});
  tasks_.emplace(task, Transfer{.page = page, .direction = Direction::kRead});
}

uint32_t SumSwap::OnDone(const TaskDone& done) {
  const auto [page, direction] = tasks_.extract(done.task).mapped();
  path_table_.CountTransfer({.path = copies_[page].slot->path,
                             .direction = direction,
                             .bytes = plan_.sum_page_bytes,
                             .begin_ns = done.begin_ns,
                             .end_ns = done.end_ns},
                            done.status.ok());
  const bool is_write = direction == Direction::kWrite;
  if (is_write) {
    --writes_;
    write_error_ = absl::OkStatus();  // the write is not being repeated
    copies_[page].checksum = done.checksum;
  }
  if (done.status.ok()) {
    (is_write ? counters_.written_bytes : counters_.read_bytes) += plan_.sum_page_bytes;
  }
  return page;
}

void SumSwap::CheckInvariants() const {
  size_t slots = free_slots_.size();
  for (const Copy& copy : copies_) slots += copy.slot ? 1 : 0;
  FOREBAY_CHECK(slots == slots_.size());
}

}  // namespace forebay::daemon
