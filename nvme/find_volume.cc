// SPDX-License-Identifier: Apache-2.0
#include "nvme/find_volume.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nvme/internal/disk_format.h"
#include "nvme/internal/page_buffer.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"

namespace forebay::nvme {
namespace {

using internal::Label;
using internal::Record;
using internal::VolumeId;
using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::kPageBytes;
using protocol::MakeError;

constexpr uint64_t kPagesMin = 6;  // labels and records of both ends
constexpr std::string_view kHint =
    "give all paths of the volume, in the order and with the sizes that it was made with; "
    "forebayd --reclaim gives up its jobs";

// Labels and records read from the ends of a path, at the positions that every volume uses for them.
struct Ends {
  std::string name;
  std::vector<Label> labels;
  std::vector<Record> head_records;
  std::vector<Record> tail_records;
};

std::string Text(size_t index, const Ends& path) {
  return absl::StrFormat("swap path %d (%s)", index, path.name);
}

// Opens the swap file or device of a path for reading. Returns an invalid descriptor if the file does not exist or cannot be
// opened. Sets `name` to the name of the file or device. Sets `end_bytes` to the end of its volume; a label may say otherwise.
protocol::UniqueFd OpenPath(const PathOptions& options, uint64_t& end_bytes, std::string& name) {
  struct stat status {};
  name = options.path;
  if (::stat(options.path.c_str(), &status) != 0) return {};
  if (S_ISDIR(status.st_mode)) {
    name += "/";
    name += kSwapFileName;
  }
  protocol::UniqueFd file(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file.valid() || ::fstat(file.get(), &status) != 0) return {};
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) return {};
  // A device may be larger than its volume.
  end_bytes = S_ISREG(status.st_mode) ? static_cast<uint64_t>(status.st_size)
                                      : protocol::RoundUp(options.capacity_bytes, kIoAlignment);
  return file;
}

class EndsReader {
 public:
  EndsReader(int file, Ends& ends) : file_(file), ends_(ends) {}

  absl::Status Read(uint64_t end_bytes) {
    RETURN_IF_ERROR(ReadLabel(0));
    if (!ends_.labels.empty()) end_bytes = ends_.labels[0].capacity_bytes;
    RETURN_IF_ERROR(ReadRecord(kPageBytes, ends_.head_records));
    RETURN_IF_ERROR(ReadRecord(2 * kPageBytes, ends_.head_records));
    if (end_bytes % kPageBytes != 0 || end_bytes < kPagesMin * kPageBytes) return absl::OkStatus();
    RETURN_IF_ERROR(ReadLabel(end_bytes - kPageBytes));
    RETURN_IF_ERROR(ReadRecord(end_bytes - 2 * kPageBytes, ends_.tail_records));
    return ReadRecord(end_bytes - 3 * kPageBytes, ends_.tail_records);
  }

 private:
  // Reads a page into page_. Bytes past the end of the file are zeros.
  absl::Status ReadPage(uint64_t offset_bytes) {
    std::ranges::fill(page_.bytes(), std::byte{0});
    const ssize_t read =
        ::pread(file_, page_.bytes().data(), kPageBytes, static_cast<off_t>(offset_bytes));
    if (read >= 0) return absl::OkStatus();
    return MakeError(ErrorId::kSwapIo,
                     protocol::ErrnoText(
                         absl::StrFormat("%s: read at offset %d", ends_.name, offset_bytes), errno),
                     "look at the device's health (dmesg)");
  }

  absl::Status ReadLabel(uint64_t offset_bytes) {
    RETURN_IF_ERROR(ReadPage(offset_bytes));
    const std::optional<uint32_t> version = internal::LabelVersion(page_.bytes());
    if (version && *version > internal::kFormatVersion) {
      return internal::OtherFormatError(ends_.name, *version);
    }
    Label label;
    if (DecodePage(page_.bytes(), label)) ends_.labels.push_back(label);
    return absl::OkStatus();
  }

  absl::Status ReadRecord(uint64_t offset_bytes, std::vector<Record>& records) {
    RETURN_IF_ERROR(ReadPage(offset_bytes));
    Record record;
    if (DecodePage(page_.bytes(), record)) records.push_back(record);
    return absl::OkStatus();
  }

