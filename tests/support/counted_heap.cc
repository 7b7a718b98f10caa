// SPDX-License-Identifier: Apache-2.0
#include "tests/support/counted_heap.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "protocol/os/status_macros.h"

namespace forebay::testing {
namespace {

std::atomic<bool (*)()> counted = nullptr;
std::atomic<uint64_t> count = 0;

void* Allocate(size_t size_bytes, size_t align_bytes) {
  bool (*const is_counted)() = counted;
  if (is_counted != nullptr && is_counted()) ++count;
  void* const memory =
      std::aligned_alloc(align_bytes, (size_bytes / align_bytes + 1) * align_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void CountedHeap::Start(bool (*is_counted)()) { counted = is_counted; }
void CountedHeap::Stop() { counted = nullptr; }
uint64_t CountedHeap::allocations() { return count; }

absl::StatusOr<uint64_t> TrainUntilSteady(std::barrier<>& ranks,
                                          const std::function<absl::Status(uint64_t t)>& step) {
  const absl::Cleanup leave = [&ranks] { ranks.arrive_and_drop(); };
  uint64_t alike = 0;
  uint64_t seen = 0;
  for (uint64_t t = 1; t <= kStepsMax && alike < kStepsAlike; ++t) {
    RETURN_IF_ERROR(step(t));
    ranks.arrive_and_wait();
    const uint64_t now = CountedHeap::allocations();
    ranks.arrive_and_wait();
    alike = now == std::exchange(seen, now) ? alike + 1 : 0;
  }
  return alike;
}

}  // namespace forebay::testing

void* operator new(size_t size_bytes) {
  return forebay::testing::Allocate(size_bytes, alignof(std::max_align_t));
}
void* operator new(size_t size_bytes, std::align_val_t align) {
  return forebay::testing::Allocate(size_bytes, static_cast<size_t>(align));
}
// Sanitizers define this operator too; their memory must not reach the delete operators below.
void* operator new(size_t size_bytes, const std::nothrow_t&) noexcept {
  return forebay::testing::Allocate(size_bytes, alignof(std::max_align_t));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
