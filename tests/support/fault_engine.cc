// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_engine.h"

#include <algorithm>

namespace forebay::testing {

using nvme::Completion;
using nvme::IoKind;
using nvme::IoRequest;

void FaultEngine::SetFault(IoFault fault) {
  fault_ = fault;
  operations_ = 0;
  fired_ = 0;
}

bool FaultEngine::Fires() {
  const uint64_t operation = operations_++;
  return fault_.count > 0 && operation >= fault_.operation &&
         operation - fault_.operation < fault_.count;
}

absl::Status FaultEngine::Submit(const IoRequest& request) {
  const bool is_short = fault_.error_number == 0 && !fault_.hangs;
  if (!Fires() || (is_short && request.kind == IoKind::kFlush)) return inner_.Submit(request);
  ++fired_;
  if (fault_.hangs) {
    hung_.push_back(request);
    return absl::OkStatus();
  }
  if (!is_short) {
    ready_.push_back(
        {.token = request.token, .result = -fault_.error_number, .kind = request.kind});
    return absl::OkStatus();
  }
  const auto asked = static_cast<int64_t>(request.size_bytes);
  const int64_t reported = std::clamp<int64_t>(
      fault_.short_by ? asked - fault_.short_bytes : fault_.short_bytes, 0, asked);
  const size_t moved = static_cast<size_t>(reported) / nvme::kIoAlignment * nvme::kIoAlignment;
  if (moved == 0) {
    ready_.push_back({.token = request.token, .result = reported, .kind = request.kind});
    return absl::OkStatus();
  }
  IoRequest part = request;
  part.size_bytes = moved;
  short_.emplace_back(part, reported);
  return inner_.Submit(part);
}

absl::Status FaultEngine::EndHung() {
  for (const IoRequest& request : std::exchange(hung_, {})) {
    const absl::Status status = Submit(request);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> FaultEngine::Wait(std::chrono::nanoseconds timeout,
                                         std::span<Completion> out) {
  size_t count = std::min(out.size(), ready_.size());
  std::copy_n(ready_.begin(), count, out.begin());
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<ptrdiff_t>(count));
  if (count == out.size()) return count;

  const absl::StatusOr<size_t> inner =
      inner_.Wait(count > 0 ? std::chrono::nanoseconds(0) : timeout, out.subspan(count));
  if (!inner.ok()) return inner.status();
  for (Completion& completion : out.subspan(count, *inner)) {
    const auto entry = std::find_if(short_.begin(), short_.end(), [&](const auto& candidate) {
      return candidate.first.token == completion.token && completion.kind == candidate.first.kind;
    });
    if (entry == short_.end()) continue;
    if (completion.result >= 0) completion.result = entry->second;
    short_.erase(entry);
  }
  return count + *inner;
}

}  // namespace forebay::testing
