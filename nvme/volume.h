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
  // kInspect: Zero, Write and CommitLedger are refused.
  OpenMode mode = OpenMode::kReclaim;
  // Life of the swap files. kUnlinked is allowed only with kReclaim.
  FileLife life = FileLife::kKept;
  // Bytes for a ledger and 24 bytes for each slot that the ledger names. Four times this space is reserved.
  uint64_t ledger_bytes_max = uint64_t{1} << 20;
  // Clock for request deadlines, in nanoseconds. Empty: the machine's monotonic clock.
  std::function<uint64_t()> now_ns = {};
};

struct PathStats {
  // Bytes that the kernel reported, including short transfers.
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t reads = 0;
  uint64_t writes = 0;
  uint64_t flushes = 0;
  uint64_t retries = 0;
  // Requests that failed after all retries, and the reads among them.
  uint64_t errors = 0;
  uint64_t read_errors = 0;
  // Requests that took longer than the deadline, including those in flight.
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
  // Number of damaged labels whose other copy is intact.
  uint32_t damaged_labels = 0;
  // Number of damaged copies of records. A power cut during a commit leaves some.
  uint32_t damaged_records = 0;
  // Number of ledger copies that an intact record names and that fail verification. A power cut during a commit leaves some.
  uint32_t damaged_ledgers = 0;
  // True if the newest intact record had no intact ledger and an older record was used, or if no copy of one of the two records
  // is intact: that record may have been newer.
  bool fell_back = false;
};

// A request that has ended, or was given up.
struct Finished {
  enum class Kind : uint8_t {
    kEnded,
    kGivenUp,   // given up by GiveUp(): the disk may still use the memory of the request
    kReleased,  // a request that was given up earlier has ended
  };

  uint64_t token = 0;
  // Result of the request: OK, or E_SWAP_IO with path, offset and errno. kGivenUp: E_SWAP_TIMEOUT with path, offset and
  // seconds.
  absl::Status status;
  Kind kind = Kind::kEnded;
};

