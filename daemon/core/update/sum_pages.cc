// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/sum_pages.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/limits.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {
namespace {

// Maximum number of requests for which frames are freed at the same time.
constexpr size_t kRequestsAhead = 8;

}  // namespace

SumPages::SumPages(JobTasks& io, const protocol::Layout& layout, const BlockMap& map,
                   const MemoryPlan& plan, const SumSwap::Options& options)
    : io_(io),
      layout_(layout),
      plan_(plan),
      swap_(io, plan, options),
      free_frames_(io.memory()),
      gathered_(io.memory()),
      updated_early_(io.memory()),
      requests_(io.memory()),
      arrived_(io.memory()),
      prepared_(io.memory()) {
  if (!is_paged()) return;
  pages_.resize(plan_.sum_pages);
  for (uint32_t frame = 0; frame < plan_.sum_frames; ++frame) free_frames_.insert(frame);
  for (uint32_t partition = 0; partition < layout_.partitions().size(); ++partition) {
    const uint64_t elems = layout_.partitions()[partition].gradient_elems;
    for (uint64_t begin = 0, end = 0; begin < elems; begin = end) {
      end = std::min(elems, EndOnPage(partition, begin));
      pages_[PageOf(partition, begin)].ranges.push_back(
          {.partition = partition, .begin = begin, .end = end});
    }
  }
  for (uint32_t block = 0; block < map.state_blocks(); ++block) {
    block_pages_.push_back(SumPagesOf(plan_, map, block));
    for (const uint32_t page : block_pages_.back()) ++pages_[page].blocks;
    block_pages_max_ =
        std::max(block_pages_max_, static_cast<uint32_t>(block_pages_.back().size()));
  }
  FOREBAY_CHECK(block_pages_max_ <= plan_.sum_frames);
  for (const KeptUpdate::Sums& sums : options.recorded) {
    if (!sums.frame) {
      pages_[sums.page].state = State::kOnSwap;
      continue;
    }
    FOREBAY_CHECK(free_frames_.erase(*sums.frame) == 1);
    pages_[sums.page].frame = *sums.frame;
    SetResident(sums.page);
  }
}

uint64_t SumPages::VirtualOffset(uint32_t partition, uint64_t elem) const {
  return plan_.accumulator_offsets[partition] + elem * protocol::SizeBytes(plan_.sum_dtype);
}

uint64_t SumPages::EndOnPage(uint32_t partition, uint64_t elem) const {
  if (!is_paged()) return UINT64_MAX;
  const uint64_t page_end = (PageOf(partition, elem) + uint64_t{1}) * plan_.sum_page_bytes;
  return (page_end - plan_.accumulator_offsets[partition]) / protocol::SizeBytes(plan_.sum_dtype);
}

// -------------------------------------------------------------------------------------- the frames

bool SumPages::HasFrameForAdds() const {
  const size_t kept = of_update_on_swap_ > 0 ? block_pages_max_ : 0;
  return free_frames_.size() > kept && io_.stale_tasks() == 0 && !abandoned_;
}

void SumPages::AllocateFrame(uint32_t page) {
  pages_[page].frame = free_frames_.extract(free_frames_.begin()).value();
}

void SumPages::FreeFrame(uint32_t page) {
  Unlist(page);
  FOREBAY_CHECK(free_frames_.insert(pages_[page].frame).second);
}

// Adds the page to gathered_ and updated_early_, if the page belongs to them.
void SumPages::List(uint32_t index) {
  const Page& page = pages_[index];
  if (page.state != State::kResident || page.updates_left > 0) return;
  gathered_.emplace(page.used, index);
  if (page.blocks_updated_early == page.blocks) updated_early_.emplace(page.used, index);
}

void SumPages::Unlist(uint32_t page) {
  gathered_.erase({pages_[page].used, page});
  updated_early_.erase({pages_[page].used, page});
}

void SumPages::SetUsed(uint32_t page) {
  Unlist(page);
  pages_[page].used = ++clock_;
  List(page);
}

