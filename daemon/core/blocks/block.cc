// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/block.h"

#include <algorithm>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

namespace {

using P = Phase;
using U = Purpose;
using T = Transition;

constexpr std::optional<Phase> kSamePhase;
constexpr SetOf<Purpose> kForUpdate = {U::kReadAhead, U::kEarly, U::kStep};
// The block is read, or is being read, and the decided step does not wait for it.
constexpr SetOf<Purpose> kUndecided = {U::kReadAhead, U::kEarly};
constexpr SetOf<Purpose> kAccessed = {U::kReadAhead, U::kEarly, U::kAccess};
constexpr SetOf<Purpose> kRead = {U::kReadAhead, U::kEarly, U::kStep, U::kAccess, U::kMove};
constexpr SetOf<Purpose> kRepeated = {U::kStep, U::kAccepted, U::kAccess};
constexpr SetOf<Phase> kWrites = {P::kWriting, P::kRewriting};
// Reasons to drop an early update: before the decision, and at the decision.
constexpr SetOf<Transition> kEnded = {T::kSumsChanged, T::kSumsForgotten, T::kAnnouncementsDiffer,
                                      T::kStatesWritten};
constexpr SetOf<Transition> kRefused = {T::kScalarsDiffer, T::kGradientMissing, T::kWeightsLeased};

constexpr auto kRules = std::to_array<BlockRule>({
    // Reads.
    {{T::kReadAhead}, {P::kIdle}, {U::kNone}, P::kReading, U::kReadAhead},
    {{T::kReadEarly}, {P::kIdle}, {U::kNone}, P::kReading, U::kEarly},
    {{T::kReadForStep}, {P::kIdle}, {U::kNone}, P::kReading, U::kStep},
    {{T::kReadForMove}, {P::kIdle}, {U::kNone}, P::kReading, U::kMove},
    {{T::kReadForAccess}, {P::kIdle}, {U::kNone}, P::kReading, U::kAccess},
    {{T::kReadForAccess}, {P::kWritten}, {U::kEarly}, P::kReading, U::kBeside},
    {{T::kReadEnded}, {P::kReading}, kRead, P::kReady},
    {{T::kReadEnded}, {P::kReading}, {U::kBeside}, P::kReady},
    {{T::kReadFailed, T::kAbandoned}, {P::kReading}, kRead, P::kIdle, U::kNone},
    {{T::kReadFailed, T::kAbandoned}, {P::kReading}, {U::kBeside}, P::kWritten, U::kEarly},
    {{T::kReadCancelled}, {P::kReading}, kAccessed, P::kCancelled},
    {{T::kReadCancelled}, {P::kReading}, {U::kBeside}, P::kCancelled},
    {{T::kReadWanted}, {P::kCancelled}, kUndecided, P::kReading},
    {{T::kReadDiscarded}, {P::kCancelled}, kAccessed, P::kIdle, U::kNone},
    {{T::kReadDiscarded}, {P::kCancelled}, {U::kBeside}, P::kWritten, U::kEarly},

    // Ready blocks that are dropped.
    {{T::kReclaimed, T::kAbandoned}, {P::kReady}, kForUpdate, P::kIdle, U::kNone},
    {{T::kNotNeeded, T::kMovesInstead}, {P::kReady}, kUndecided, P::kIdle, U::kNone},

    // Updates.
    {{T::kUpdate}, {P::kReady}, kForUpdate, P::kUpdating, U::kStep},
    {{T::kUpdateInPlace}, {P::kIdle}, {U::kNone}, P::kUpdating, U::kStep},
    {{T::kUpdateEarly}, {P::kReady}, kUndecided, P::kUpdating, U::kEarly},
    {{T::kNormsSummed, T::kUpdatedInPlace}, {P::kUpdating}, {U::kStep}, P::kIdle, U::kNone},
    {{T::kUpdateFailed}, {P::kUpdating}, {U::kStep, U::kAccepted}, P::kIdle, U::kNone},
    {{T::kWrite}, {P::kUpdating}, {U::kEarly, U::kStep, U::kAccepted}, P::kWriting},
    {{T::kWrite}, {P::kAccessing}, kAccessed, P::kWriting, U::kAccess},
    {{T::kWrite}, {P::kReady}, {U::kMove}, P::kWriting},
    {{T::kWriteRepeated}, kWrites, kRepeated, P::kRewriting},
    {{T::kWriteAbandoned}, kWrites, kRepeated, P::kIdle, U::kNone},
    {{T::kWritten}, kWrites, {U::kStep, U::kAccess}, P::kIdle, U::kNone},
    {{T::kWritten}, kWrites, {U::kAccepted}, P::kWritten},
    {{T::kWritten}, {P::kWriting}, {U::kEarly, U::kMove}, P::kWritten},

    // Early updates that are accepted.
    {{T::kAccepted},
     {P::kUpdating, P::kWriting, P::kWritten},
     {U::kEarly},
     kSamePhase,
     U::kAccepted},
    {{T::kInstall}, {P::kWritten}, {U::kAccepted}, P::kInstalling},
    {{T::kInstalled}, {P::kInstalling}, {U::kAccepted}, P::kIdle, U::kNone},
    {{T::kCompleted}, {P::kWritten}, {U::kAccepted}, P::kIdle, U::kNone},

    // Early updates that are dropped.
    {kEnded, {P::kUpdating, P::kWriting}, {U::kEarly}, P::kDropped},
    {kEnded, {P::kWritten}, {U::kEarly}, P::kIdle, U::kNone},
    {kEnded, {P::kReading, P::kCancelled, P::kAccessing}, {U::kBeside}, kSamePhase, U::kAccess},
    {kRefused, {P::kUpdating, P::kWriting}, {U::kEarly}, P::kDropped},
    {kRefused, {P::kWritten}, {U::kEarly}, P::kIdle, U::kNone},
    {{T::kMovedAway}, {P::kWritten}, {U::kEarly}, P::kIdle, U::kNone},
    {{T::kTaskFailed, T::kJobFailed}, {P::kUpdating, P::kWriting}, {U::kEarly}, P::kDropped},
    {{T::kDropEnded}, {P::kDropped}, {U::kEarly}, P::kIdle, U::kNone},

    // Reads and writes of states.
    {{T::kAccess}, {P::kReady}, kAccessed, P::kAccessing},
    {{T::kAccess}, {P::kReady}, {U::kBeside}, P::kAccessing},
    {{T::kAccessInPlace}, {P::kIdle}, {U::kNone}, P::kAccessing, U::kAccess},
    {{T::kAccessEnded}, {P::kAccessing}, kUndecided, P::kReady},
    {{T::kAccessEnded}, {P::kAccessing}, {U::kAccess}, P::kIdle, U::kNone},
    {{T::kAccessFailed}, {P::kAccessing}, kAccessed, P::kIdle, U::kNone},
    {{T::kAccessEnded, T::kAccessFailed}, {P::kAccessing}, {U::kBeside}, P::kWritten, U::kEarly},
    {{T::kAccessFailed}, {P::kReady}, {U::kAccess}, P::kIdle, U::kNone},

    // Moves.
    {{T::kMove}, {P::kIdle}, {U::kNone}, P::kMoving, U::kMove},
    {{T::kMoved}, {P::kMoving, P::kWriting, P::kWritten}, {U::kMove}, P::kIdle, U::kNone},

    // Updates of a killed daemon.
    {{T::kRecovered}, {P::kIdle}, {U::kNone}, P::kUpdating, U::kStep},
    {{T::kResumed}, {P::kUpdating}, {U::kStep}, P::kReady},
    {{T::kRecoveredWritten}, {P::kIdle}, {U::kNone}, P::kWritten, U::kEarly},
});

constexpr size_t kStates = kPhases * kPurposes;

constexpr size_t IndexOf(BlockState state) {
  return static_cast<size_t>(state.phase) * kPurposes + static_cast<size_t>(state.purpose);
}

// The rules by transition and state: the index of the state after the transition plus 1, or 0.
using Cells = std::array<std::array<uint8_t, kStates>, kTransitions>;

constexpr Cells MakeCells() {
  Cells cells = {};
  for (size_t transition = 0; transition < kTransitions; ++transition) {
    for (const BlockRule& rule : kRules) {
      if (!rule.transitions.has(static_cast<Transition>(transition))) continue;
      for (size_t index = 0; index < kStates; ++index) {
        const BlockState from = {.phase = static_cast<Phase>(index / kPurposes),
                                 .purpose = static_cast<Purpose>(index % kPurposes)};
        if (!rule.phases.has(from.phase) || !rule.purposes.has(from.purpose)) continue;
        const BlockState to = {.phase = rule.to.value_or(from.phase),
                               .purpose = rule.becomes.value_or(from.purpose)};
        cells[transition][index] = static_cast<uint8_t>(IndexOf(to) + 1);
      }
    }
  }
  return cells;
}

constexpr Cells kCells = MakeCells();
static_assert(kStates < UINT8_MAX && kTransitions <= 64);

constexpr SetOf<Phase> kWithStagingSlot = {P::kReading, P::kCancelled, P::kReady,
                                           P::kWriting, P::kRewriting, P::kDropped};
constexpr SetOf<Phase> kWithoutStagingSlot = {P::kIdle, P::kWritten, P::kInstalling, P::kMoving};

bool IsEarly(BlockState state) {
  if (state.purpose == U::kAccepted || state.purpose == U::kBeside) return true;
  return state.purpose == U::kEarly &&
         (state.phase == P::kUpdating || state.phase == P::kWriting || state.phase == P::kWritten);
}

bool MayHaveWeightsSlot(BlockState state) { return IsEarly(state) || state.phase == P::kDropped; }

}  // namespace