// A volume stores bytes in slots and makes one ledger durable. The ledger says which slot holds which content; the volume does
// not interpret the ledger. Slots come from a SlotMap, whose owner decides which slots are free.
//
// CommitLedger(ledger, slots) makes the ledger and the content of the slots that it names durable together. It flushes the
// data, writes ledger and record, both checksummed, to both ends of the volume, and flushes again. Slots that the last two
// commits name are pinned: they cannot be written until newer commits no longer name them. A power cut, or damage to one
// ledger, therefore always leaves an intact ledger.
//
// A failed flush is final: it is not repeated. Bytes written to the path since its last successful flush count as lost.
// Doubted() lists their slots. CommitLedger() refuses ledgers that name such a slot until the slot is written again.
//
// A request that was given up still uses its memory until it has ended, and a write also its slot. A path is silent to reads if
// it has answered no read since the deadline and one read waits to see whether the path answers again. A read of a silent path
// fails at once with E_SWAP_TIMEOUT. Every read fails so while more than kGivenUpMax reads that were given up have not ended.
// The same rules hold separately for writes and zeroing: a disk that ends no writes may still serve reads.
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
  // Most retries after EAGAIN, EINTR and short transfers without progress (kRetriesMax), and after another errno
  // (kErrorRetriesMax).
  static constexpr int kRetriesMax = 8;
  static constexpr int kErrorRetriesMax = 2;
  // Most pieces of zeros in flight on each path.
  static constexpr uint32_t kZerosInFlight = 16;
  // Most reads, and most writes, of a path that were given up and have not ended. Above this number further requests are
  // refused.
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

  // Opens a volume with protections switched off. For tests alone.
  static absl::StatusOr<std::unique_ptr<Volume>> OpenForTest(
      const VolumeOptions& options, const internal::Protections& protections, IoEngine& engine,
      SwapFileSystem& files);

  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;
  ~Volume();

  // Returns the free slots of the volume. After kRecover they exclude the slots that the recovered ledger names.
  const SlotMap& free_slots() const;

  // Starts to write zeros to `slots`, on all paths at once, in pieces of `zeros` (a multiple of 4 KiB, all zero, in use until
  // the token is finished). Later writes to the slots then overwrite allocated blocks and need no metadata updates.
  absl::Status Zero(std::span<const Slot> slots, std::span<const std::byte> zeros, uint64_t token);

  // Returns the bytes that the Zero() call with this token has written so far; 0 if the call has ended.
  uint64_t zeroed_bytes(uint64_t token) const;

  // Starts to read `bytes.size()` bytes of the slot from `offset_bytes` on, in whole pages. Verify them (nvme/verify.h) before
  // use.
  //
  // Errors  kFailedPrecondition  the slot is being written. kResourceExhausted: kRequestsMax.
  //         E_SWAP_TIMEOUT       the path is silent.
  absl::Status Read(const Slot& slot, uint64_t offset_bytes, std::span<std::byte> bytes,
                    uint64_t token);
  absl::Status Read(const Slot& slot, std::span<std::byte> bytes, uint64_t token) {
    return Read(slot, 0, bytes, token);
  }

  // Starts to write `bytes` to the start of the slot.
  //
  // Errors  kFailedPrecondition  the slot is being read or written, or a durable ledger names it.
  //         kResourceExhausted   kRequestsMax.
  //         E_SWAP_TIMEOUT       the path is silent, or an earlier write of the slot was given up.
  absl::Status Write(const Slot& slot, std::span<const std::byte> bytes, uint64_t token);

  // Makes `ledger` and the slots that it names durable. If the request finishes with OK, no power cut undoes the commit. After
  // an error either the old or the new ledger is durable, until another commit succeeds. Copies the ledger.
  //
  // Errors  kFailedPrecondition  a commit is pending; a named slot is being written, its last write
  //                              failed, or its content is in doubt.
  //         E_LIMIT              longer than ledger_bytes_max.
  absl::Status CommitLedger(std::span<const std::byte> ledger, std::span<const Slot> slots,
                            uint64_t token);

  // Return the ledger of the last durable commit, and the slots that it names. After kRecover: the ledger that was found.
  std::span<const std::byte> ledger() const;
  std::span<const Slot> ledger_slots() const;

  // True if one of the last two commits, or one that failed since, names the slot. Such a slot must not be written.
  bool is_pinned(const Slot& slot) const;

  // Returns the slots whose content may be lost because of a failed flush, ascending. Write their content again.
  std::vector<Slot> Doubted() const;

  // Counts requests that have become late, and returns for each path the requests that are late now.
  std::vector<LateRequests> CheckDeadlines(uint64_t deadline_ns);

  // Gives up reads, writes and zeroing that have been in flight for `deadline_ns`, were found late by an earlier
  // CheckDeadlines() call, and for whose token `may_give_up` returns true. The earlier call is required so that a process that
  // was suspended does not give up requests that ended meanwhile. Commits are not given up.
  void GiveUp(uint64_t deadline_ns, const std::function<bool(uint64_t token)>& may_give_up,
              std::vector<Finished>& finished);

  // Handles a completion of the engine. Call it with every completion for which Owns(token) is true. Appends requests that have
  // finished to `finished`.
  void OnCompletion(const Completion& completion, std::vector<Finished>& finished);

  // Returns the name of a path for messages, for example "/mnt/a/forebay.swap".
  std::string_view path_name(uint32_t path) const;
  // Returns the sequence number of the last durable commit; 0 if nothing was committed.
  uint64_t durable_sequence() const;
  const RecoveryReport& recovery() const;
  // Returns the number of reads, writes, Zero() calls and commits that have not ended.
  uint32_t requests_in_flight() const;
  VolumeStats stats() const;

 private:
  struct State;
  explicit Volume(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::nvme