void SumPages::SetResident(uint32_t page) {
  pages_[page].state = State::kResident;
  SetUsed(page);
}

// Deletes the sums of a page. Running updates and transfers of the page retain its frame until they end. Tasks that add sums
// are stale: no frame is allocated before these tasks have ended.
void SumPages::Forget(uint32_t index) {
  Page& page = pages_[index];
  const bool is_moving = page.state == State::kSpilling || page.state == State::kLoading;
  if (page.state == State::kNone) return;
  if (is_moving || page.updates > 0) {
    page.is_forgotten = true;
    return;
  }
  if (page.state == State::kResident) FreeFrame(index);
  if (page.state == State::kOnSwap) swap_.FreeSlot(index);
  page.state = State::kNone;
  page.is_forgotten = false;
}

// ------------------------------------------------------------------------------------- the gathering

bool SumPages::Request(uint32_t partition, uint64_t elem, Need need) {
  if (!is_paged()) return true;
  const uint32_t index = PageOf(partition, elem);
  Page& page = pages_[index];
  const bool is_free = page.updates_left == 0 && !page.is_forgotten;
  if (is_free && page.state == State::kNone && requests_.empty() && HasFrameForAdds()) {
    AllocateFrame(index);
    SetResident(index);
  }
  if (is_free && page.state == State::kResident) {
    SetUsed(index);
    return true;
  }
  if (page.requested == Need::kNone) requests_.push_back(index);
  page.requested = std::max(page.requested, need);
  return false;
}

void SumPages::Arrive(uint32_t page) {
  pages_[page].requested = Need::kNone;
  pages_[page].has_arrived = true;
  arrived_.push_back(page);
  SetUsed(page);
}

std::pmr::vector<SumPages::Range> SumPages::DrainArrived() {
  std::pmr::vector<Range> ranges(io_.memory());
  for (const uint32_t page : std::exchange(arrived_, {})) {
    if (!std::exchange(pages_[page].has_arrived, false)) continue;
    ranges.insert(ranges.end(), pages_[page].ranges.begin(), pages_[page].ranges.end());
  }
  return ranges;
}

uint64_t SumPages::Pin(uint32_t partition, uint64_t elem) {
  const uint64_t offset_bytes = VirtualOffset(partition, elem);
  if (!is_paged()) return offset_bytes;
  Page& page = pages_[PageOf(partition, elem)];
  FOREBAY_CHECK(page.state == State::kResident);
  ++page.adds;
  return FrameOffset(page) + offset_bytes % plan_.sum_page_bytes;
}

void SumPages::Unpin(uint32_t partition, uint64_t elem) {
  if (is_paged()) --pages_[PageOf(partition, elem)].adds;
}

void SumPages::ForgetGathered() {
  requests_.clear();
  arrived_.clear();
  error_ = absl::OkStatus();
  for (uint32_t page = 0; page < pages_.size(); ++page) {
    pages_[page].requested = Need::kNone;
    pages_[page].has_arrived = false;
    pages_[page].adds = 0;
    if (pages_[page].updates_left == 0) Forget(page);
  }
}

// ---------------------------------------------------------------------------------------- the update

bool SumPages::IsThere(uint32_t block) const {
  if (!is_paged()) return true;
  return std::ranges::all_of(block_pages_[block], [this](uint32_t index) {
    const Page& page = pages_[index];  // in kNone the parameters of the page have no gradient
    return (page.state == State::kResident && !page.is_forgotten) || page.state == State::kNone;
  });
}

SumPages::Room SumPages::Prepare(uint32_t block) {
  if (IsThere(block)) return Room::kThere;
  std::pmr::vector<uint32_t> on_swap(io_.memory());
  for (const uint32_t page : block_pages_[block]) {
    if (pages_[page].state == State::kOnSwap) on_swap.push_back(page);
  }
  if (free_frames_.size() < on_swap.size() || io_.stale_tasks() > 0) {
    if (!short_block_) short_block_ = block;
    return Room::kNone;
  }
  for (const uint32_t page : on_swap) StartLoad(page);
  if (prepared_.insert(block).second) {
    for (const uint32_t page : block_pages_[block]) ++pages_[page].prepared;
  }
  return Room::kComing;
}

