// SPDX-License-Identifier: Apache-2.0
#include "client/internal/weights_reader.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/os/clock.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

namespace {

absl::Status UnknownTicket(const FetchTicket& ticket) {
  return MakeError(ErrorId::kLease,
                   absl::StrCat("fetch ticket ", ticket.id, " of partition ", ticket.partition,
                                " was finished or cancelled, or is of another attachment"),
                   "finish or cancel each fetch once, in the session that started it");
}

}  // namespace

absl::Status WeightsReader::CheckCopies(std::span<const WeightsCopy> wanted) {
  const protocol::Layout& layout = *parts_.layout;
  const uint64_t width = SizeBytes(layout.spec().dtype);
  for (const WeightsCopy& copy : wanted) {
    RETURN_IF_ERROR(parts_.CheckPartition(copy.partition));
    const uint64_t elems = layout.partitions()[copy.partition].elems;
    const bool fits = copy.first_elem <= elems && copy.to.size() / width <= elems - copy.first_elem;
    if (fits && copy.to.size() % width == 0) {
      RETURN_IF_ERROR(device_.CheckReach(copy.to, width));
      continue;
    }
    return MakeError(ErrorId::kRange,
                     absl::StrCat(copy.to.size(), " bytes from element ", copy.first_elem,
                                  " on are outside ", layout.DescribePartition(copy.partition),
                                  ", which has ", elems, " elements of ", width, " bytes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Lease> WeightsReader::LeaseOf(uint32_t partition, const Completion& completion) {
  const protocol::Layout& layout = *parts_.layout;
  const uint64_t offset = completion.offset_bytes;
  const uint64_t size = layout.partition_bytes(partition);
  const uint64_t window_bytes = parts_.weights->bytes().size();
  const bool fits =
      completion.length_bytes == size && offset <= window_bytes && size <= window_bytes - offset;
  const bool is_there =
      !layout.is_shared() || offset == layout.groups()[partition].weights_offset_bytes;
  if (!fits || !is_there) {
    return MakeError(
        ErrorId::kProtocol,
        absl::StrCat("partition ", partition, " has ", size, " bytes; the daemon says ",
                     completion.length_bytes, " at ", offset, " of the window of ", window_bytes));
  }
  parts_.gauge->fetched_bytes += size;
  return Lease{.id = completion.lease_id,
               .partition = partition,
               .bytes = parts_.weights->bytes().subspan(offset, size)};
}

absl::StatusOr<FetchTicket> WeightsReader::StartFetch(uint32_t partition,
                                                      const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckPartition(partition));
  // FinishFetch waits for a daemon that is being restarted.
  RETURN_IF_ERROR(link_.PollWithoutWait());
  RETURN_IF_ERROR(link_.errors().PopRelease());
  ASSIGN_OR_RETURN(std::shared_ptr<Answer> answer,
                   link_.Start(MakeCommand(Op::kFetch, partition), limits));
  fetches_.emplace(++last_ticket_, std::move(answer));
  return FetchTicket{.id = last_ticket_, .partition = partition};
}

absl::StatusOr<bool> WeightsReader::IsFetchDone(const FetchTicket& ticket,
                                                const WaitLimits& limits) {
  RETURN_IF_ERROR(link_.PollAlive(limits));
  const auto fetch = fetches_.find(ticket.id);
  if (fetch == fetches_.end()) return UnknownTicket(ticket);
  return fetch->second->arrived;
}

absl::StatusOr<Lease> WeightsReader::FinishFetch(const FetchTicket& ticket,
                                                 const WaitLimits& limits) {
  const uint64_t start_ns = protocol::MonotonicNs();
  const auto fetch = fetches_.find(ticket.id);
  if (fetch == fetches_.end()) return UnknownTicket(ticket);
  const std::shared_ptr<Answer> answer = fetch->second;
  RETURN_IF_ERROR(link_.WaitFor(*answer, limits));
  fetches_.erase(fetch);
  RETURN_IF_ERROR(answer->status);
  ASSIGN_OR_RETURN(Lease lease, LeaseOf(ticket.partition, answer->completion));
  trace_.Note({.lane = protocol::ClientLane::kFetch,
               .name = parts_.GroupName(ticket.partition),
               .start_ns = start_ns,
               .bytes = lease.bytes.size()});
  return lease;
}

absl::Status WeightsReader::CancelFetch(const FetchTicket& ticket, const WaitLimits& /*limits*/) {
  const auto fetch = fetches_.find(ticket.id);
  if (fetch == fetches_.end()) return UnknownTicket(ticket);
  link_.Abandon(*fetch->second);
  fetches_.erase(fetch);
  return absl::OkStatus();
}

absl::Status WeightsReader::Release(const Lease& lease, const WaitLimits& limits) {
  RETURN_IF_ERROR(link_.PollWithoutWait());
  Command command = MakeCommand(Op::kRelease, lease.partition);
  command.lease_id = lease.id;
  RETURN_IF_ERROR(link_.Send(command, limits, OnReleased()));
  return link_.errors().PopRelease();
}

absl::StatusOr<WeightsReader::Leases> WeightsReader::LeaseAll(std::pmr::vector<uint32_t> partitions,
                                                              const WaitLimits& limits) {
  std::sort(partitions.begin(), partitions.end());
  partitions.erase(std::unique(partitions.begin(), partitions.end()), partitions.end());
  std::pmr::vector<std::shared_ptr<Answer>> answers(link_.memory());
  Leases leases(link_.memory());
  absl::Status status;
  for (const uint32_t partition : partitions) {  // sends all requests before the first wait
    if (!status.ok()) break;
    absl::StatusOr<std::shared_ptr<Answer>> answer =
        link_.Start(MakeCommand(Op::kFetch, partition), limits);
    status = answer.status();
    if (status.ok()) answers.push_back(*std::move(answer));
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    Answer& answer = *answers[i];
    if (status.ok()) status = link_.WaitFor(answer, limits);
    if (status.ok()) status = answer.status;
    if (status.ok()) {
      const absl::StatusOr<Lease> lease = LeaseOf(partitions[i], answer.completion);
      status = lease.status();
      if (status.ok()) leases.push_back(*lease);
    }
    if (!status.ok()) link_.Abandon(answer);
  }
  if (status.ok()) return leases;
  for (const Lease& lease : leases) late_leases_.push_back(lease.id);
  return status;
}

absl::Status WeightsReader::LeaseAndCopy(std::span<const WeightsCopy> wanted, gpu::Stream& behind,
                                         const WaitLimits& limits) {
  std::pmr::vector<uint32_t> partitions(link_.memory());
  for (const WeightsCopy& copy : wanted) partitions.push_back(copy.partition);
  ASSIGN_OR_RETURN(const Leases leases, LeaseAll(std::move(partitions), limits));
  const uint64_t width = SizeBytes(parts_.layout->spec().dtype);
  auto begun = trace_.device()->Begin(behind);
  uint64_t bytes = 0;
  absl::Status status;
  for (const WeightsCopy& copy : wanted) {
    const Lease& lease = *std::ranges::find(leases, copy.partition, &Lease::partition);
    const auto from = lease.bytes.subspan(copy.first_elem * width, copy.to.size());
    if (status.ok()) status = device_.CopyToDevice(behind, copy.to, from, limits);
    bytes += from.size();
  }
  const std::string_view first_group =
      wanted.empty() ? std::string_view() : parts_.GroupName(wanted[0].partition);
  trace_.device()->End(
      behind, std::move(begun),
      {.lane = protocol::ClientLane::kWeightsToDevice, .name = first_group, .bytes = bytes});
  parts_.gauge->copied_bytes += bytes;
  // Recorded even after an error: copies that were begun read the leased bytes.
  absl::StatusOr<std::shared_ptr<const gpu::Event>> done = behind.Record();
  if (!done.ok()) {
    status.Update(done.status());
    status.Update(behind.Synchronize());
  }
  std::pmr::vector<uint64_t> ids(link_.memory());
  for (const Lease& lease : leases) ids.push_back(lease.id);
  if (done.ok()) {
    copies_.push_back({.leases = std::move(ids), .done = *std::move(done)});
  } else {
    late_leases_.insert(late_leases_.end(), ids.begin(), ids.end());
  }
  LookAtCopies();
  return link_.errors().StoreDevice(std::move(status));
}

absl::Status WeightsReader::CopyWeights(std::span<const WeightsCopy> wanted, gpu::Stream& stream,
                                        const WaitLimits& limits) {
  RETURN_IF_ERROR(CheckCopies(wanted));
  const std::string_view first_group =
      wanted.empty() ? std::string_view() : parts_.GroupName(wanted[0].partition);
  const gpu::NvtxRange range("forebay.copy_weights", first_group);
  RETURN_IF_ERROR(link_.Poll(limits));
  RETURN_IF_ERROR(link_.errors().PopRelease());
  if (!parts_.weights_on_swap) return LeaseAndCopy(wanted, stream, limits);
  // The daemon's cache need not hold two partitions of a rank at once.
  for (auto rest = wanted; !rest.empty();) {
    const auto other = std::ranges::find_if(
        rest, [&](const WeightsCopy& copy) { return copy.partition != rest.front().partition; });
    const auto count = static_cast<size_t>(other - rest.begin());
    absl::Status status = LeaseAndCopy(rest.first(count), stream, limits);
    if (protocol::IdOf(status) == ErrorId::kLimit) {  // leases of copies in flight fill the cache
      RETURN_IF_ERROR(EndCopies(limits));
      status = LeaseAndCopy(rest.first(count), stream, limits);
    }
    RETURN_IF_ERROR(status);
    rest = rest.subspan(count);
  }
  return absl::OkStatus();
}

absl::Status WeightsReader::LocateAhead(std::span<const uint32_t> partitions,
                                        const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  if (parts_.weights_on_swap) {
    return MakeError(ErrorId::kUnsupported,
                     "weights of this job are on swap: in DRAM they have no place that lasts",
                     "copy them with CopyWeights, or lease them with Fetch");
  }
  for (const uint32_t partition : partitions) RETURN_IF_ERROR(parts_.CheckPartition(partition));
  RETURN_IF_ERROR(link_.Poll(limits));
  RETURN_IF_ERROR(link_.errors().PopRelease());
  for (const uint32_t partition : partitions) {
    if (located_ahead_.contains(partition)) continue;
    protocol::Command command = MakeCommand(Op::kFetch, partition);
    command.kind = static_cast<uint16_t>(protocol::FetchKind::kPlace);
    ASSIGN_OR_RETURN(std::shared_ptr<Answer> answer, link_.Start(command, limits));
    located_ahead_.emplace(partition, std::move(answer));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::span<const std::byte>>> WeightsReader::Locate(
    std::span<const uint32_t> partitions, const WaitLimits& limits) {
  RETURN_IF_ERROR(LocateAhead(partitions, limits));
  std::map<uint32_t, std::span<const std::byte>> found;  // a partition may be asked for twice
  for (const uint32_t partition : partitions) {
    const auto asked = located_ahead_.extract(partition);
    if (asked.empty()) continue;
    Answer& answer = *asked.mapped();
    const absl::Status waited = link_.WaitFor(answer, limits);
    if (!waited.ok()) {
      link_.Abandon(answer);
      return waited;
    }
    RETURN_IF_ERROR(answer.status);
    ASSIGN_OR_RETURN(const Lease lease, LeaseOf(partition, answer.completion));
    found.emplace(partition, lease.bytes);
  }
  std::vector<std::span<const std::byte>> places;
  places.reserve(partitions.size());
  for (const uint32_t partition : partitions) places.push_back(found.at(partition));
  return places;
}

absl::StatusOr<size_t> WeightsReader::GiveBackCopied(const WaitLimits& /*limits*/) {
  LookAtCopies();
  RETURN_IF_ERROR(link_.errors().PopRelease());
  size_t waiting = 0;
  for (const CopiesInFlight& copy : copies_) waiting += copy.leases.size();
  return waiting;
}

absl::Status WeightsReader::EndReads(const WaitLimits& limits) {
  for (const auto& [partition, answer] : located_ahead_) link_.Abandon(*answer);
  located_ahead_.clear();
  return EndCopies(limits);
}

absl::Status WeightsReader::EndCopies(const WaitLimits& limits) {
  const auto ended = [this] { return copies_.empty() && late_leases_.empty(); };
  RETURN_IF_ERROR(link_.WaitForCopies(ended, limits));
  return link_.errors().PopRelease();
}

CommandPort::OnDone WeightsReader::OnReleased() {
  return [this](const Completion& completion, const absl::Status& status) {
    link_.UpdateCommittedStep(completion);
    link_.errors().release.Update(status);
  };
}

bool WeightsReader::LookAtCopies() {
  // Returns false while the ring is full.
  const auto release = [this](uint64_t lease) {
    Command command = MakeCommand(Op::kRelease);
    command.lease_id = lease;
    CommandPort::OnDone on_done = OnReleased();
    const absl::StatusOr<bool> sent = link_.TrySend(command, on_done);
    link_.errors().release.Update(sent.status());
    return sent.value_or(true);
  };
  while (!late_leases_.empty()) {
    const uint64_t lease = late_leases_.back();
    late_leases_.pop_back();  // before it is sent: sending may handle answers, which add leases
    if (release(lease)) continue;
    late_leases_.push_back(lease);
    break;
  }
  copies_.remove_if([&](CopiesInFlight& copy) {
    if (!device_.HasEnded(copy.done)) return false;
    while (!copy.leases.empty() && release(copy.leases.back())) copy.leases.pop_back();
    return copy.leases.empty();
  });
  return !copies_.empty() || !late_leases_.empty();
}

}  // namespace forebay::client::internal