bool IsForUpdate(Purpose purpose) { return kForUpdate.has(purpose); }

std::span<const BlockRule> BlockRules() { return kRules; }

std::optional<BlockState> Next(BlockState state, Transition transition) {
  const uint8_t cell = kCells[static_cast<size_t>(transition)][IndexOf(state)];
  if (cell == 0) return std::nullopt;
  return BlockState{.phase = static_cast<Phase>((cell - 1U) / kPurposes),
                    .purpose = static_cast<Purpose>((cell - 1U) % kPurposes)};
}

Blocks::Blocks(StagingPool& pool, Options options)
    : pool_(pool),
      options_(std::move(options)),
      blocks_(options_.blocks),
      staged_(pool.memory()),
      early_(pool.memory()),
      free_weights_slots_(pool.memory()) {
  for (uint32_t slot = 0; slot < options_.weights_slots; ++slot) free_weights_slots_.insert(slot);
  counts_[static_cast<size_t>(P::kIdle)][static_cast<size_t>(U::kNone)] = options_.blocks;
  pool_.Join(*this);
}

Blocks::~Blocks() {
  for (const uint32_t block : staged_) pool_.Release(*blocks_[block].staging_slot);
  pool_.Leave(*this);
}

bool Blocks::is_early(uint32_t block) const { return IsEarly(blocks_[block].state); }

