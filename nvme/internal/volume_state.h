// What a Volume knows, and the steps of its requests. Implemented by the volume_*.cc files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/internal/disk_format.h"
#include "nvme/internal/page_buffer.h"
#include "nvme/internal/protections.h"
#include "nvme/internal/space_map.h"
#include "nvme/volume.h"

namespace forebay::nvme {

namespace internal {

enum class SlotContent : uint8_t { kEmpty, kWriting, kWhole, kBroken };

struct Slot {
  uint32_t path = 0;
  uint64_t offset_bytes = 0;
  SlotContent content = SlotContent::kEmpty;
  bool doubted = false;       // a failed flush should have covered it
  uint32_t readers = 0;       // reads in flight
  uint64_t write_number = 0;  // among the writes of its path
  uint64_t content_bytes = 0;
  uint64_t checksum = 0;
  Identity identity{};
};

struct Extent {
  uint64_t size_bytes = 0;    // 0: never allocated, or space given back
  bool retired = false;       // freed, but a record may name its slots
  bool writing = false;       // a write is in flight or waits for a commit
  uint32_t busy = 0;          // requests in flight
  uint8_t current = kNoSlot;  // what Read() reads
  uint8_t written = kNoSlot;  // finished, waits for Publish()
  uint8_t pinned = 0;         // bit s: a record that reopening may find names slot s
  uint8_t pinned_before = 0;  // the same before the pending commit
  std::array<Slot, 2> slots;

  bool allocated() const { return size_bytes > 0 && !retired; }
};

struct Path {
  std::unique_ptr<SwapFile> file;
  std::optional<FileIndex> index;  // at the engine
  uint32_t weight = 1;
  SpaceMap space;
  std::array<uint64_t, 2> slot_bytes{};  // allocated for first and for second slots
  uint64_t writes = 0;                   // finished
  uint64_t flushed = 0;                  // those up to this number are durable
  PathStats stats;                       // capacity_bytes from the start
};

enum class Job : uint8_t { kRead, kWrite, kZero, kCommitPart };

// One transfer, in as many engine requests as it takes.
struct Request {
  bool active = false;
  bool deferred = false;  // a write that waits for the end of the commit
  Job job = Job::kRead;
  IoKind io = IoKind::kRead;
  uint32_t generation = 0;
  uint64_t token = 0;  // the caller's
  uint32_t path = 0;
  uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  size_t size_bytes = 0;
  size_t done_bytes = 0;
  int stalls = 0;  // in a row without progress
  int errors = 0;
  ExtentId extent{};
  uint8_t slot = 0;
  uint64_t covers = 0;  // flush: the path's writes when it was submitted
  uint64_t checksum = 0;
  Identity identity{};
  std::vector<ExtentId> zero_extents;  // kZero: what is left, `extent` and `slot` first
  size_t zero_next = 0;                // slots begun, two an extent
  size_t zero_piece_bytes = 0;         // of the caller's zeros
  uint64_t zero_offset_bytes = 0;      // within the slot
};

enum class CommitPhase : uint8_t {
  kIdle,
  kFlushData,
  kWriteTable,
  kFlushTable,
  kWriteRecord,
  kFlushRecord
};

struct CommitState {
  CommitPhase phase = CommitPhase::kIdle;
  uint32_t parts = 0;  // requests of this phase in flight
  uint64_t token = 0;
  absl::Status first_error;
  Record record;
  std::vector<uint8_t> snapshot;  // current slot by extent
};

}  // namespace internal

struct Volume::State {
  State(IoEngine& io_engine, const internal::Geometry& disk_geometry);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  // volume_open.cc
  absl::Status Initialise();
  absl::Status Recover();
  absl::Status WriteNow(internal::Place place, const internal::PageBuffer& page);
  absl::Status ReadNow(internal::Place place, std::span<std::byte> bytes);
  absl::Status SyncNow();
  absl::Status FindVolume();
  absl::StatusOr<std::vector<internal::Record>> FindRecords(bool& never_committed);
  absl::StatusOr<bool> LoadTable(const internal::Record& record);
  bool AdoptTable(std::span<const std::byte> bytes);

  // volume_extents.cc
  absl::StatusOr<std::vector<ExtentId>> Allocate(uint32_t count, uint64_t size_bytes);
  absl::Status Free(std::span<const ExtentId> ids);
  bool PlaceSlot(internal::Extent& extent, size_t slot);
  void ReleaseSlot(const internal::Extent& extent, size_t slot);
  void ReleaseSpace(internal::Extent& extent);
  internal::Extent* Find(ExtentId id);
  const internal::Extent* Find(ExtentId id) const;
  uint64_t FreeBytes() const;

  // volume_transfers.cc
  absl::StatusOr<uint32_t> AllocateTransfer(internal::Job job, uint64_t token);
  void Release(uint32_t index);
  absl::Status Start(uint32_t index);
  absl::Status StartWrite(uint32_t index);
  bool NextZeroPiece(internal::Request& request);
  uint8_t PickSlot(const internal::Extent& extent) const;  // kNoSlot: none is free
  void OnCompletion(const Completion& completion, std::vector<Finished>& finished);
  bool Account(internal::Request& request, int64_t result, absl::Status& status);
  void Complete(uint32_t index, absl::Status status, std::vector<Finished>& finished);
  void EndWrite(internal::Request& request, const absl::Status& status);
  absl::Status IoError(const internal::Request& request, int error_number) const;
  std::string PathText(uint32_t path) const;

  // volume_commit.cc
  absl::Status BeginCommit(uint64_t token);
  void EncodeTable();
  void StartPhase();
  void StartPart(IoKind io, internal::Place place, std::span<std::byte> bytes);
  void EndPart(const internal::Request& request, const absl::Status& status,
               std::vector<Finished>& finished);
  bool AdvanceCommit();  // true when it has ended, well or not
  absl::Status EndCommit();
  void EndFlush(const internal::Request& request, const absl::Status& status);
  void StartDeferred(std::vector<Finished>& finished);

  IoEngine& engine;
  internal::Geometry geometry;
  internal::Protections protections;
  internal::VolumeId id{};
  std::vector<internal::Path> paths;
  std::vector<internal::Extent> extents;  // by id
  uint32_t extents_max = 0;

  std::vector<internal::Request> requests;
  std::vector<uint32_t> free_requests;
  uint32_t user_requests = 0;

  internal::CommitState commit;
  internal::PageBuffer table;
  internal::PageBuffer record_page;
  internal::Record durable;    // sequence 0: none
  uint64_t last_sequence = 0;  // also of commits that failed
  uint64_t commits = 0;
  RecoveryReport recovery;
};

}  // namespace forebay::nvme
