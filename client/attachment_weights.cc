// SPDX-License-Identifier: Apache-2.0
// Copies of weights to the device: lease, copy, give back when the copy has ended.

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/attachment_state.h"
#include "client/internal/stopwatch.h"
#include "client/internal/written_pages.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {

using internal::MakeCommand;
using internal::Stopwatch;
using internal::WaitLimits;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

absl::Status Attachment::State::CheckCopies(std::span<const WeightsCopy> wanted) {
  const protocol::Layout& layout = *parts.layout;
  const uint64_t width = SizeBytes(layout.spec().dtype);
  for (const WeightsCopy& copy : wanted) {
    RETURN_IF_ERROR(parts.CheckPartition(copy.partition));
    const uint64_t elems = layout.partitions()[copy.partition].elems;
    const bool fits = copy.first_elem <= elems && copy.to.size() / width <= elems - copy.first_elem;
    if (fits && copy.to.size() % width == 0) {
      RETURN_IF_ERROR(CheckReach(copy.to, width));
      continue;
    }
    return MakeError(ErrorId::kRange,
                     absl::StrCat(copy.to.size(), " bytes from element ", copy.first_elem,
                                  " on are outside ", layout.DescribePartition(copy.partition),
                                  ", which has ", elems, " elements of ", width, " bytes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Attachment::State::Leases> Attachment::State::LeaseAll(
    std::pmr::vector<uint32_t> partitions, const WaitLimits& limits) {
  std::sort(partitions.begin(), partitions.end());
  partitions.erase(std::unique(partitions.begin(), partitions.end()), partitions.end());
  std::pmr::vector<std::shared_ptr<Answer>> answers(&memory);
  Leases leases(&memory);
  absl::Status status;
  for (const uint32_t partition : partitions) {  // sends all requests before the first wait
    if (!status.ok()) break;
    absl::StatusOr<std::shared_ptr<Answer>> answer =
        Start(MakeCommand(Op::kFetch, partition), limits);
    status = answer.status();
    if (status.ok()) answers.push_back(*std::move(answer));
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    Answer& answer = *answers[i];
    if (status.ok()) status = WaitFor(answer, limits);
    if (status.ok()) status = answer.status;
    if (status.ok()) {
      const absl::StatusOr<Lease> lease = LeaseOf(partitions[i], answer.completion);
      status = lease.status();
      if (status.ok()) leases.push_back(*lease);
    }
    if (!status.ok()) Abandon(answer);
  }
  if (status.ok()) return leases;
  for (const Lease& lease : leases) late_leases.push_back(lease.id);
  return status;
}

const Lease& Attachment::State::LeaseIn(const Leases& leases, uint32_t partition) {
  return *std::find_if(leases.begin(), leases.end(),
                       [&](const Lease& lease) { return lease.partition == partition; });
}

// Leases all partitions of the copies, and begins to copy.
absl::Status Attachment::State::LeaseAndCopy(std::span<const WeightsCopy> wanted,
                                             gpu::Stream& behind, const WaitLimits& limits) {
  std::pmr::vector<uint32_t> partitions(&memory);
  for (const WeightsCopy& copy : wanted) partitions.push_back(copy.partition);
  ASSIGN_OR_RETURN(const Leases leases, LeaseAll(std::move(partitions), limits));
  const uint64_t width = SizeBytes(parts.layout->spec().dtype);
  auto begun = device_trace->Begin(behind);
  uint64_t bytes = 0;
  absl::Status status;
  for (const WeightsCopy& copy : wanted) {
    const std::span<const std::byte> from =
        LeaseIn(leases, copy.partition).bytes.subspan(copy.first_elem * width, copy.to.size());
    if (status.ok()) status = CopyToDevice(behind, copy.to, from, limits);
    bytes += from.size();
  }
  const std::string_view first_group =
      wanted.empty() ? std::string_view() : parts.GroupName(wanted[0].partition);
  device_trace->End(
      behind, std::move(begun),
      {.lane = protocol::ClientLane::kWeightsToDevice, .name = first_group, .bytes = bytes});
  gauge.copied_bytes += bytes;
  // Recorded even after an error: copies that were begun read the leased bytes.
  absl::StatusOr<std::shared_ptr<const gpu::Event>> done = behind.Record();
  if (!done.ok()) {
    status.Update(done.status());
    status.Update(behind.Synchronize());
  }
  std::pmr::vector<uint64_t> ids(&memory);
  for (const Lease& lease : leases) ids.push_back(lease.id);
  if (done.ok()) {
    copies.push_back({.leases = std::move(ids), .done = *std::move(done)});
  } else {
    late_leases.insert(late_leases.end(), ids.begin(), ids.end());
  }
  LookAtCopies();
  return KeepDeviceError(std::move(status));
}

absl::Status Attachment::CopyWeights(std::span<const WeightsCopy> copies, gpu::Stream& stream,
                                     Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_fetch);
  RETURN_IF_ERROR(s.CheckCopies(copies));
  const std::string_view first_group =
      copies.empty() ? std::string_view() : s.parts.GroupName(copies[0].partition);
  const gpu::NvtxRange range("forebay.copy_weights", first_group);
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.waiter.Poll(limits));
  RETURN_IF_ERROR(s.KeptReleaseError());
  if (!s.parts.weights_on_swap) return s.LeaseAndCopy(copies, stream, limits);
  // The daemon's cache need not hold two partitions of a rank at once.
  for (auto rest = copies; !rest.empty();) {
    const auto other = std::ranges::find_if(
        rest, [&](const WeightsCopy& copy) { return copy.partition != rest.front().partition; });
    const auto count = static_cast<size_t>(other - rest.begin());
    absl::Status status = s.LeaseAndCopy(rest.first(count), stream, limits);
    if (protocol::IdOf(status) == ErrorId::kLimit) {  // leases of copies in flight fill the cache
      RETURN_IF_ERROR(s.EndWeightCopies(limits));
      status = s.LeaseAndCopy(rest.first(count), stream, limits);
    }
    RETURN_IF_ERROR(status);
    rest = rest.subspan(count);
  }
  return absl::OkStatus();
}

absl::Status Attachment::State::CheckReadsInPlace(std::span<const uint32_t> partitions) const {
  RETURN_IF_ERROR(parts.CheckHasRank());
  if (parts.weights_on_swap) {
    return MakeError(ErrorId::kUnsupported,
                     "weights of this job are on swap: in DRAM they have no place that lasts",
                     "copy them with CopyWeights, or lease them with Fetch");
  }
  for (const uint32_t partition : partitions) RETURN_IF_ERROR(parts.CheckPartition(partition));
  return absl::OkStatus();
}

void Attachment::State::ForgetLocatedAhead() {
  for (const auto& [partition, answer] : located_ahead) Abandon(*answer);
  located_ahead.clear();
}

absl::Status Attachment::LocateAhead(std::span<const uint32_t> partitions, Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_fetch);
  RETURN_IF_ERROR(s.CheckReadsInPlace(partitions));
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.waiter.Poll(limits));
  RETURN_IF_ERROR(s.KeptReleaseError());
  for (const uint32_t partition : partitions) {
    if (s.located_ahead.contains(partition)) continue;
    protocol::Command command = MakeCommand(Op::kFetch, partition);
    command.kind = static_cast<uint16_t>(protocol::FetchKind::kPlace);
    ASSIGN_OR_RETURN(std::shared_ptr<State::Answer> answer, s.Start(command, limits));
    s.located_ahead.emplace(partition, std::move(answer));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::span<const std::byte>>> Attachment::Locate(
    std::span<const uint32_t> partitions, Timeout timeout) {
  RETURN_IF_ERROR(LocateAhead(partitions, timeout));
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_fetch);
  const WaitLimits limits = s.parts.Limits(timeout);
  std::map<uint32_t, std::span<const std::byte>> found;  // a partition may be asked for twice
  for (const uint32_t partition : partitions) {
    const auto asked = s.located_ahead.extract(partition);
    if (asked.empty()) continue;
    State::Answer& answer = *asked.mapped();
    const absl::Status waited = s.WaitFor(answer, limits);
    if (!waited.ok()) {
      s.Abandon(answer);
      return waited;
    }
    RETURN_IF_ERROR(answer.status);
    ASSIGN_OR_RETURN(const Lease lease, s.LeaseOf(partition, answer.completion));
    found.emplace(partition, lease.bytes);
  }
  std::vector<std::span<const std::byte>> places;
  places.reserve(partitions.size());
  for (const uint32_t partition : partitions) places.push_back(found.at(partition));
  return places;
}