void SumPages::PinBlock(uint32_t block) {
  if (!is_paged()) return;
  const bool was_prepared = prepared_.erase(block) > 0;
  for (const uint32_t page : block_pages_[block]) {
    ++pages_[page].updates;
    if (was_prepared) --pages_[page].prepared;
  }
}

void SumPages::UnpinBlock(uint32_t block) {
  if (!is_paged()) return;
  for (const uint32_t page : block_pages_[block]) {
    --pages_[page].updates;
    if (pages_[page].is_forgotten) Forget(page);
  }
}

std::pmr::vector<SumFrame> SumPages::FramesOf(uint32_t block) const {
  std::pmr::vector<SumFrame> frames(io_.memory());
  if (!is_paged()) return frames;
  for (const uint32_t page : block_pages_[block]) {
    if (pages_[page].state != State::kResident) continue;
    frames.push_back({.page = page, .offset_bytes = FrameOffset(pages_[page])});
  }
  return frames;
}

void SumPages::BeginPrepared(uint64_t recorded_step) {
  if (!is_paged() || recorded_step == 0) return;
  recorded_step_ = recorded_step;
  is_prepared_ = true;
  for (uint32_t page = 0; page < pages_.size(); ++page) Record(page);
}

void SumPages::EndPrepared() {
  is_prepared_ = false;
  recorded_step_ = 0;
}

// Records the place of a page of gradient sums that the running update needs, before another page gets its old place.
void SumPages::Record(uint32_t index) {
  const Page& page = pages_[index];
  if (recorded_step_ == 0) return;
  RecordSums record{.job = io_.job(), .page = index, .step = recorded_step_};
  const bool is_on_swap = page.state == State::kOnSwap || page.state == State::kLoading;
  if (IsNeeded(page) && is_on_swap) {
    record.slot = swap_.copy(index).slot;
    record.checksum = swap_.copy(index).checksum;
  } else if (IsNeeded(page) && page.state != State::kNone) {
    record.frame = page.frame;
  }
  record.spills = swap_.copy(index).writes;
  io_.actions().Emit(record);
}

void SumPages::BeginUpdate(std::span<const uint32_t> blocks, uint64_t recorded_step) {
  if (!is_paged()) return;
  const bool was_prepared = std::exchange(is_prepared_, false);
  recorded_step_ = recorded_step;
  for (Page& page : pages_) {
    FOREBAY_CHECK(page.updates_left == 0);
    page.prepared = 0;
    page.blocks_updated_early = 0;
  }
  prepared_.clear();
  short_block_.reset();
  of_update_on_swap_ = 0;
  for (const uint32_t block : blocks) {
    for (const uint32_t page : block_pages_[block]) ++pages_[page].updates_left;
  }
  for (uint32_t page = 0; page < pages_.size(); ++page) {
    Unlist(page);
    if (pages_[page].updates_left == 0) Forget(page);
    if (pages_[page].state == State::kOnSwap) ++of_update_on_swap_;
    List(page);
    if (pages_[page].updates_left > 0 || was_prepared) Record(page);
  }
}

void SumPages::EndUpdateOf(uint32_t block) {
  if (!is_paged()) return;
  for (const uint32_t page : block_pages_[block]) {
    FOREBAY_CHECK(pages_[page].updates_left > 0);
    if (--pages_[page].updates_left > 0) continue;
    if (pages_[page].state == State::kOnSwap) --of_update_on_swap_;
    Record(page);
    Forget(page);
  }
}

void SumPages::SetUpdatedEarly(uint32_t block, bool is_updated) {
  if (!is_paged()) return;
  for (const uint32_t page : block_pages_[block]) {
    Unlist(page);
    uint32_t& blocks = pages_[page].blocks_updated_early;
    blocks = is_updated ? blocks + 1 : blocks - 1;
    List(page);
  }
}

