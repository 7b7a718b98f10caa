// What lies where on the swap paths, and how labels, records and block tables look. Little-endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "nvme/checksum.h"
#include "nvme/io/io_engine.h"
#include "protocol/units.h"

namespace forebay::nvme::internal {

using VolumeId = std::array<std::byte, 16>;

inline constexpr uint64_t kLabelMagic = 0x4C59414245524F46;   // "FOREBAYL"
inline constexpr uint64_t kRecordMagic = 0x5259414245524F46;  // "FOREBAYR"
inline constexpr uint32_t kFormatVersion = 2;
inline constexpr uint8_t kNoSlot = 0xFF;
inline constexpr uint32_t kCopies = 2;  // of everything that is not data: head and tail

// At both ends of every path.
struct Label {
  uint64_t magic = kLabelMagic;
  uint32_t version = kFormatVersion;
  uint32_t path_index = 0;
  VolumeId volume{};
  uint64_t capacity_bytes = 0;
  uint32_t paths = 0;
  uint32_t extents_max = 0;
};
static_assert(sizeof(Label) == 48);

// The root of a durable state.
struct Record {
  uint64_t magic = kRecordMagic;
  uint32_t version = kFormatVersion;
  uint32_t table_slot = 0;  // which table area
  VolumeId volume{};
  uint64_t sequence = 0;       // from 1
  uint64_t prev_sequence = 0;  // of the last durable record before this one, 0: none
  uint64_t prev_hash = 0;      // its checksum
  uint64_t table_bytes = 0;    // a multiple of 4096, from the start of the area; may be 0
  uint64_t table_checksum = 0;
};
static_assert(sizeof(Record) == 72);

// One extent of a block table; its index is the ExtentId.
struct TableEntry {
  uint64_t size_bytes = 0;  // 0: not allocated
  uint64_t offset_bytes[2] = {0, 0};
  uint64_t content_bytes = 0;
  uint64_t checksum = 0;
  Identity identity{};
  uint16_t path[2] = {0, 0};
  uint8_t current = kNoSlot;
  uint8_t unused[3] = {0, 0, 0};
};
static_assert(sizeof(TableEntry) == 80);

// Labels and records fill one page and end in the XXH3 of what is before.
inline constexpr size_t kPageChecksumOffset = protocol::kPageBytes - sizeof(uint64_t);

template <typename T>
void EncodePage(const T& value, std::span<std::byte> page);

// False where the page is not a whole one: wrong checksum, magic or version.
bool DecodePage(std::span<const std::byte> page, Label& label);
bool DecodePage(std::span<const std::byte> page, Record& record);

uint64_t PageChecksum(std::span<const std::byte> page);  // the one that is stored in it
bool IsZero(std::span<const std::byte> bytes);

// Of a table, with the volume and the sequence that it belongs to.
uint64_t TableChecksum(const Record& record, std::span<const std::byte> table);

// A 4 KiB multiple on one path.
struct Place {
  uint32_t path = 0;
  uint64_t offset_bytes = 0;
};

// Where things are:
//   every path   [label][...][label]
//   first path   [label][record 0][record 1][table 0][table 1][data...
//   last path    ...data][table 0][table 1][record 0][record 1][label]
// Copy 0 is at the head of the first path, copy 1 at the tail of the last one, so that no single
// misdirected write reaches both.
class Geometry {
 public:
  Geometry(std::span<const uint64_t> capacity_bytes, uint32_t extents_max);

  uint64_t table_area_bytes() const { return table_area_bytes_; }
  Place LabelPlace(uint32_t path, uint32_t copy) const;
  Place RecordPlace(uint32_t slot, uint32_t copy) const;
  Place TablePlace(uint32_t slot, uint32_t copy) const;
  uint64_t data_begin(uint32_t path) const;
  uint64_t data_end(uint32_t path) const;

  // The smallest capacity that leaves room for one page of data.
  uint64_t capacity_bytes_min(uint32_t path) const;

 private:
  uint64_t head_bytes(uint32_t path) const;
  uint64_t tail_bytes(uint32_t path) const;

  std::array<uint64_t, 16> capacity_bytes_{};
  uint32_t paths_;
  uint64_t table_area_bytes_;
};

}  // namespace forebay::nvme::internal
