// SPDX-License-Identifier: Apache-2.0
// A session's reads of weights: leases, places, and copies to the device.
#pragma once

#include <list>
#include <map>
#include <span>

#include "client/internal/device_copies.h"
#include "client/internal/session_trace.h"

namespace forebay::client::internal {

// Owns the fetches in flight, and each lease that a copy to the device holds. The caller of a fetch owns its lease.
//
// States   of a fetch: sent and answered, until FinishFetch or CancelFetch drops it.
//          of a lease without an owner: held by a copy until the copy has ended, or late (nobody reads it). LookAtCopies
//          releases both.
// Threads  One at a time, under Attachment's mutex. LookAtCopies also runs on the thread of CopyWatch, under that mutex.
// Errors   As the methods of Attachment of the same names.
class WeightsReader {
 public:
  WeightsReader(const SessionParts& parts, SessionLink& link, DeviceCopies& device,
                SessionTrace& trace)
      : parts_(parts), link_(link), device_(device), trace_(trace) {}

  absl::StatusOr<FetchTicket> StartFetch(uint32_t partition, const WaitLimits& limits);
  absl::StatusOr<bool> IsFetchDone(const FetchTicket& ticket, const WaitLimits& limits);
  absl::StatusOr<Lease> FinishFetch(const FetchTicket& ticket, const WaitLimits& limits);
  absl::Status CancelFetch(const FetchTicket& ticket, const WaitLimits& limits);
  absl::Status Release(const Lease& lease, const WaitLimits& limits);

  absl::Status CopyWeights(std::span<const WeightsCopy> wanted, gpu::Stream& stream,
                           const WaitLimits& limits);
  absl::StatusOr<size_t> GiveBackCopied(const WaitLimits& limits);
  absl::Status LocateAhead(std::span<const uint32_t> partitions, const WaitLimits& limits);
  absl::StatusOr<std::vector<std::span<const std::byte>>> Locate(
      std::span<const uint32_t> partitions, const WaitLimits& limits);

  // Before the weights change: forgets the places, and waits until copies have ended and their leases are released.
  absl::Status EndReads(const WaitLimits& limits);
  // Releases late leases and the leases of copies that have ended. Errors are stored. Never blocks. Returns true if any such
  // lease is still held.
  bool LookAtCopies();
  // Hands over a lease that nobody reads.
  void AddLateLease(uint64_t lease) { late_leases_.push_back(lease); }
  // Drops the fetches in flight, at the end of the session.
  void Close() { fetches_.clear(); }

 private:
  using Answer = SessionLink::Answer;
  using Leases = std::pmr::vector<Lease>;  // in ascending order of partition
  // Leases whose weights are being copied to the device.
  struct CopiesInFlight {
    std::pmr::vector<uint64_t> leases;
    std::shared_ptr<const gpu::Event> done;
  };

  absl::StatusOr<Lease> LeaseOf(uint32_t partition, const protocol::Completion& completion);
  absl::Status CheckCopies(std::span<const WeightsCopy> wanted);
  // Takes one lease for each of `partitions`, which may repeat. Takes no lease if one fails.
  absl::StatusOr<Leases> LeaseAll(std::pmr::vector<uint32_t> partitions, const WaitLimits& limits);
  // Leases all partitions of `wanted`, and begins to copy on `behind`.
  absl::Status LeaseAndCopy(std::span<const WeightsCopy> wanted, gpu::Stream& behind,
                            const WaitLimits& limits);
  absl::Status EndCopies(const WaitLimits& limits);
  CommandPort::OnDone OnReleased();

  const SessionParts& parts_;
  SessionLink& link_;
  DeviceCopies& device_;
  SessionTrace& trace_;
  std::pmr::map<uint64_t, std::shared_ptr<Answer>> fetches_{link_.memory()};  // by ticket's id
  uint64_t last_ticket_ = 0;
  // Places of the committed step that were asked for, by partition; without leases.
  std::pmr::map<uint32_t, std::shared_ptr<Answer>> located_ahead_{link_.memory()};
  std::pmr::list<CopiesInFlight> copies_{link_.memory()};
  std::vector<uint64_t> late_leases_;  // leases that nobody reads
};

}  // namespace forebay::client::internal
