// SPDX-License-Identifier: Apache-2.0
// Layout of the swap paths, and format of labels, records and ledgers. Little-endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "nvme/io/io_engine.h"
#include "nvme/slot_map.h"
#include "protocol/units.h"

namespace forebay::nvme::internal {

using VolumeId = std::array<std::byte, 16>;

inline constexpr uint64_t kLabelMagic = 0x4C59414245524F46;   // "FOREBAYL"
inline constexpr uint64_t kRecordMagic = 0x5259414245524F46;  // "FOREBAYR"
inline constexpr uint32_t kFormatVersion = 3;
// Versions up to this one never held anything durable.
inline constexpr uint32_t kOldVersionMax = 2;
// Number of copies of each label, record and ledger: one at the head, one at the tail.
inline constexpr uint32_t kCopies = 2;

// Label at both ends of every path.
struct Label {
  uint64_t magic = kLabelMagic;
  uint32_t version = kFormatVersion;
  uint32_t path_index = 0;
  VolumeId volume{};
  uint64_t capacity_bytes = 0;
  uint64_t ledger_bytes_max = 0;
  uint32_t paths = 0;
  uint32_t unused = 0;
};
static_assert(sizeof(Label) == 56);

// The root of a durable state.
struct Record {
  uint64_t magic = kRecordMagic;
  uint32_t version = kFormatVersion;
  // Number of the ledger area: 0 or 1.
  uint32_t area = 0;
  VolumeId volume{};
  // Sequence number of the record, from 1.
  uint64_t sequence = 0;
  // Sequence and checksum of the previous durable record; 0 if the record has no predecessor.
  uint64_t prev_sequence = 0;
  uint64_t prev_hash = 0;
  // Number of slot entries at the beginning of the area. The ledger follows them.
  uint64_t slots = 0;
  uint64_t ledger_bytes = 0;
  uint64_t area_checksum = 0;
};
static_assert(sizeof(Record) == 80);

// A slot that the ledger names.
struct SlotEntry {
  uint32_t path = 0;
  uint32_t unused = 0;
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
};
static_assert(sizeof(SlotEntry) == 24);

// Returns the bytes of an area with `slots` slot entries and a ledger, rounded up to whole pages. Returns nothing if the sum
// overflows.
std::optional<uint64_t> AreaBytes(uint64_t slots, uint64_t ledger_bytes);

// Offset of the checksum in a label or record. Each fills a page, which ends in the XXH3 of the bytes before.
inline constexpr size_t kPageChecksumOffset = protocol::kPageBytes - sizeof(uint64_t);

template <typename T>
void EncodePage(const T& value, std::span<std::byte> page);

// Decode a label or a record. Return false if the checksum, magic or version of the page is wrong.
bool DecodePage(std::span<const std::byte> page, Label& label);
bool DecodePage(std::span<const std::byte> page, Record& record);

// Returns the version of an intact label of any version. Returns nothing if the page holds no intact label.
std::optional<uint32_t> LabelVersion(std::span<const std::byte> page);
// Returns the error (E_SWAP_PATH) of a path whose label has another version that this release cannot read.
absl::Status OtherFormatError(std::string_view path, uint32_t version);

// Returns the checksum that is stored in the page.
uint64_t PageChecksum(std::span<const std::byte> page);
bool IsZero(std::span<const std::byte> bytes);

// Returns the checksum of an area's slot entries and ledger, with the volume and the sequence of its record.
uint64_t AreaChecksum(const Record& record, std::span<const std::byte> area);

// Position on a path, a multiple of 4 KiB.
struct Place {
  uint32_t path = 0;
  uint64_t offset_bytes = 0;
};

// Places of labels, records, ledgers and data:
//   every path   [label][...][label]
//   first path   [label][record 0][record 1][ledger 0][ledger 1][data...
//   last path    ...data][ledger 0][ledger 1][record 0][record 1][label]
// Copy 0 is at the head of the first path, copy 1 at the tail of the last one, so that no single
// misdirected write reaches both.
class Geometry {
 public:
  Geometry(std::span<const uint64_t> capacity_bytes, uint64_t ledger_bytes_max);

  uint64_t area_bytes() const { return area_bytes_; }
  Place LabelPlace(uint32_t path, uint32_t copy) const;
  Place RecordPlace(uint32_t area, uint32_t copy) const;
  Place AreaPlace(uint32_t area, uint32_t copy) const;
  uint64_t data_begin(uint32_t path) const;
  uint64_t data_end(uint32_t path) const;

  // Returns the smallest capacity that has room for one page of data.
  uint64_t capacity_bytes_min(uint32_t path) const;

 private:
  uint64_t head_bytes(uint32_t path) const;
  uint64_t tail_bytes(uint32_t path) const;

  std::array<uint64_t, 16> capacity_bytes_{};
  uint32_t paths_;
  uint64_t area_bytes_;
};

}  // namespace forebay::nvme::internal
