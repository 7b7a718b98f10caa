// SPDX-License-Identifier: Apache-2.0
// Entries of a record (KeptRecord). An entry is the size and the checksum of a message (RecordEntry of ledger.capnp), then the
// message, which has one action of record_actions.h.
#pragma once

#include <capnp/message.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/record_actions.h"
#include "daemon/core/blocks/record_sizes.h"
#include "daemon/exec/recovery/ledger.capnp.h"

namespace forebay::daemon {

// The order of a decision (RecordDecision), which is an entry of its own: once the step is published, the order does not count any
// more.
struct RecordOrder {
  const RecordDecision& decision;
};

// Returns E_CORRUPT for a record with this damage.
absl::Status CorruptRecord(const std::string& what);

struct EntryHead {
  uint64_t message_bytes = 0;
  uint64_t checksum = 0;
};

// Returns an upper bound of the bytes of the entry.
uint64_t EntryBytesMax(const RecordBlock& record);
uint64_t EntryBytesMax(const RecordSums& record);
uint64_t EntryBytesMax(const RecordPrepared& record);
uint64_t EntryBytesMax(const RecordDecision& record);
uint64_t EntryBytesMax(const RecordOrder& record);
uint64_t EntryBytesMax(const RecordTrust& record);
uint64_t EntryBytesMax(const auto& /*small*/) { return kSmallEntryBytes; }

// Returns how many bytes at the beginning of an entry must be zeros before its message is built. The bytes behind them are a list,
// and every byte of the list is written.
inline uint64_t ZeroedBytes(const RecordBlock& /*record*/) { return kPlaceEntryBytes; }
uint64_t ZeroedBytes(const auto& record) { return EntryBytesMax(record); }

void SetMessage(const RecordBlock& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordInstalled& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordStaged& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordSums& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordAttempt& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordPrepared& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordDecision& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordOrder& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordTrust& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordStep& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordUpdates& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordLease& record, schema::RecordEntry::Builder to);
void SetMessage(const RecordLeaseEnd& record, schema::RecordEntry::Builder to);

// Completes the entry of a message that was built behind its head. Returns the bytes of the entry.
uint64_t FinishEntry(capnp::MessageBuilder& message, std::span<std::byte> entry);

// Writes the entry to the beginning of `entry`, which has EntryBytesMax() bytes or more and begins at a word. Returns the bytes of
// the entry. Does not use the heap.
template <typename Record>
uint64_t WriteEntry(const Record& record, std::span<std::byte> entry) {
  entry = entry.first(EntryBytesMax(record));
  // FlatMessageBuilder requires zeros.
  std::ranges::fill(entry.first(ZeroedBytes(record)), std::byte{0});
  const std::span<std::byte> words = entry.subspan(sizeof(EntryHead));
  capnp::FlatMessageBuilder message(kj::arrayPtr(reinterpret_cast<capnp::word*>(words.data()),
                                                 words.size() / sizeof(capnp::word)));
  SetMessage(record, message.initRoot<schema::RecordEntry>());
  return FinishEntry(message, entry);
}

// Returns the bytes of the entry at the beginning of `bytes`.
//
// Errors  E_CORRUPT  no entry, or a damaged one.
absl::StatusOr<uint64_t> CheckEntry(std::span<const std::byte> bytes);

// Reads the entry at the beginning of `bytes`, which CheckEntry() has found intact. The message may still throw kj::Exception.
class EntryReader {
 public:
  explicit EntryReader(std::span<const std::byte> bytes);
  schema::RecordEntry::Reader Get() { return reader_.getRoot<schema::RecordEntry>(); }

 private:
  kj::ArrayPtr<const capnp::word> words_;
  capnp::SegmentArrayMessageReader reader_;
};

}  // namespace forebay::daemon
