// SPDX-License-Identifier: Apache-2.0
// Slots on one or more swap paths: asynchronous reads and writes, and one ledger whose commits
// survive a power cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/checksum.h"
#include "nvme/io/io_engine.h"
#include "nvme/slot_map.h"
#include "nvme/swap_files.h"

namespace forebay::nvme {

namespace internal {
struct Protections;  // tests alone: nvme/internal/protections.h
}  // namespace internal

struct VolumeOptions {
  // 1 to Volume::kPathsMax.
  std::vector<PathOptions> paths;
  OpenMode mode = OpenMode::kReclaim;
  // kUnlinked goes with kReclaim only. kInspect: the volume refuses whatever would write.
  FileLife life = FileLife::kKept;
  // Room for a ledger and 24 bytes for each slot it names; four times this much space is reserved.
  uint64_t ledger_bytes_max = uint64_t{1} << 20;
  // A clock for request deadlines, in nanoseconds; empty: the machine's monotonic one.
  std::function<uint64_t()> now_ns = {};
};

struct PathStats {
  // Bytes as the kernel reported them, with those of short transfers.
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t reads = 0;
  uint64_t writes = 0;
  uint64_t flushes = 0;
  uint64_t retries = 0;
  // Requests that failed in the end; of these, the reads.
  uint64_t errors = 0;
  uint64_t read_errors = 0;
  // Requests that took longer than the deadline, those in flight included.
  uint64_t late = 0;
  uint64_t capacity_bytes = 0;
  bool flush_failed = false;
};

struct VolumeStats {
  std::vector<PathStats> paths;
  uint64_t commits = 0;
};

// Requests of one path that have been in flight for longer than the deadline.
struct LateRequests {
  uint32_t path = 0;
  uint32_t requests = 0;
  uint64_t oldest_ns = 0;
};

// State in which kRecover or kInspect found the volume. Sequence 0: nothing was ever committed.
struct RecoveryReport {
  uint64_t sequence = 0;
  // Labels of paths that are not whole, where the other copy is.
  uint32_t damaged_labels = 0;
  // Copies that are not whole; a power cut during a commit leaves some.
  uint32_t damaged_records = 0;
  // Copies that a whole record names and that do not verify; likewise.
  uint32_t damaged_ledgers = 0;
  // The newest whole record had no whole ledger, and an older one was used; or of one of the two records no copy is
  // whole, which may have been a newer one.
  bool fell_back = false;
};

// A request that has ended, or that nobody waits for any more.
struct Finished {
  enum class Kind : uint8_t {
    kEnded,
    kGivenUp,   // by GiveUp(): the disk may still use its memory
    kReleased,  // it was given up, and has ended now
  };

  uint64_t token = 0;
  // OK, or E_SWAP_IO with path, offset and errno; kGivenUp: E_SWAP_TIMEOUT with path, offset and seconds.
  absl::Status status;
  Kind kind = Kind::kEnded;
};

// The volume stores bytes in slots and makes one ledger durable; which slot holds what is written in
// the ledger, which the volume does not read. Slots come from a SlotMap, whose owner decides which of
// them are free.
//
// CommitLedger(ledger, slots) makes the ledger and the content of the slots it names durable
// together: data flushed; ledger and record, both checksummed, written to both ends of the volume;
// flushed. Slots named by the last two commits are pinned: they cannot be written until newer
// commits no longer name them, so that a power cut or one damaged ledger always leaves a whole one.
//
// A failed flush is final: it is never repeated as a cure. What was written to that path since its
// last good flush counts as lost: Doubted() lists it, and CommitLedger() refuses ledgers that name
// it until it has been written again.
//
// A request that was given up keeps its memory, and a write its slot, until it has ended. A read of a
// path that is silent to reads (has answered none since the deadline, and one waits to see whether it
// answers again) fails with E_SWAP_TIMEOUT at once, and so does every read while more than kGivenUpMax
// have not ended. The same of writes and zeroing; a disk that ends no writes still serves reads.
//
// Ownership  Files are the volume's; engine and buffers are the caller's. The engine outlives the
//            volume. Buffers are in use until their token is kEnded or kReleased. Requests in flight must be
//            finished before the volume dies.
// Threads    Open() anywhere, it blocks; everything else on the engine's thread, and nothing
//            blocks.
// Limits     kRequestsMax reads and writes unfinished; one commit at a time. A transfer without
//            progress is tried 1 + kRetriesMax times.
class Volume {
 public:
  static constexpr uint32_t kPathsMax = 16;
  static constexpr uint32_t kRequestsMax = 1024;
  static constexpr uint64_t kLedgerBytesMax = uint64_t{1} << 30;
  // Bytes of a path's capacity that hold labels, records and ledgers instead of slots.
  static uint64_t OwnBytes(uint64_t ledger_bytes_max);
  // Tries after EAGAIN, EINTR and short transfers without progress; after any other errno.
  static constexpr int kRetriesMax = 8;
  static constexpr int kErrorRetriesMax = 2;
  // Pieces of zeros in flight on each path.
  static constexpr uint32_t kZerosInFlight = 16;
  // Reads, or writes, of one path that were given up and have not ended.
  static constexpr uint32_t kGivenUpMax = 4;

