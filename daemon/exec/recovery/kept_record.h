// SPDX-License-Identifier: Apache-2.0
// Record of a job's present state, in a memfd that outlives the daemon. Another daemon continues the job from the record if
// this daemon is killed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/exec/recovery/undo_log.h"
#include "protocol/os/unique_fd.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// Hint of errors by which a daemon does not start on retained jobs: how to give the jobs up.
inline constexpr char kGiveUpHint[] =
    "; to give up what is kept, stop the service before it is started (systemctl stop forebayd)";

// The record is consistent at every moment, even if the process is killed. Each value that changes has two copies, and a store
// of 8 bytes selects the current copy. The store of RecordStep selects the new copies of all blocks of the step at once.
//
// Ownership  Owns the memfd. The destructor drops the record, since arenas of a process that ends by itself lose their
//            bytes; a process that is killed runs no destructor. The destructor does not drop a record that was adopted
//            before Own(), nor any record after Leave().
// Threads    One, in addition to those of the undo log.
class KeptRecord {
 public:
  // Makes the record of a job. `nonce`: SwapSpace::nonce() of the swap with the job's slots. `workers`: number of workers that
  // update blocks at once.
  //
  // Errors  of EncodeKept. E_LIMIT  no memory or descriptor for it.
  static absl::StatusOr<std::unique_ptr<KeptRecord>> Make(const RecordJob& record, uint64_t nonce,
                                                          uint64_t workers);
  // Takes over the record of another process.
  //
  // Errors  E_CORRUPT  the memfd holds no record, or a record of an older version.
  //         E_CONFIG   the record is of a newer version; names both versions.
  static absl::StatusOr<std::unique_ptr<KeptRecord>> Adopt(protocol::UniqueFd fd);

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
  // Marks the record: no job can continue from it.
  void Drop();

  // Undo log of updates in place.
  UndoLog& undo() { return undo_; }

  // Returns the job with DurableJob::kept set, and with its extra_state read from `step_arena` (a descriptor; -1: the job has
  // no step arena). The record knows neither which state of the job is durable, nor which slots are free: other jobs may have
  // some of the spare_slots by now.
  //
  // Errors  E_CORRUPT     of DecodeLedger, or the arena is too short.
  //         E_JOB_FAILED  it was dropped.
  absl::StatusOr<DurableJob> Read(int step_arena) const;

 private:
  struct Header;
  struct Version;
  struct Block;
  struct Values;
  struct Order;
  struct Sums;
  struct Prepared;

  KeptRecord(protocol::UniqueFd fd, std::span<std::byte> bytes);

  static uint64_t FixedChecksum(std::span<const std::byte> bytes);
  Header& header() const;
  Values& values(uint64_t step) const;
  uint64_t* param_updates(uint64_t step) const;
  StatePart* extra_states(uint64_t step) const;
  uint32_t* trace(uint64_t step) const;
  std::byte* summary(uint64_t step) const;
  Prepared& prepared() const;
  protocol::HyperParams* prepared_hyper_params() const;
  StatePart* prepared_extra_states() const;
  std::byte* prepared_summary() const;
  Order& order() const;
  protocol::HyperParams* hyper_params() const;
  // Parameter groups that the record has room for, from the distance between its sections: the room behind the last one is
  // smaller than a row.
  uint64_t param_group_rows() const;
  struct Lease;
  std::span<Lease> leases() const;
  float* trust() const;
  uint8_t* params_updated() const;
  Block& block(uint32_t index) const;
  Sums& sums(uint32_t page) const;
  uint64_t* digests(uint32_t index, uint64_t copy) const;
  uint64_t CurrentCopy(uint32_t index) const;
  void Write(const RecordBlock& record, uint64_t copy);
  void WriteValues(const RecordDecision& record);
  void WriteOrder(const RecordDecision& record);
  std::optional<DurableBytes> BytesOf(uint32_t index, uint64_t copy) const;
  std::shared_ptr<const KeptUpdate> ReadUpdate() const;
  absl::StatusOr<std::shared_ptr<const KeptUpdate>> ReadPrepared(int step_arena) const;
  std::vector<KeptUpdate::Sums> ReadSums(uint64_t step) const;
  static absl::StatusOr<ExtraStates> ReadStates(std::span<const StatePart> parts, int step_arena);
  absl::Status CheckChanging() const;

  protocol::UniqueFd fd_;
  std::span<std::byte> bytes_;
  UndoLog undo_;
  bool is_owned_ = false;
};

}  // namespace forebay::daemon