uint32_t Blocks::count(Purpose purpose) const {
  uint32_t sum = 0;
  for (const auto& of_phase : counts_) sum += of_phase[static_cast<size_t>(purpose)];
  return sum;
}

void Blocks::Apply(uint32_t block, Transition transition) {
  const std::optional<BlockState> next = Next(blocks_[block].state, transition);
  FOREBAY_CHECK(next.has_value());
  Set(block, *next);
}

void Blocks::Set(uint32_t block, BlockState state) {
  Block& of = blocks_[block];
  const auto count = [this](BlockState at) -> uint32_t& {
    return counts_[static_cast<size_t>(at.phase)][static_cast<size_t>(at.purpose)];
  };
  --count(of.state);
  ++count(state);
  if (IsEarly(of.state) != IsEarly(state)) {
    if (IsEarly(state)) {
      early_.insert(block);
    } else {
      early_.erase(block);
    }
  }
  of.state = state;
  if (of.staging_slot && kWithoutStagingSlot.has(state.phase)) {
    pool_.Release(*std::exchange(of.staging_slot, std::nullopt));
    staged_.erase(block);
    first_dropped_ = std::min(first_dropped_, options_.position(block));
  }
  if (of.weights_slot && !MayHaveWeightsSlot(state)) {
    free_weights_slots_.insert(*std::exchange(of.weights_slot, std::nullopt));
  }
}