absl::Status Attachment::WriteState(uint32_t partition, uint64_t first_elem, std::string_view state,
                                    std::span<const float> values, Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.parts.CheckHasRank());
  RETURN_IF_ERROR(s.parts.CheckOwn(partition));
  const protocol::Layout& layout = *s.parts.layout;
  ASSIGN_OR_RETURN(const uint16_t kind, internal::StateNumber(layout, state));
  const uint64_t elems = layout.partitions()[partition].elems;
  if (first_elem > elems || values.size() > elems - first_elem) {
    return MakeError(
        ErrorId::kRange,
        absl::StrCat(values.size(), " elements from element ", first_elem, " on are outside ",
                     layout.DescribePartition(partition), ", which has ", elems));
  }
  // Checks all values before the first write.
  const protocol::LayoutSpec& spec = layout.spec();
  const auto bad = std::ranges::find_if(values, [&](float value) {
    return !protocol::IsStorable(spec.optimizer, {spec.format, spec.dtype}, kind, value);
  });
  if (bad != values.end()) {
    return MakeError(
        ErrorId::kNonfinite,
        absl::StrCat(std::string(state), " of element ",
                     first_elem + static_cast<uint64_t>(bad - values.begin()), " of ",
                     layout.DescribePartition(partition), " is ", *bad,
                     ", which the job cannot hold: ",
                     kind == 0 ? absl::StrCat("no finite ", std::string(Name(spec.dtype)))
                               : "not finite in its format, or a square below 0"),
        "check the values that are written");
  }
  const WaitLimits limits = s.parts.Limits(timeout);
  s.ForgetLocatedAhead();
  RETURN_IF_ERROR(s.EndWeightCopies(limits));
  protocol::Command command = internal::MakeCommand(Op::kWriteState, partition);
  command.kind = kind;
  command.element_offset = first_elem;
  return s.SendElements(command, std::as_bytes(values), sizeof(float), limits);
}

