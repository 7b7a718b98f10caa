// SPDX-License-Identifier: Apache-2.0
// The state of a Volume, and the steps of its requests. Implemented by the volume_*.cc files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/internal/disk_format.h"
#include "nvme/internal/page_buffer.h"
#include "nvme/internal/protections.h"
#include "nvme/volume.h"

namespace forebay::nvme {

namespace internal {

// State of a slot. A slot in the default state has no entry.
struct SlotState {
  uint64_t size_bytes = 0;
  bool writing = false;
  // True if the last write failed: the content may be anything.
  bool broken = false;
  // True if a write that was given up has not ended.
  bool given_up = false;
  // True if a flush after the last write failed: the write may be lost.
  bool doubted = false;
  // Number of reads in flight.
  uint32_t readers = 0;
  // Number of ledgers that recovery may find and that name the slot.
  uint32_t pins = 0;
  // Number of the last write of the slot, counted among the writes of its path; 0 if the write is flushed.
  uint64_t write_number = 0;

  bool is_default() const {
    return !writing && !broken && !doubted && readers == 0 && pins == 0 && write_number == 0;
  }
};

using SlotKey = std::pair<uint32_t, uint64_t>;  // path, offset

struct Answers {
  // Number of requests in flight that were given up.
  uint32_t given_up = 0;
  // Time of the disk's last answer to a request.
  uint64_t answered_ns = 0;
};

struct Path {
  std::unique_ptr<SwapFile> file;
  // Index of the file at the engine.
  std::optional<FileIndex> index;
  PathSpace space;
  // Number of finished writes. The first `flushed` of them are durable.
  uint64_t writes = 0;
  uint64_t flushed = 0;
  uint32_t zeros_in_flight = 0;
  // Answers of the disk to reads, and to writes and zeroing. They are separate because a disk that ends no writes may still
  // answer reads.
  Answers to_reads;
  Answers to_writes;
  Answers& answers_to(IoKind io) { return io == IoKind::kRead ? to_reads : to_writes; }
  // Deadline of the last GiveUp() that gave up a request of this path.
  uint64_t deadline_ns = 0;
  PathStats stats;
};

enum class RequestKind : uint8_t { kRead, kWrite, kZero, kCommitPart };

// The state of one Zero() call.
struct ZeroBatch {
  struct Cursor {
    std::vector<Slot> slots;
    size_t next = 0;
    uint64_t offset_bytes = 0;
  };

  uint64_t token = 0;
  std::byte* zeros = nullptr;
  size_t zeros_bytes = 0;
  std::vector<Cursor> paths;
  uint32_t in_flight = 0;
  uint64_t done_bytes = 0;
  absl::Status status;
  // True once the call was reported as kGivenUp.
  bool given_up = false;
};

// A transfer, which takes one engine request or several.
struct Request {
  bool active = false;
  RequestKind kind = RequestKind::kRead;
  IoKind io = IoKind::kRead;
  uint32_t generation = 0;
  // Token of the caller.
  uint64_t token = 0;
  uint32_t path = 0;
  uint64_t offset_bytes = 0;
  uint64_t slot_offset_bytes = 0;  // offset of the slot that is read or written
  std::byte* data = nullptr;
  size_t size_bytes = 0;
  size_t done_bytes = 0;
  // Number of consecutive tries without progress, and number of failures.
  int stalls = 0;
  int errors = 0;
  // Time when the engine got the request.
  uint64_t start_ns = 0;
  bool late = false;
  bool given_up = false;
  // Number of writes of the path when a flush was submitted; unused in other requests.
  uint64_t covers = 0;
  ZeroBatch* batch = nullptr;
};

enum class CommitPhase : uint8_t { kIdle, kFlushData, kWriteLedger, kFlushLedger };

// Slots that a ledger names, pinned until newer commits have replaced it.
struct NamedSlots {
  uint64_t sequence = 0;
  std::vector<Slot> slots;
};

struct CommitState {
  CommitPhase phase = CommitPhase::kIdle;
  // Number of requests of this phase in flight.
  uint32_t parts = 0;
  uint64_t token = 0;
  absl::Status first_error;
  Record record;
  std::vector<std::byte> ledger;
};

}  // namespace internal

struct Volume::State {
  State(IoEngine& io_engine, const internal::Geometry& disk_geometry);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  // volume_recovery.cc
  absl::Status Initialise();
  absl::Status Recover();
  absl::Status WriteNow(internal::Place place, const internal::PageBuffer& page);
  absl::Status ReadNow(internal::Place place, std::span<std::byte> bytes);
  absl::Status SyncNow();
  absl::Status FindVolume();
  absl::StatusOr<std::vector<internal::Record>> FindRecords();
  absl::StatusOr<bool> LoadLedger(const internal::Record& record, std::vector<Slot>& slots,
                                  std::vector<std::byte>& ledger);
  bool AdoptSlots(const internal::Record& record, std::span<const std::byte> area,
                  std::vector<Slot>& slots) const;

