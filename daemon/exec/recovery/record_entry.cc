// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/record_entry.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "nvme/checksum.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kHyperValues = sizeof(protocol::HyperParams) / sizeof(double);
using HyperValues = std::array<double, kHyperValues>;

// Bytes of an entry with a struct of this type and without lists. A message begins with a pointer.
template <typename Struct>
constexpr uint64_t EntryBytesOf() {
  const uint64_t words =
      1 + capnp::sizeInWords<schema::RecordEntry>() + capnp::sizeInWords<Struct>();
  return sizeof(EntryHead) + words * sizeof(capnp::word);
}
static_assert(EntryBytesOf<schema::BlockEntry>() <= kPlaceEntryBytes);
static_assert(EntryBytesOf<schema::SumsEntry>() <= kPlaceEntryBytes);
static_assert(EntryBytesOf<schema::Lease>() <= kSmallEntryBytes);
static_assert(EntryBytesOf<schema::StagedEntry>() <= kSmallEntryBytes);
static_assert(EntryBytesOf<schema::AttemptEntry>() <= kSmallEntryBytes);
static_assert(EntryBytesOf<schema::StepEntry>() <= kSmallEntryBytes);
static_assert(EntryBytesOf<schema::UpdatesEntry>() <= kSmallEntryBytes);
// The tag of a list of structs, and the ends of two lists that are rounded up to words.
constexpr uint64_t kListsRestBytes = 3 * sizeof(capnp::word);
static_assert(EntryBytesOf<schema::DecisionEntry>() + kListsRestBytes <= kValuesEntryBytes);
static_assert(EntryBytesOf<schema::OrderEntry>() + sizeof(StatePart) + kListsRestBytes <=
              kValuesEntryBytes);
static_assert(EntryBytesOf<schema::PreparedEntry>() + sizeof(StatePart) + kListsRestBytes <=
              kValuesEntryBytes);
static_assert(EntryBytesOf<schema::TrustEntry>() + kListsRestBytes <= kValuesEntryBytes);
static_assert(kHyperParamsEntryBytes == sizeof(capnp::word) + sizeof(protocol::HyperParams));

unsigned CountOf(const auto& list) { return static_cast<unsigned>(list.size()); }

void SetList(const auto& from, auto to) {
  for (unsigned i = 0; i < to.size(); ++i) to.set(i, from[i]);
}

void SetPart(const StatePart& from, schema::Part::Builder to) {
  to.setOffsetBytes(from.offset_bytes);
  to.setBytes(from.bytes);
}

void SetGroups(const auto& from, auto to) {
  for (unsigned i = 0; i < to.size(); ++i) {
    SetList(std::bit_cast<HyperValues>(from[i]), to.init(i, kHyperValues));
  }
}

// Sets the fields that a prepared and a decided step have in common.
void SetValues(const auto& from, auto to) {
  to.setStep(from.step);
  auto states = to.initExtraStates(CountOf(from.extra_states));
  for (unsigned i = 0; i < states.size(); ++i) SetPart(from.extra_states[i], states[i]);
  if (from.summary.empty()) return;
  std::memcpy(to.initSummary(CountOf(from.summary)).begin(), from.summary.data(),
              from.summary.size());
}

}  // namespace

absl::Status CorruptRecord(const std::string& what) {
  return protocol::MakeError(protocol::ErrorId::kCorrupt,
                             absl::StrCat("the record of a job: ", what));
}

uint64_t EntryBytesMax(const RecordBlock& record) {
  const uint64_t digests = record.weights_digests ? record.weights_digests->size() : 0;
  return kPlaceEntryBytes + digests * sizeof(uint64_t);
}

uint64_t EntryBytesMax(const RecordSums& /*record*/) { return kPlaceEntryBytes; }

uint64_t EntryBytesMax(const RecordPrepared& record) {
  return kValuesEntryBytes + record.hyper_params.size() * kHyperParamsEntryBytes +
         record.extra_states.size() * sizeof(StatePart) + record.summary.size();
}

uint64_t EntryBytesMax(const RecordDecision& record) {
  return kValuesEntryBytes + record.extra_states.size() * sizeof(StatePart) +
         record.summary.size() + record.param_updates.size() * sizeof(uint64_t) +
         record.trace.size() * sizeof(uint32_t);
}

uint64_t EntryBytesMax(const RecordOrder& record) {
  const StepOrder& order = record.decision.order;
  return kValuesEntryBytes + order.hyper_params.size() * kHyperParamsEntryBytes +
         order.params.size() / 8;
}

uint64_t EntryBytesMax(const RecordTrust& record) {
  return kValuesEntryBytes + record.trust.size() * sizeof(float);
}

void SetMessage(const RecordBlock& record, schema::RecordEntry::Builder to) {
  auto block = to.initBlock();
  block.setStep(record.step);
  block.setBlock(record.block);
  if (record.slot) {
    block.setPath(record.slot->path + 1);
    block.setOffsetBytes(record.slot->offset_bytes);
  }
  block.setChecksum(record.checksum);
  block.setWrittenStep(record.written_step);
  block.setOverflows(record.overflows);
  if (record.weights_slot) block.setWeightsSlot(*record.weights_slot + 1);
  if (!record.weights_digests || record.weights_digests->empty()) return;
  const auto digests = std::as_bytes(std::span(*record.weights_digests));
  std::memcpy(block.initDigests(CountOf(digests)).begin(), digests.data(), digests.size());
}

void SetMessage(const RecordInstalled& record, schema::RecordEntry::Builder to) {
  to.setInstalled(record.block);
}

