// SPDX-License-Identifier: Apache-2.0
#include "client/internal/device_copies.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::client::internal {

using protocol::ErrorId;
using protocol::MakeError;

absl::Status DeviceCopies::Register() {
  gpu::Device& device = *parts_.device;
  const bool is_writable = parts_.weights_access == MapAccess::kReadWrite;
  auto registered = device.Register(
      parts_.weights->bytes(), is_writable ? gpu::HostAccess::kReadWrite : gpu::HostAccess::kRead);
  if (is_writable) parts_.weights->MakeReadOnly();
  if (registered.ok()) {
    weights_registration_ = *std::move(registered);
  } else if (protocol::IdOf(registered.status()) == ErrorId::kUnsupported) {
    ASSIGN_OR_RETURN(ring_, gpu::PinnedRing::Create(device));
  } else {
    return registered.status();
  }
  registered = device.Register(parts_.grad->bytes(), gpu::HostAccess::kReadWrite);
  if (registered.ok()) {
    grad_registration_ = *std::move(registered);
  } else if (protocol::IdOf(registered.status()) != ErrorId::kUnsupported) {
    return registered.status();
  }
  ASSIGN_OR_RETURN(stream_, device.MakeStream());
  description_ = Describe();
  return absl::OkStatus();
}

void DeviceCopies::Close() {
  stream_.reset();
  grad_registration_.reset();
}

absl::Status DeviceCopies::CheckReach(std::span<const std::byte> bytes, uint64_t width) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % width != 0) {
    return MakeError(ErrorId::kRange, absl::StrCat("an address that is no multiple of the ", width,
                                                   " bytes that an element has"));
  }
  return link_.errors().StoreDevice(parts_.device->CheckReach(bytes));
}

absl::Status DeviceCopies::CopyToDevice(gpu::Stream& to_stream, std::span<std::byte> to,
                                        std::span<const std::byte> from, const WaitLimits& limits) {
  if (ring_ == nullptr) return to_stream.Copy(to, from);
  size_t begun = 0;
  absl::Status status;
  const auto copy = [&] {
    const absl::StatusOr<size_t> bytes =
        ring_->Begin(to_stream, to.subspan(begun), from.subspan(begun));
    status.Update(bytes.status());
    begun += bytes.value_or(0);
    return !status.ok() || begun == from.size();
  };
  RETURN_IF_ERROR(link_.WaitForCopies(copy, limits));
  return status;
}

bool DeviceCopies::HasEnded(const std::shared_ptr<const gpu::Event>& event) {
  if (event == nullptr) return true;
  const absl::StatusOr<bool> done = event->Done();
  return !link_.errors().StoreDevice(done.status()).ok() || *done;
}

absl::Status DeviceCopies::WaitFor(const std::shared_ptr<const gpu::Event>& event,
                                   const WaitLimits& limits) {
  return link_.WaitForCopies([&] { return HasEnded(event); }, limits);
}

std::string DeviceCopies::Describe() const {
  const bool was_writable = parts_.weights_access == MapAccess::kReadWrite;
  const char* const registered =
      was_writable ? "in place (mapped writable once, to register them)" : "in place";
  const size_t ring_mib = gpu::PinnedRing::kSlots * gpu::PinnedRing::kSlotBytes / protocol::kMiB;
  return absl::StrCat(
      std::string(parts_.device->name()), " reads weights ",
      ring_ == nullptr ? registered : absl::StrCat("through a ring of ", ring_mib, " MiB"),
      grad_registration_ == nullptr ? "; it cannot reach the gradients' memory by itself" : "");
}

}  // namespace forebay::client::internal