  // volume_transfers.cc
  internal::SlotState& SlotAt(const Slot& slot);
  void ForgetIfDefault(const Slot& slot);
  absl::Status CheckSlot(const Slot& slot, uint64_t offset_bytes,
                         std::span<const std::byte> bytes) const;
  absl::StatusOr<uint32_t> AllocateTransfer(internal::RequestKind kind, uint64_t token);
  void Release(uint32_t index);
  absl::Status Start(uint32_t index);
  void StartZeros(uint32_t path, std::vector<Finished>& finished);
  void EndZero(const internal::Request& request, const absl::Status& status,
               std::vector<Finished>& finished);
  void GiveUp(uint32_t index, std::vector<Finished>& finished);
  void KeepUnended(internal::ZeroBatch& batch);
  void OnCompletion(const Completion& completion, std::vector<Finished>& finished);
  bool Account(internal::Request& request, int64_t result, absl::Status& status);
  void Complete(uint32_t index, absl::Status status, std::vector<Finished>& finished);
  void EndGivenUp(const internal::Request& request, std::vector<Finished>& finished);
  absl::Status CheckAnswers(uint32_t path, IoKind io) const;
  absl::Status TimeoutError(const internal::Request& request) const;
  absl::Status GivenUpError(const Slot& slot) const;
  absl::Status IoError(const internal::Request& request, int error_number) const;
  std::string PathText(uint32_t path) const;

  // volume_commit.cc
  absl::Status BeginCommit(std::span<const std::byte> ledger, std::span<const Slot> slots,
                           uint64_t token);
  absl::Status CheckNamed(std::span<const Slot> slots) const;
  void EncodeLedger(std::span<const std::byte> ledger, std::span<const Slot> slots);
  void Pin(uint64_t sequence, std::span<const Slot> slots);
  void Unpin(const internal::NamedSlots& named);
  void StartPhase();
  void StartPart(IoKind io, internal::Place place, std::span<std::byte> bytes);
  void EndPart(const internal::Request& request, const absl::Status& status,
               std::vector<Finished>& finished);
  // Starts the next phase of the commit. Returns true if the commit has ended, successfully or not.
  bool AdvanceCommit();
  absl::Status EndCommit();
  void EndFlush(const internal::Request& request, const absl::Status& status);

  IoEngine& engine;
  internal::Geometry geometry;
  internal::Protections protections;
  bool is_read_only = false;  // OpenMode::kInspect
  std::function<uint64_t()> now_ns;
  internal::VolumeId id{};
  std::vector<internal::Path> paths;
  std::map<internal::SlotKey, internal::SlotState> slots;
  SlotMap free_slots;

  std::vector<internal::Request> requests;
  std::vector<uint32_t> free_requests;
  // Number of unfinished reads and writes.
  uint32_t user_requests = 0;
  // Zero() calls that have not ended, the oldest first.
  std::list<internal::ZeroBatch> zero_batches;

  internal::CommitState commit;
  internal::PageBuffer area;
  internal::PageBuffer record_page;
  // Record of the last durable commit; sequence 0: no commit.
  internal::Record durable;
  std::vector<std::byte> durable_ledger;
  // Slots of ledgers, the oldest first: the last two durable ledgers, then ledgers whose commit has an unknown outcome.
  std::deque<internal::NamedSlots> named;
  // Newest sequence number, including those of commits that failed.
  uint64_t last_sequence = 0;
  uint64_t commits = 0;
  RecoveryReport recovery;
};

}  // namespace forebay::nvme