void SetMessage(const RecordStaged& record, schema::RecordEntry::Builder to) {
  auto staged = to.initStaged();
  staged.setStep(record.step);
  staged.setBlock(record.block);
  staged.setStagingSlot(record.staging_slot);
}

void SetMessage(const RecordSums& record, schema::RecordEntry::Builder to) {
  auto sums = to.initSums();
  sums.setStep(record.step);
  sums.setPage(record.page);
  if (record.frame) sums.setFrame(*record.frame + 1);
  if (record.slot) {
    sums.setPath(record.slot->path + 1);
    sums.setOffsetBytes(record.slot->offset_bytes);
    sums.setSizeBytes(record.slot->size_bytes);
  }
  sums.setChecksum(record.checksum);
  sums.setSpills(record.spills);
}

void SetMessage(const RecordAttempt& record, schema::RecordEntry::Builder to) {
  auto attempt = to.initAttempt();
  attempt.setStep(record.step);
  attempt.setAttempt(record.attempt);
}

void SetMessage(const RecordPrepared& record, schema::RecordEntry::Builder to) {
  auto prepared = to.initPrepared();
  SetValues(record, prepared);
  SetGroups(record.hyper_params, prepared.initHyperParams(CountOf(record.hyper_params)));
  SetPart(record.float_sums, prepared.initFloatSums());
  prepared.setAttempt(record.attempt);
  prepared.setMaxGradNorm(record.request.max_grad_norm);
  prepared.setGradScale(record.request.grad_scale);
  prepared.setGradMin(record.request.grad_min);
  prepared.setGradMax(record.request.grad_max);
  prepared.setParamGroups(record.request.param_groups);
  prepared.setExtraStateBytes(record.request.extra_state_bytes);
}

void SetMessage(const RecordDecision& record, schema::RecordEntry::Builder to) {
  auto decision = to.initDecision();
  SetValues(record, decision);
  decision.setNorm(record.norm);
  decision.setClipped(record.clipped);
  decision.setOverflowed(record.overflowed);
  SetList(record.param_updates, decision.initParamUpdates(CountOf(record.param_updates)));
  SetList(record.trace, decision.initTrace(CountOf(record.trace)));
}

void SetMessage(const RecordOrder& record, schema::RecordEntry::Builder to) {
  const StepOrder& from = record.decision.order;
  auto order = to.initOrder();
  order.setStep(record.decision.step);
  order.setGradScale(from.grad_scale);
  order.setGradMin(from.grad_min);
  order.setGradMax(from.grad_max);
  SetGroups(from.hyper_params, order.initHyperParams(CountOf(from.hyper_params)));
  SetList(from.params, order.initParams(CountOf(from.params)));
  SetPart(record.decision.float_sums, order.initFloatSums());
}

void SetMessage(const RecordTrust& record, schema::RecordEntry::Builder to) {
  auto trust = to.initTrust();
  trust.setStep(record.step);
  SetList(record.trust, trust.initTrust(CountOf(record.trust)));
}

void SetMessage(const RecordStep& record, schema::RecordEntry::Builder to) {
  auto step = to.initStep();
  step.setStep(record.step);
  step.setOverflowed(record.overflowed);
}

void SetMessage(const RecordUpdates& record, schema::RecordEntry::Builder to) {
  auto updates = to.initUpdates();
  updates.setParam(record.param);
  updates.setUpdates(record.updates);
}

void SetMessage(const RecordLease& record, schema::RecordEntry::Builder to) {
  auto lease = to.initLease();
  lease.setLease(record.lease.lease);
  lease.setOffsetBytes(record.lease.offset_bytes);
  lease.setRank(record.lease.rank);
  lease.setPartition(record.lease.partition);
}

void SetMessage(const RecordLeaseEnd& record, schema::RecordEntry::Builder to) {
  to.initLeaseEnd().setLease(record.lease);
}

uint64_t FinishEntry(capnp::MessageBuilder& message, std::span<std::byte> entry) {
  const kj::ArrayPtr<const kj::byte> bytes = message.getSegmentsForOutput()[0].asBytes();
  FOREBAY_CHECK(sizeof(EntryHead) + bytes.size() <= entry.size());
  const EntryHead head{.message_bytes = bytes.size(),
                       .checksum = nvme::Checksum({}, std::as_bytes(std::span(bytes)))};
  std::memcpy(entry.data(), &head, sizeof(head));
  return sizeof(head) + bytes.size();
}

absl::StatusOr<uint64_t> CheckEntry(std::span<const std::byte> bytes) {
  EntryHead head;
  if (bytes.size() < sizeof(head)) return CorruptRecord("an entry that is cut short");
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.message_bytes == 0 || head.message_bytes % sizeof(capnp::word) != 0 ||
      head.message_bytes > bytes.size() - sizeof(head)) {
    return CorruptRecord("an entry of a wrong size");
  }
  if (nvme::Checksum({}, bytes.subspan(sizeof(head), head.message_bytes)) != head.checksum) {
    return CorruptRecord("an entry that is damaged");
  }
  return sizeof(head) + head.message_bytes;
}

EntryReader::EntryReader(std::span<const std::byte> bytes)
    : words_(reinterpret_cast<const capnp::word*>(bytes.data() + sizeof(EntryHead)),
             reinterpret_cast<const EntryHead*>(bytes.data())->message_bytes / sizeof(capnp::word)),
      reader_(kj::arrayPtr(&words_, 1)) {}

}  // namespace forebay::daemon
