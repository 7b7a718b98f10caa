// SPDX-License-Identifier: Apache-2.0
#include "nvme/internal/disk_format.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "absl/strings/str_format.h"
#include "nvme/checksum.h"
#include "protocol/error.h"

namespace forebay::nvme::internal {
namespace {

using protocol::kPageBytes;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr uint64_t kRecordsBytes = 2 * kPageBytes;

uint64_t Hash(std::span<const std::byte> page) {
  return Checksum(Identity{}, page.first(kPageChecksumOffset));
}

template <typename T>
bool Decode(std::span<const std::byte> page, uint64_t magic, T& value) {
  if (PageChecksum(page) != Hash(page)) return false;
  std::memcpy(&value, page.data(), sizeof(value));
  return value.magic == magic && value.version == kFormatVersion;
}

}  // namespace

template <typename T>
void EncodePage(const T& value, std::span<std::byte> page) {
  std::fill(page.begin(), page.end(), std::byte{0});
  std::memcpy(page.data(), &value, sizeof(value));
  const uint64_t hash = Hash(page);
  std::memcpy(page.data() + kPageChecksumOffset, &hash, sizeof(hash));
}

template void EncodePage<Label>(const Label&, std::span<std::byte>);
template void EncodePage<Record>(const Record&, std::span<std::byte>);

bool DecodePage(std::span<const std::byte> page, Label& label) {
  return Decode(page, kLabelMagic, label);
}

bool DecodePage(std::span<const std::byte> page, Record& record) {
  return Decode(page, kRecordMagic, record);
}

std::optional<uint32_t> LabelVersion(std::span<const std::byte> page) {
  Label label;
  if (PageChecksum(page) != Hash(page)) return std::nullopt;
  std::memcpy(&label, page.data(), sizeof(label));
  if (label.magic != kLabelMagic) return std::nullopt;
  return label.version;
}

std::optional<uint64_t> AreaBytes(uint64_t slots, uint64_t ledger_bytes) {
  constexpr uint64_t kBytesMax = uint64_t{1} << 48;
  if (slots > kBytesMax / sizeof(SlotEntry) || ledger_bytes > kBytesMax) return std::nullopt;
  return protocol::RoundUp(slots * sizeof(SlotEntry) + ledger_bytes, kPageBytes);
}

absl::Status OtherFormatError(std::string_view path, uint32_t version) {
  return protocol::MakeError(
      protocol::ErrorId::kSwapPath,
      absl::StrFormat("%s: it holds a volume of swap format %d; this version of Forebay "
                      "reads format %d",
                      path, version, kFormatVersion),
      "start the version that made it, or delete the file or wipe the device if "
      "nothing of it is needed");
}

uint64_t PageChecksum(std::span<const std::byte> page) {
  uint64_t stored = 0;
  std::memcpy(&stored, page.data() + kPageChecksumOffset, sizeof(stored));
  return stored;
}

bool IsZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte value) { return value == std::byte{0}; });
}

uint64_t AreaChecksum(const Record& record, std::span<const std::byte> area) {
  Identity identity{};
  std::memcpy(identity.data(), record.volume.data(), record.volume.size());
  std::memcpy(identity.data() + record.volume.size(), &record.sequence, sizeof(record.sequence));
  return Checksum(identity, area);
}

Geometry::Geometry(std::span<const uint64_t> capacity_bytes, uint64_t ledger_bytes_max)
    : paths_(static_cast<uint32_t>(capacity_bytes.size())),
      area_bytes_(protocol::RoundUp(ledger_bytes_max, kPageBytes)) {
  std::copy(capacity_bytes.begin(), capacity_bytes.end(), capacity_bytes_.begin());
}

uint64_t Geometry::head_bytes(uint32_t path) const {
  return kPageBytes + (path == 0 ? kRecordsBytes + 2 * area_bytes_ : 0);
}

uint64_t Geometry::tail_bytes(uint32_t path) const {
  return kPageBytes + (path == paths_ - 1 ? kRecordsBytes + 2 * area_bytes_ : 0);
}

Place Geometry::LabelPlace(uint32_t path, uint32_t copy) const {
  return {.path = path, .offset_bytes = copy == 0 ? 0 : capacity_bytes_[path] - kPageBytes};
}

Place Geometry::RecordPlace(uint32_t area, uint32_t copy) const {
  if (copy == 0) return {.path = 0, .offset_bytes = kPageBytes * (1 + area)};
  return {
      .path = paths_ - 1,
      .offset_bytes = capacity_bytes_[paths_ - 1] - kPageBytes - kRecordsBytes + kPageBytes * area};
}

Place Geometry::AreaPlace(uint32_t area, uint32_t copy) const {
  const uint64_t within = area_bytes_ * area;
  if (copy == 0) return {.path = 0, .offset_bytes = kPageBytes + kRecordsBytes + within};
  return {.path = paths_ - 1, .offset_bytes = data_end(paths_ - 1) + within};
}

uint64_t Geometry::data_begin(uint32_t path) const { return head_bytes(path); }

uint64_t Geometry::data_end(uint32_t path) const {
  return capacity_bytes_[path] - tail_bytes(path);
}

uint64_t Geometry::capacity_bytes_min(uint32_t path) const {
  return head_bytes(path) + tail_bytes(path) + kPageBytes;
}

}  // namespace forebay::nvme::internal