  // Completions whose token has this top byte belong to the volume; the caller's other tokens must
  // not have it.
  static constexpr uint64_t kTokenTag = uint64_t{0xB5} << 56;
  static constexpr bool Owns(uint64_t token) { return (token >> 56) == (kTokenTag >> 56); }

  // Locks and reserves every path, or refuses before anything is written.
  //
  // Errors  those of SwapFileSystem::Open; E_SWAP_PATH: a newer format, or kRecover of something
  //         that is not this volume; E_SWAP_IO; E_CORRUPT: kRecover found records, but none whole
  //         with a whole ledger.
  static absl::StatusOr<std::unique_ptr<Volume>> Open(const VolumeOptions& options,
                                                      IoEngine& engine, SwapFileSystem& files);

  // Opens a volume on the machine's own file system.
  static absl::StatusOr<std::unique_ptr<Volume>> Open(const VolumeOptions& options,
                                                      IoEngine& engine);

  // Tests alone: with protections switched off.
  static absl::StatusOr<std::unique_ptr<Volume>> OpenForTest(
      const VolumeOptions& options, const internal::Protections& protections, IoEngine& engine,
      SwapFileSystem& files);

  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;
  ~Volume();

  // The space of the volume; after kRecover without the slots that the recovered ledger names.
  const SlotMap& free_slots() const;

  // Starts writing zeros over `slots`, all paths at once, in pieces of `zeros` (a multiple of
  // 4 KiB, all zero, in use until the token is finished). Makes later writes plain overwrites
  // without metadata.
  absl::Status Zero(std::span<const Slot> slots, std::span<const std::byte> zeros, uint64_t token);

  // Bytes that the Zero() of this token has written so far; 0 where it has ended.
  uint64_t zeroed_bytes(uint64_t token) const;

  // Starts reading `bytes.size()` bytes of the slot from `offset_bytes` on, whole pages. Verify them
  // (nvme/verify.h) before use.
  //
  // Errors  kFailedPrecondition  the slot is being written. kResourceExhausted: kRequestsMax.
  //         E_SWAP_TIMEOUT       the path is silent.
  absl::Status Read(const Slot& slot, uint64_t offset_bytes, std::span<std::byte> bytes,
                    uint64_t token);
  absl::Status Read(const Slot& slot, std::span<std::byte> bytes, uint64_t token) {
    return Read(slot, 0, bytes, token);
  }

  // Starts writing `bytes` to the start of the slot.
  //
  // Errors  kFailedPrecondition  the slot is being read or written, or a durable ledger names it.
  //         kResourceExhausted   kRequestsMax.
  //         E_SWAP_TIMEOUT       the path is silent, or an earlier write of the slot was given up.
  absl::Status Write(const Slot& slot, std::span<const std::byte> bytes, uint64_t token);

  // Makes `ledger` and the slots it names durable; finished OK means that no power cut undoes it.
  // After an error the old or the new ledger is durable; another commit decides. Copies the ledger.
  //
  // Errors  kFailedPrecondition  a commit is pending; a named slot is being written, its last write
  //                              failed, or its content is in doubt.
  //         E_LIMIT              longer than ledger_bytes_max.
  absl::Status CommitLedger(std::span<const std::byte> ledger, std::span<const Slot> slots,
                            uint64_t token);

  // The ledger of the last durable commit, and the slots that it names. After kRecover: the ledger that was found.
  std::span<const std::byte> ledger() const;
  std::span<const Slot> ledger_slots() const;

  // True if one of the last two commits, or one that failed since, names the slot. Such a slot must not be written.
  bool is_pinned(const Slot& slot) const;

  // Slots that a failed flush has put in doubt, ascending. Their content is written again.
  std::vector<Slot> Doubted() const;

  // Counts requests that have become late, and returns for each path the requests that are late now.
  std::vector<LateRequests> CheckDeadlines(uint64_t deadline_ns);

  // Nobody waits any longer for reads, writes and zeroing that have been in flight for `deadline_ns` and
  // that an earlier CheckDeadlines() has found late (so that a process that slept does not give up what
  // has ended meanwhile), where `may_give_up` says so of their token. Commits are not given up.
  void GiveUp(uint64_t deadline_ns, const std::function<bool(uint64_t token)>& may_give_up,
              std::vector<Finished>& finished);

  // To be called with every completion for which Owns(token); appends what has finished.
  void OnCompletion(const Completion& completion, std::vector<Finished>& finished);

  // "/mnt/a/forebay.swap", for messages.
  std::string_view path_name(uint32_t path) const;
  // Sequence number of the last durable commit; 0: none.
  uint64_t durable_sequence() const;
  const RecoveryReport& recovery() const;
  // Reads, writes, zeroing and commits.
  uint32_t requests_in_flight() const;
  VolumeStats stats() const;

 private:
  struct State;
  explicit Volume(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::nvme