absl::Status Attachment::WriteUpdates(uint32_t param, uint64_t updates, Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.parts.CheckHasRank());
  protocol::Command command = internal::MakeCommand(Op::kWriteUpdates, param);
  command.step = updates;
  return s.Call(command, nullptr, s.parts.Limits(timeout)).status();
}

absl::Status Attachment::AllowWeightWrites() {
  State& s = *state_;
  if (!s.parts.weights_file.valid()) {
    return MakeError(ErrorId::kUnsupported, "writes into weights that are no views of this rank's",
                     "WriteState");
  }
  if (s.window->written() != nullptr) return absl::OkStatus();
  if (s.window->AllowWrites(s.parts.weights_file.get())) return absl::OkStatus();
  return MakeError(ErrorId::kLimit, absl::StrCat("this process has ", kWindowsMax, " attachments"),
                   "detach those that are not needed");
}

bool Attachment::has_written_weights() const {
  const internal::WrittenPages* const written = state_->window->written();
  return written != nullptr && !written->empty();
}

std::vector<WeightsRange> Attachment::WrittenWeights() const {
  std::vector<WeightsRange> ranges;
  if (!has_written_weights()) return ranges;
  for (const internal::WindowRange& range : state_->window->written()->Ranges()) {
    ranges.push_back({.begin_bytes = range.begin_bytes,
                      .end_bytes = std::min<uint64_t>(range.end_bytes, weights().size())});
  }
  return ranges;
}

absl::StatusOr<std::shared_ptr<const std::byte>> Attachment::DaemonWeights() const {
  ASSIGN_OR_RETURN(const std::shared_ptr<internal::Mapping> mapping,
                   internal::Mapping::MapFile(state_->parts.weights_file.get(), weights().size(),
                                              internal::MapAccess::kRead));
  return std::shared_ptr<const std::byte>(mapping, mapping->bytes().data());
}

void Attachment::DropWrittenWeights() {
  if (has_written_weights()) state_->window->written()->GiveBack();
}

absl::StatusOr<size_t> Attachment::GiveBackCopied() {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  s.LookAtCopies();
  RETURN_IF_ERROR(s.KeptReleaseError());
  size_t waiting = 0;
  for (const State::CopiesInFlight& copy : s.copies) waiting += copy.leases.size();
  return waiting;
}

}  // namespace forebay::client
