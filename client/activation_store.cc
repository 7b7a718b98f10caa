// SPDX-License-Identifier: Apache-2.0
#include "client/activation_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/device_trace.h"
#include "client/internal/grad_slots.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::client {

using gpu::Event;
using gpu::Stream;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::MutexLock;

namespace {

constexpr uint64_t kMark = 0x466F7265626179;  // any but zero

// Bytes that a range of the room takes: whole cache lines, so that no two ranges share one.
uint64_t RangeBytes(uint64_t size_bytes) {
  return protocol::RoundUp(std::max<uint64_t>(size_bytes, 1), protocol::kCacheLineBytes);
}

}  // namespace

ActivationStore::ActivationStore(const Attachment& attachment, std::shared_ptr<gpu::Device> device)
    : room_(attachment.activation_room()),
      owner_(attachment.activation_owner()),
      device_(std::move(device)),
      mark_(attachment.activation_mark()),
      trace_(attachment.device_trace()) {
  if (mark_ != nullptr) *mark_ = kMark;
  const uint64_t whole_lines = room_.size() / protocol::kCacheLineBytes * protocol::kCacheLineBytes;
  const MutexLock lock(mutex_);
  ranges_ = std::make_unique<internal::GradSlots>(
      internal::GradSlots::Options{.capacity_bytes = whole_lines, .largest_bytes = whole_lines});
}

ActivationStore::~ActivationStore() {
  const MutexLock lock(mutex_);
  // The room may be unmapped from now on.
  if (out_ != nullptr) out_->Synchronize().IgnoreError();
  if (in_ != nullptr) in_->Synchronize().IgnoreError();
}

absl::StatusOr<std::unique_ptr<ActivationStore>> ActivationStore::Create(
    const Attachment& attachment, std::shared_ptr<gpu::Device> device) {
  if (device == nullptr || device->name() != attachment.device_name()) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("the session is attached with device ",
                                  std::string(attachment.device_name()), ", activations are on ",
                                  device == nullptr ? "none" : std::string(device->name())),
                     "pass one device to both");
  }
  std::unique_ptr<ActivationStore> made(new ActivationStore(attachment, std::move(device)));
  const MutexLock lock(made->mutex_);
  ASSIGN_OR_RETURN(made->out_, made->device_->MakeStream());
  ASSIGN_OR_RETURN(made->in_, made->device_->MakeStream());
  return made;
}

// A hole is punched from the arena's begin on: where a byte behind the mark is lost, so is the mark.
absl::Status ActivationStore::CheckKept() const {
  if (mark_ == nullptr || *mark_ == kMark) return absl::OkStatus();
  return MakeError(ErrorId::kFenced,
                   "the session that kept these activations has ended, and the daemon has taken "
                   "their memory back",
                   "run forward and backward in one session; attach again and repeat the step");
}

std::optional<uint64_t> ActivationStore::Take(uint64_t size_bytes) {
  if (size_bytes > ranges_->largest_bytes()) return std::nullopt;
  const std::optional<uint64_t> offset = ranges_->AllocateBusy(size_bytes);
  if (!offset.has_value()) return std::nullopt;
  used_bytes_ += size_bytes;
  used_bytes_max_ = std::max(used_bytes_max_, used_bytes_);
  return offset;
}

void ActivationStore::GiveBack(uint64_t offset, uint64_t size_bytes) {
  used_bytes_ -= size_bytes;
  ranges_->Free(offset);
}

absl::StatusOr<ActivationStore::Saved*> ActivationStore::Find(uint64_t number) {
  const auto found = saved_.find(number);
  if (found != saved_.end()) return &found->second;
  return MakeError(ErrorId::kRange, absl::StrCat("nothing is saved under number ", number));
}

absl::StatusOr<std::shared_ptr<const Event>> ActivationStore::BeginSave(
    std::span<const std::byte> bytes, uint64_t offset, Stream& compute) {
  ASSIGN_OR_RETURN(const auto filled, compute.Record());
  RETURN_IF_ERROR(out_->WaitFor(*filled));
  if (freed_behind_ != nullptr) RETURN_IF_ERROR(out_->WaitFor(*freed_behind_));
  freed_behind_.reset();
  auto begun = trace_->Begin(*out_);
  RETURN_IF_ERROR(out_->Copy(room_.subspan(offset, bytes.size()), bytes));
  trace_->End(
      *out_, std::move(begun),
      {.lane = protocol::ClientLane::kActivationsFromDevice, .name = {}, .bytes = bytes.size()});
  return out_->Record();
}