// ----------------------------------------------------------------------------------------- transfers

void SumPages::StartLoad(uint32_t index) {
  Page& page = pages_[index];
  AllocateFrame(index);
  page.state = State::kLoading;
  if (page.updates_left > 0) --of_update_on_swap_;
  swap_.Read(index, FrameOffset(page));
}

absl::Status SumPages::OnTransferred(const TaskDone& done) {
  const uint32_t index = swap_.OnDone(done);
  if (pages_[index].state == State::kLoading) return OnLoaded(index, done.status);
  OnSpilled(index, done.status);
  return absl::OkStatus();
}

absl::Status SumPages::OnLoaded(uint32_t index, const absl::Status& status) {
  Page& page = pages_[index];
  if (status.ok()) {
    swap_.FreeSlot(index);
    SetResident(index);
    if (IsNeeded(page)) Record(index);
    if (page.is_forgotten) Forget(index);
    return absl::OkStatus();
  }
  FreeFrame(index);
  page.state = State::kOnSwap;
  if (page.is_forgotten) {
    Forget(index);
    return absl::OkStatus();
  }
  if (page.updates_left > 0) ++of_update_on_swap_;
  const absl::Status lost = protocol::MakeError(
      protocol::IdOf(status),
      absl::StrCat("gradients of ", layout_.DescribePartition(page.ranges.at(0).partition),
                   page.ranges.size() > 1 ? " and others: " : ": ", std::string(status.message())),
      protocol::HintOf(status));
  if (page.updates_left > 0) return lost;
  error_.Update(lost);
  return absl::OkStatus();
}

// True if a task waits to add sums to the page. Also true if the running update needs the page, and every block of the update
// has found frames.
bool SumPages::StaysResident(const Page& page) const {
  return page.requested != Need::kNone || (page.updates_left > 0 && !short_block_);
}

void SumPages::OnSpilled(uint32_t index, const absl::Status& status) {
  Page& page = pages_[index];
  const bool stays = page.is_forgotten || StaysResident(page);
  if (!status.ok() && !stays && !abandoned_) {
    swap_.Write(index, FrameOffset(page), status);
    return;
  }
  if (stays) {
    swap_.FreeSlot(index);
    SetResident(index);
    if (page.is_forgotten) Forget(index);
    return;
  }
  page.state = State::kOnSwap;
  FreeFrame(index);
  if (page.updates_left > 0) ++of_update_on_swap_;
  if (IsNeeded(page)) Record(index);
}

// ---------------------------------------------------------------------------------------------- pump

void SumPages::ServeRequests() {
  std::pmr::vector<uint32_t> waiting(io_.memory());
  for (const uint32_t index : std::exchange(requests_, {})) {
    Page& page = pages_[index];
    if (page.requested == Need::kNone) continue;
    const bool is_free = page.updates_left == 0 && !page.is_forgotten;
    if (is_free && page.state == State::kNone && HasFrameForAdds()) {
      AllocateFrame(index);
      SetResident(index);
    } else if (is_free && page.state == State::kOnSwap && HasFrameForAdds()) {
      StartLoad(index);
    }
    if (is_free && page.state == State::kResident) {
      Arrive(index);
    } else {
      waiting.push_back(index);
    }
  }
  requests_ = std::move(waiting);
}

bool SumPages::IsIdle(const Page& page) {
  return page.adds == 0 && page.updates == 0 && page.prepared == 0;
}

// Finds the idle page that was used longest ago. Few pages are busy: at most those that workers and transfers use.
std::optional<uint32_t> SumPages::OldestIdle(const ByUse& pages) const {
  for (const auto& [used, index] : pages) {
    if (IsIdle(pages_[index]) && !pages_[index].has_arrived) return index;
  }
  return std::nullopt;
}

