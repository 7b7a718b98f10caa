// SPDX-License-Identifier: Apache-2.0
// The two ends of one single-producer single-consumer ring that lies in memory shared with another
// process.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"

namespace forebay::protocol {

// Returns E_RING: the peer's index has a value that our code never writes. `own` is this side's index, `peer` the other side's.
absl::Status BadRingIndex(const char* which, uint64_t own, uint64_t peer);

// Writes the header of a zeroed ring for a client that speaks `version`. The daemon calls this before it passes the memory to
// the client.
void FormatRing(RingMemory& ring, uint32_t version = kProtocolVersion);

// Checks the header of a ring.
//
// Errors  E_RING  another magic, version or size.
absl::Status CheckRingHeader(const RingMemory& ring);

namespace internal {

// Shared words are loaded and stored one by one, each once, so that nothing changes between check
// and use.
template <typename Word>
Word LoadWord(const Word& word, std::memory_order order) {
  return std::atomic_ref<Word>(const_cast<Word&>(word)).load(order);
}

template <typename Word>
void StoreWord(Word& word, Word value, std::memory_order order) {
  std::atomic_ref<Word>(word).store(value, order);
}

template <typename Entry>
Entry LoadEntry(const Entry& shared) {
  static_assert(std::is_trivially_copyable_v<Entry> && sizeof(Entry) % sizeof(uint64_t) == 0);
  std::array<uint64_t, sizeof(Entry) / sizeof(uint64_t)> words;
  const auto* from = reinterpret_cast<const uint64_t*>(&shared);
  for (size_t i = 0; i < words.size(); ++i) words[i] = LoadWord(from[i], std::memory_order_relaxed);
  Entry entry;
  std::memcpy(&entry, words.data(), sizeof(entry));
  return entry;
}

template <typename Entry>
void StoreEntry(Entry& shared, const Entry& entry) {
  std::array<uint64_t, sizeof(Entry) / sizeof(uint64_t)> words;
  std::memcpy(words.data(), &entry, sizeof(entry));
  auto* to = reinterpret_cast<uint64_t*>(&shared);
  for (size_t i = 0; i < words.size(); ++i) StoreWord(to[i], words[i], std::memory_order_relaxed);
}

}  // namespace internal

enum class PushResult : uint8_t {
  kFull,          // nothing was written
  kPushed,        // the consumer is awake
  kPushedAsleep,  // the consumer may sleep: ring its doorbell
};

// Writes entries. Checks the consumer's index: it may have moved by no more than the number of entries in the ring.
//
// Threads  One. The consumer is another thread or process.
// Limits   Never blocks, no system call.
template <typename Entry>
class RingProducer {
 public:
  RingProducer(RingLine& tail_line, const RingLine& head_line, std::span<Entry> entries)
      : tail_line_(&tail_line), head_line_(&head_line), entries_(entries) {}

  // Errors  E_RING  the consumer's index went backwards or past the tail. Nothing was written.
  absl::StatusOr<PushResult> Push(const Entry& entry) {
    if (tail_ - head_ == entries_.size()) {
      RETURN_IF_ERROR(Refresh());
      if (tail_ - head_ == entries_.size()) return PushResult::kFull;
    }
    internal::StoreEntry(entries_[tail_ % entries_.size()], entry);
    ++tail_;
    internal::StoreWord(tail_line_->index, tail_, std::memory_order_seq_cst);
    const bool asleep = internal::LoadWord(head_line_->sleeping, std::memory_order_seq_cst) != 0;
    return asleep ? PushResult::kPushedAsleep : PushResult::kPushed;
  }

  // Number of entries that the consumer has taken so far, read from its line and checked. Errors as Push.
  absl::StatusOr<uint64_t> ConsumedHead() {
    RETURN_IF_ERROR(Refresh());
    return head_;
  }

  uint64_t pushed() const { return tail_; }

 private:
  absl::Status Refresh() {
    const uint64_t head = internal::LoadWord(head_line_->index, std::memory_order_acquire);
    if (head - head_ > tail_ - head_) return BadRingIndex("consumer", tail_, head);
    head_ = head;
    return absl::OkStatus();
  }

  RingLine* tail_line_;
  const RingLine* head_line_;
  std::span<Entry> entries_;
  uint64_t tail_ = 0;  // private copies: the shared words are only written from them, or checked
  uint64_t head_ = 0;
};

// Tests alone switch the check of a peer's index off, to show what it prevents.
enum class RangeCheck : uint8_t { kOn, kOffForTest };

// Takes entries out, each copied once.
//
// Threads  One. The producer is another thread or process.
// Limits   Never blocks, no system call.
template <typename Entry, RangeCheck kCheck = RangeCheck::kOn>
class RingConsumer {
 public:
  RingConsumer(RingLine& head_line, const RingLine& tail_line, std::span<const Entry> entries)
      : head_line_(&head_line), tail_line_(&tail_line), entries_(entries) {}

  // Takes the next entry. Returns nothing if the ring is empty.
  //
  // Errors  E_RING  the producer's index went backwards, or further ahead than the ring is long.
  absl::StatusOr<std::optional<Entry>> Pop() {
    if (head_ == tail_) {
      RETURN_IF_ERROR(Refresh(std::memory_order_acquire));
      if (head_ == tail_) return std::optional<Entry>();
    }
    const Entry entry = internal::LoadEntry(entries_[head_ % entries_.size()]);
    ++head_;
    internal::StoreWord(head_line_->index, head_, std::memory_order_release);
    return std::optional<Entry>(entry);
  }

  // Requests a doorbell and looks at the ring once more. Returns true if the ring is empty: every later push will ring. The
  // caller then waits and calls EndSleep(). Returns false if an entry has arrived: the request is then withdrawn. Errors as
  // Pop.
  absl::StatusOr<bool> PrepareSleep() {
    internal::StoreWord<uint32_t>(head_line_->sleeping, 1, std::memory_order_seq_cst);
    const absl::Status status = Refresh(std::memory_order_seq_cst);
    if (status.ok() && head_ == tail_) return true;
    EndSleep();
    RETURN_IF_ERROR(status);
    return false;
  }

  void EndSleep() {
    internal::StoreWord<uint32_t>(head_line_->sleeping, 0, std::memory_order_relaxed);
  }

  uint64_t popped() const { return head_; }

 private:
  absl::Status Refresh(std::memory_order order) {
    const uint64_t tail = internal::LoadWord(tail_line_->index, order);
    const bool impossible = tail - head_ > entries_.size() || tail - head_ < tail_ - head_;
    if (kCheck == RangeCheck::kOn && impossible) {
      return BadRingIndex("producer", head_, tail);
    }
    tail_ = tail;
    return absl::OkStatus();
  }

  RingLine* head_line_;
  const RingLine* tail_line_;
  std::span<const Entry> entries_;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;
};

}  // namespace forebay::protocol