absl::StatusOr<std::optional<uint64_t>> ActivationStore::Save(std::span<const std::byte> bytes,
                                                              Stream& compute) {
  const gpu::NvtxRange nvtx_range("forebay.save_activation");
  RETURN_IF_ERROR(device_->CheckReach(bytes));
  const MutexLock lock(mutex_);
  const uint64_t range_bytes = RangeBytes(bytes.size());
  const std::optional<uint64_t> offset = Take(range_bytes);
  if (!offset.has_value()) return std::nullopt;
  absl::StatusOr<std::shared_ptr<const Event>> left = BeginSave(bytes, *offset, compute);
  if (!left.ok()) {
    out_->Synchronize().IgnoreError();  // `bytes` are the caller's again
    GiveBack(*offset, range_bytes);
    return left.status();
  }
  saved_[next_number_] = {
      .offset = *offset, .size_bytes = bytes.size(), .left = *std::move(left), .loaded = {}};
  return next_number_++;
}

absl::StatusOr<bool> ActivationStore::HasLeft(uint64_t number) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const Saved* const saved, Find(number));
  ASSIGN_OR_RETURN(const bool has_left, saved->left->Done());
  if (has_left) left_number_ = std::max(left_number_, number);
  return has_left;
}

absl::Status ActivationStore::LeaveBehind(uint64_t number, Stream& compute) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const Saved* const saved, Find(number));
  return compute.WaitFor(*saved->left);
}

absl::Status ActivationStore::Load(uint64_t number, std::span<std::byte> to, Stream& compute) {
  const gpu::NvtxRange nvtx_range("forebay.load_activation");
  RETURN_IF_ERROR(device_->CheckReach(to));
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(Saved* const saved, Find(number));
  if (to.size() != saved->size_bytes) {
    return MakeError(ErrorId::kRange, absl::StrCat("number ", number, " has ", saved->size_bytes,
                                                   " bytes, there is room for ", to.size()));
  }
  ASSIGN_OR_RETURN(const auto free, compute.Record());
  RETURN_IF_ERROR(in_->WaitFor(*free));
  if (number > left_number_) {
    RETURN_IF_ERROR(in_->WaitFor(*saved->left));
    left_number_ = number;
  }
  auto begun = trace_->Begin(*in_);
  RETURN_IF_ERROR(in_->Copy(to, room_.subspan(saved->offset, saved->size_bytes)));
  RETURN_IF_ERROR(CheckKept());  // a copy by the processor is done by now
  trace_->End(*in_, std::move(begun),
              {.lane = protocol::ClientLane::kActivationsToDevice, .name = {}, .bytes = to.size()});
  ASSIGN_OR_RETURN(saved->loaded, in_->Record());
  saved->load = ++loads_;
  return absl::OkStatus();
}

absl::Status ActivationStore::LoadedFor(uint64_t number, Stream& compute) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const Saved* const saved, Find(number));
  if (saved->loaded == nullptr) {
    return MakeError(ErrorId::kNotReady, absl::StrCat("number ", number, " is not being loaded"),
                     "Load it first");
  }
  RETURN_IF_ERROR(CheckKept());
  return compute.WaitFor(*saved->loaded);
}

absl::Status ActivationStore::Drop(uint64_t number) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(Saved* const saved, Find(number));
  if (saved->loaded != nullptr && saved->load > freed_load_) {
    freed_load_ = saved->load;
    freed_behind_ = std::move(saved->loaded);
  }
  GiveBack(saved->offset, RangeBytes(saved->size_bytes));
  saved_.erase(number);
  return absl::OkStatus();
}

uint64_t ActivationStore::used_bytes() const {
  const MutexLock lock(mutex_);
  return used_bytes_;
}

uint64_t ActivationStore::used_bytes_max() const {
  const MutexLock lock(mutex_);
  return used_bytes_max_;
}

}  // namespace forebay::client