void Blocks::BeginRead(uint32_t block, Transition transition, uint32_t staging_slot) {
  blocks_[block].staging_slot = staging_slot;
  staged_.insert(block);
  Apply(block, transition);
}

void Blocks::BeginEarly(uint32_t block, NewWeights weights) {
  Apply(block, T::kUpdateEarly);
  Block& of = blocks_[block];
  of.overflows = 0;
  if (weights == NewWeights::kInBlock) return;
  of.weights_slot = free_weights_slots_.extract(free_weights_slots_.begin()).value();
}

void Blocks::Adopt(uint32_t block, Transition transition, const Block& recorded) {
  Apply(block, transition);
  Block& of = blocks_[block];
  of.staging_slot = recorded.staging_slot;
  of.weights_slot = recorded.weights_slot;
  of.overflows = recorded.overflows;
  if (of.staging_slot) {
    pool_.Take(*of.staging_slot);
    staged_.insert(block);
  }
  if (of.weights_slot) FOREBAY_CHECK(free_weights_slots_.erase(*of.weights_slot) == 1);
}

std::optional<uint32_t> Blocks::AllocateFree(uint32_t reserved) {
  const std::optional<uint32_t> slot = pool_.AllocateFree(reserved);
  if (!slot) waits_for_slot_ = true;
  return slot;
}

std::optional<uint32_t> Blocks::AllocateUrgent() {
  const std::optional<uint32_t> slot = pool_.AllocateUrgent(*this);
  if (!slot) waits_for_slot_ = true;
  return slot;
}

std::optional<uint32_t> Blocks::ReclaimWhere(const std::function<bool(uint32_t block)>& may_drop) {
  std::optional<uint32_t> last;
  for (const uint32_t block : staged_) {
    if (!Next(blocks_[block].state, T::kReclaimed) || !may_drop(block)) continue;
    if (!last || options_.position(block) > options_.position(*last)) last = block;
  }
  if (!last) return std::nullopt;
  const uint32_t slot = *std::exchange(blocks_[*last].staging_slot, std::nullopt);
  staged_.erase(*last);
  Apply(*last, T::kReclaimed);
  waits_for_slot_ = true;
  ++reclaimed_;
  first_dropped_ = std::min(first_dropped_, options_.position(*last));
  return slot;
}

uint32_t Blocks::DrainFirstDropped() { return std::exchange(first_dropped_, UINT32_MAX); }

void Blocks::CheckInvariants() const {
  std::array<std::array<uint32_t, kPurposes>, kPhases> counts = {};
  std::set<uint32_t> weights_slots = {free_weights_slots_.begin(), free_weights_slots_.end()};
  for (uint32_t block = 0; block < blocks_.size(); ++block) {
    const Block& of = blocks_[block];
    ++counts[static_cast<size_t>(of.state.phase)][static_cast<size_t>(of.state.purpose)];
    FOREBAY_CHECK((of.state.phase == P::kIdle) == (of.state.purpose == U::kNone));
    if (kWithStagingSlot.has(of.state.phase)) FOREBAY_CHECK(of.staging_slot.has_value());
    if (kWithoutStagingSlot.has(of.state.phase)) FOREBAY_CHECK(!of.staging_slot.has_value());
    if (of.weights_slot) {
      FOREBAY_CHECK(MayHaveWeightsSlot(of.state) && weights_slots.insert(*of.weights_slot).second);
    }
    FOREBAY_CHECK(staged_.contains(block) == of.staging_slot.has_value());
    FOREBAY_CHECK(early_.contains(block) == IsEarly(of.state));
  }
  FOREBAY_CHECK(weights_slots.size() == options_.weights_slots && counts == counts_);
}

}  // namespace forebay::daemon