  int file_;
  Ends& ends_;
  internal::PageBuffer page_{kPageBytes};
};

bool HasLabel(std::span<const Ends> paths, const VolumeId& volume) {
  return std::ranges::any_of(paths, [&](const Ends& path) {
    return std::ranges::find(path.labels, volume, &Label::volume) != path.labels.end();
  });
}

// Returns the records that count. All records at the head of the first path and at the tail of the last path count: these are
// the positions for records. The other ends hold data, which may be any bytes that a client wrote. A record at such an end
// counts only if one of the paths has a label of the record's volume.
std::vector<Record> RecordsOf(std::span<const Ends> paths) {
  std::vector<Record> records = paths.front().head_records;
  records.insert(records.end(), paths.back().tail_records.begin(), paths.back().tail_records.end());
  for (const Ends& path : paths) {
    for (const std::vector<Record>* end : {&path.head_records, &path.tail_records}) {
      std::ranges::copy_if(*end, std::back_inserter(records),
                           [&](const Record& record) { return HasLabel(paths, record.volume); });
    }
  }
  return records;
}

// Checks that no ledger was lost. Call it if no ledger was found. A volume has at least one intact record from its creation on.
absl::Status CheckNoneWasLost(std::span<const Ends> paths, std::span<const Record> records) {
  if (!records.empty()) return absl::OkStatus();
  for (size_t i = 0; i < paths.size(); ++i) {
    if (paths[i].labels.empty()) continue;
    const Label& label = paths[i].labels[0];
    if (label.paths > paths.size()) {
      return MakeError(ErrorId::kSwapPath,
                       absl::StrFormat("%s: it is path %d of a volume of %d paths, which may have "
                                       "durable jobs",
                                       Text(i, paths[i]), label.path_index, label.paths),
                       kHint);
    }
    return MakeError(ErrorId::kCorrupt,
                     absl::StrFormat("%s: no record of its volume is whole: the jobs in it, if it "
                                     "has any, cannot be found",
                                     Text(i, paths[i])),
                     "restore its jobs from a checkpoint, then start with forebayd --reclaim");
  }
  return absl::OkStatus();
}

const Record& NewestOf(const VolumeId& volume, std::span<const Record> records) {
  return *std::ranges::max_element(records, {}, [&](const Record& record) {
    return record.volume == volume ? record.sequence : 0;
  });
}

// Returns the label of the path in the volume. The error says what the path holds instead, or which size or order differs.
absl::StatusOr<Label> PartOf(const VolumeId& volume, size_t index, size_t count,
                             const PathOptions& options, const Ends& path) {
  const auto label = std::ranges::find(path.labels, volume, &Label::volume);
  const auto differs = [&](std::string_view what) {
    return MakeError(ErrorId::kSwapPath, absl::StrFormat("%s: %s", Text(index, path), what), kHint);
  };
  if (label == path.labels.end()) {
    return differs(path.labels.empty()
                       ? "it holds no part of the volume with durable jobs that the others are of"
                       : "it is of another volume than the path with the durable jobs");
  }
  if (label->path_index != index || label->paths != count) {
    return differs(absl::StrFormat(
        "it is path %d of a volume of %d paths with durable jobs, and given as path %d of %d",
        label->path_index, label->paths, index, count));
  }
  const uint64_t capacity_bytes = protocol::RoundUp(options.capacity_bytes, kIoAlignment);
  if (label->capacity_bytes != capacity_bytes) {
    return differs(absl::StrFormat(
        "its volume with durable jobs was made with %s (%d bytes), and is given with %s (%d)",
        FormatBytes(label->capacity_bytes), label->capacity_bytes, FormatBytes(capacity_bytes),
        capacity_bytes));
  }
  return *label;
}

}  // namespace

absl::StatusOr<std::optional<FoundVolume>> FindVolume(std::span<const PathOptions> paths) {
  if (paths.empty()) return std::nullopt;
  std::vector<Ends> ends(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) {
    uint64_t end_bytes = 0;
    const protocol::UniqueFd file = OpenPath(paths[i], end_bytes, ends[i].name);
    if (!file.valid()) continue;
    RETURN_IF_ERROR(EndsReader(file.get(), ends[i]).Read(end_bytes));
  }
  const std::vector<Record> records = RecordsOf(ends);
  const auto committed =
      std::ranges::find_if(records, [](const Record& record) { return record.sequence > 0; });
  if (committed == records.end()) {
    RETURN_IF_ERROR(CheckNoneWasLost(ends, records));
    return std::nullopt;
  }
  const VolumeId volume = committed->volume;
  if (!HasLabel(ends, volume)) {
    return MakeError(
        ErrorId::kCorrupt,
        absl::StrFormat("%s: no label of the volume with durable jobs is whole", Text(0, ends[0])),
        "restore its jobs from a checkpoint, then start with forebayd --reclaim");
  }
  FoundVolume found{.slots = NewestOf(volume, records).slots};
  for (size_t i = 0; i < paths.size(); ++i) {
    ASSIGN_OR_RETURN(const Label label, PartOf(volume, i, paths.size(), paths[i], ends[i]));
    found.ledger_bytes_max = label.ledger_bytes_max;
  }
  return found;
}

absl::StatusOr<std::unique_ptr<Volume>> InspectVolume(const std::vector<PathOptions>& paths,
                                                      IoEngine& engine) {
  ASSIGN_OR_RETURN(const std::optional<FoundVolume> found, FindVolume(paths));
  if (!found) return nullptr;
  return Volume::Open(
      {.paths = paths, .mode = OpenMode::kInspect, .ledger_bytes_max = found->ledger_bytes_max},
      engine);
}

absl::StatusOr<std::vector<PathOptions>> WithSizes(std::span<const PathOptions> paths) {
  std::vector<PathOptions> sized(paths.begin(), paths.end());
  for (size_t i = 0; i < sized.size(); ++i) {
    Ends path;
    uint64_t end_bytes = 0;
    const protocol::UniqueFd file = OpenPath(sized[i], end_bytes, path.name);
    if (!file.valid()) {
      return MakeError(ErrorId::kSwapPath,
                       protocol::ErrnoText(absl::StrCat(Text(i, path), ": open"), errno),
                       "name the directories or devices of swap.paths, as root or the daemon's "
                       "user");
    }
    RETURN_IF_ERROR(EndsReader(file.get(), path).Read(end_bytes));
    if (!path.labels.empty()) sized[i].capacity_bytes = path.labels[0].capacity_bytes;
    if (sized[i].capacity_bytes > 0) continue;
    return MakeError(ErrorId::kSwapPath,
                     absl::StrCat(Text(i, path), ": it has no whole label of a volume"),
                     "give the daemon's configuration with --config, which has the path's size");
  }
  return sized;
}

}  // namespace forebay::nvme
