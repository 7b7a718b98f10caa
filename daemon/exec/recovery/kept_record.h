// SPDX-License-Identifier: Apache-2.0
// Record of a job's present state, in a memfd that outlives the daemon. Another daemon continues the job from the record if
// this daemon is killed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/blocks/record_sizes.h"
#include "daemon/exec/recovery/undo_log.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Hint in errors of a daemon that does not start because of retained jobs. The hint says how to give the jobs up.
inline constexpr char kGiveUpHint[] =
    "; to give up what is kept, stop the service before it is started (systemctl stop forebayd)";

class RecordIndex;

// The record is a log. Its file has, in order: a header, the job as it was recorded (a Ledger of ledger.capnp), two halves of
// entries (record_entry.h), and the undo log. One word of 8 bytes in the header says which half is current and how many of its
// bytes count. An entry counts once the word includes it, so the record is consistent at every moment, even if the process is
// killed.
//
// A half begins with the entries that counted when it became current. If the room behind a published step is too small for the
// next step, the record moves to the other half. The entries that still count are copied to that half, in an order that gives the
// same state. Then the word selects that half. The record also moves if an entry does not fit. After a move every entry fits
// (RecordSizes::half_bytes).
//
// Example: a half has 1000 bytes. After step 7 is published its entries have 900 bytes, and a step may take 400. The entries that
// count have 300 bytes, and are copied to the other half. The word changes from (half 0, 900) to (half 1, 300).
//
// Ownership  Owns the memfd. The destructor drops the record, since arenas of a process that ends by itself lose their
//            bytes; a process that is killed runs no destructor. The destructor drops an adopted record only after Own(),
//            and no record after Leave().
// Threads    One thread. Other threads use the undo log.
// Limits     Set() does not use the heap.
class KeptRecord {
 public:
  // Makes the record of a job. `nonce`: SwapSpace::nonce() of the swap with the job's slots. `workers`: number of workers that
  // update blocks at once.
  //
  // Errors  E_LIMIT  no memory or descriptor for the record. The errors of EncodeKept().
  static absl::StatusOr<std::unique_ptr<KeptRecord>> Make(const RecordJob& record, uint64_t nonce,
                                                          uint64_t workers);
  // Takes over the record of another process, and reads the job with DurableJob::kept set. `step_arena`: descriptor of the job's
  // step arena, which has its extra_state; -1: the job has no step arena. The record knows neither which state of the job is
  // durable, nor which slots are free: other jobs may have some of the spare_slots by now.
  //
  // Errors  E_CORRUPT     the memfd holds no record, a damaged record, or a record of an older version (record_before.h); or
  //                       the arena is too short.
  //         E_CONFIG      the record is of a newer version; names both versions.
  //         E_JOB_FAILED  the record was dropped.
  struct Adopted {
    std::unique_ptr<KeptRecord> record;
    DurableJob job;
  };
  static absl::StatusOr<Adopted> Adopt(protocol::UniqueFd fd, int step_arena);
  // Returns the memfd of a record that Adopt() takes over.
  static protocol::UniqueFd Release(std::unique_ptr<KeptRecord> record);

  KeptRecord(const KeptRecord&) = delete;
  KeptRecord& operator=(const KeptRecord&) = delete;
  ~KeptRecord();

  // Marks the arenas as owned by this process: the destructor drops the record.
  void Own() { is_owned_ = true; }
  // Leaves the arenas to the next process: the destructor does not drop the record.
  void Leave() { is_owned_ = false; }

  int fd() const { return fd_.get(); }
  uint64_t step() const;  // published step
  // True if a step is prepared or decided, and not published.
  bool is_in_step() const;
  uint64_t nonce() const;

  void Set(const RecordBlock& record);
  void Set(const RecordInstalled& record);
  void Set(const RecordStaged& record);
  void Set(const RecordSums& record);
  void Set(const RecordAttempt& record);
  void Set(const RecordPrepared& record);
  void Set(const RecordDecision& record);
  void Set(const RecordTrust& record);
  void Set(const RecordStep& record);
  void Set(const RecordUpdates& record);
  void Set(const RecordLease& record);
  void Set(const RecordLeaseEnd& record);
  // Marks the record as dropped: no job can continue from the record.
  void Drop();

  // Undo log of updates in place, and the memory of the log.
  UndoLog& undo() { return undo_; }
  std::span<std::byte> undo_bytes() const;

 private:
  struct Header;

  KeptRecord(protocol::UniqueFd fd, std::span<std::byte> bytes, const DurableJob& job,
             const RecordCounts& counts);

  Header& header() const;
  std::span<std::byte> half(uint64_t index) const;
  bool is_dropped() const;
  struct Fixed;
  static absl::StatusOr<Fixed> CheckFixed(std::span<const std::byte> bytes);
  absl::Status ReadEntries();
  absl::StatusOr<DurableJob> Read(DurableJob job, int step_arena);
  void AppendBase(const RecordJob& record);
  template <typename Record>
  void Append(const Record& record);
  template <typename... Records>
  void AppendAndPublish(const Records&... records);
  void Compact();
  void Publish();

  protocol::UniqueFd fd_;
  std::span<std::byte> bytes_;
  RecordSizes sizes_;
  std::unique_ptr<RecordIndex> index_;
  UndoLog undo_;
  // The current half, and the bytes of its entries. Publish() stores both in the header.
  uint64_t half_ = 0;
  uint64_t tail_ = 0;
  bool is_owned_ = false;
};

}  // namespace forebay::daemon