// Finds the idle page that was used longest ago, and that the first block without frames does not need. Used if no update of
// the running step can begin, because no block has all its pages resident.
std::optional<uint32_t> SumPages::OldestIdleOfUpdate() const {
  const std::vector<uint32_t>& kept = block_pages_[*short_block_];
  std::optional<uint32_t> oldest;
  for (uint32_t index = 0; index < pages_.size(); ++index) {
    const Page& page = pages_[index];
    if (page.state != State::kResident || !IsIdle(page)) continue;
    if (std::ranges::find(kept, index) != kept.end()) continue;
    if (!oldest || page.used < pages_[*oldest].used) oldest = index;
  }
  return oldest;
}

bool SumPages::StartSpills(uint32_t frames,
                           const std::function<std::optional<uint32_t>()>& choose) {
  while (free_frames_.size() + swap_.writes() < frames) {
    const std::optional<uint32_t> victim =
        swap_.has_free_slot() ? choose() : std::optional<uint32_t>();
    if (!victim) return false;
    Unlist(*victim);
    pages_[*victim].state = State::kSpilling;
    swap_.Write(*victim, FrameOffset(pages_[*victim]));
  }
  return true;
}

void SumPages::Pump(bool has_early_work) {
  if (!is_paged() || io_.stale_tasks() > 0 || abandoned_) return;
  const bool is_short = short_block_ || of_update_on_swap_ > 0 || !requests_.empty();
  if (!is_short && free_frames_.size() >= kSpareSumFrames) return;
  ServeRequests();
  const uint32_t of_update = short_block_ || of_update_on_swap_ > 0 ? block_pages_max_ : 0;
  const auto is_urgent = [&](uint32_t page) {
    return !has_early_work || pages_[page].requested == Need::kNow;
  };
  const auto of_requests = static_cast<uint32_t>(std::min(requests_.size(), kRequestsAhead));
  const uint32_t urgent =
      std::min(of_requests, static_cast<uint32_t>(std::ranges::count_if(requests_, is_urgent)));
  const bool found = StartSpills(urgent + of_update, [this] {
    const std::optional<uint32_t> updated = OldestIdle(updated_early_);
    return updated ? updated : OldestIdle(gathered_);
  });
  StartSpills(kSpareSumFrames + of_requests + of_update,
              [this] { return OldestIdle(updated_early_); });
  const auto is_read = [](const Page& page) { return page.updates > 0; };
  const bool is_stuck = short_block_ && swap_.is_idle() && std::ranges::none_of(pages_, is_read);
  if (!found && is_stuck) {
    StartSpills(block_pages_max_, [this] { return OldestIdleOfUpdate(); });
  }
  if (swap_.writes() == 0) short_block_.reset();
}

void SumPages::CheckInvariants() const {
  if (!is_paged()) return;
  uint32_t frames = 0;
  uint32_t on_swap = 0;
  for (uint32_t index = 0; index < pages_.size(); ++index) {
    const Page& page = pages_[index];
    const bool has_frame = page.state != State::kNone && page.state != State::kOnSwap;
    frames += has_frame ? 1 : 0;
    on_swap += page.state == State::kOnSwap && page.updates_left > 0 ? 1 : 0;
    const bool has_slot = page.state == State::kSpilling || page.state == State::kOnSwap ||
                          page.state == State::kLoading;
    FOREBAY_CHECK(swap_.copy(index).slot.has_value() == has_slot);
    FOREBAY_CHECK(page.updates == 0 || page.state == State::kResident ||
                  page.state == State::kNone);
    const bool is_listed = gathered_.contains({page.used, index});
    const bool is_gathered = page.state == State::kResident && page.updates_left == 0;
    FOREBAY_CHECK(is_listed == is_gathered || page.is_forgotten);
    FOREBAY_CHECK(updated_early_.contains({page.used, index}) ==
                  (is_listed && page.blocks_updated_early == page.blocks));
  }
  FOREBAY_CHECK(frames + free_frames_.size() == plan_.sum_frames);
  swap_.CheckInvariants();
  FOREBAY_CHECK(on_swap == of_update_on_swap_);
}

}  // namespace forebay::daemon
