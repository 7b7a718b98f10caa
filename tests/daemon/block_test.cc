// SPDX-License-Identifier: Apache-2.0
// Goal    A block makes exactly the transitions that the table allows. In every phase it has the slots that the phase says, and
//         it has none when its life is over. Each reason to drop an early update gives back the same slots.
// Method  Every cell (phase, purpose, transition) is tried. States are reached from kIdle by the shortest path. Random walks of
//         several blocks share few slots.

#include "daemon/core/blocks/block.h"

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "daemon/core/blocks/staging.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace forebay::daemon::block_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using P = Phase;
using U = Purpose;
using T = Transition;
using Path = std::vector<Transition>;

constexpr SetOf<Transition> kBeginsRead = {T::kReadAhead, T::kReadEarly, T::kReadForStep,
                                           T::kReadForAccess, T::kReadForMove};
constexpr SetOf<Transition> kInDram = {T::kUpdateInPlace, T::kAccessInPlace};
constexpr Transition kDropReasons[] = {
    T::kSumsChanged,   T::kSumsForgotten,   T::kAnnouncementsDiffer, T::kStatesWritten,
    T::kScalarsDiffer, T::kGradientMissing, T::kWeightsLeased,       T::kMovedAway,
    T::kTaskFailed,    T::kJobFailed};

std::vector<Transition> AllTransitions() {
  std::vector<Transition> all;
  for (size_t i = 0; i < kTransitions; ++i) all.push_back(static_cast<Transition>(i));
  return all;
}

std::vector<BlockState> AllStates() {
  std::vector<BlockState> all;
  for (size_t phase = 0; phase < kPhases; ++phase) {
    for (size_t purpose = 0; purpose < kPurposes; ++purpose) {
      all.push_back({.phase = static_cast<Phase>(phase), .purpose = static_cast<Purpose>(purpose)});
    }
  }
  return all;
}

std::pair<int, int> KeyOf(BlockState state) {
  return {static_cast<int>(state.phase), static_cast<int>(state.purpose)};
}

// Four blocks whose positions are in the opposite order of their numbers.
class BlockTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kBlocks = 4;
  static constexpr uint32_t kSlots = 3;
  static constexpr uint32_t kWeightsSlots = 2;

  static Blocks::Options OptionsOf(bool may_reclaim) {
    return {.blocks = kBlocks,
            .weights_slots = kWeightsSlots,
            .may_reclaim = [may_reclaim](uint32_t) { return may_reclaim; },
            .position = [](uint32_t block) { return kBlocks - 1 - block; }};
  }

  // Applies a transition as the pipeline does, with a slot if it needs one. False if no slot is free.
  static bool Make(Blocks& blocks, StagingPool& pool, uint32_t block, Transition transition) {
    if (kBeginsRead.has(transition) || transition == T::kRecovered) {
      const std::optional<uint32_t> slot = pool.AllocateFree();
      if (!slot) return false;
      if (transition == T::kRecovered) {
        pool.Release(*slot);
        blocks.Adopt(block, transition, {.staging_slot = slot});
      } else {
        blocks.BeginRead(block, transition, *slot);
      }
    } else if (transition == T::kUpdateEarly) {
      if (!blocks.has_free_weights_slot()) return false;
      blocks.BeginEarly(block, Blocks::NewWeights::kInSlot);
    } else if (transition == T::kRecoveredWritten) {
      blocks.Adopt(block, transition, {});
    } else {
      blocks.Apply(block, transition);
    }
    return true;
  }

  // Returns the shortest path from kIdle to each state that a block on swap can reach, by the rules alone.
  static std::map<std::pair<int, int>, Path> Paths() {
    std::map<std::pair<int, int>, Path> paths = {{KeyOf({}), {}}};
    std::vector<BlockState> queue = {{}};
    for (size_t next = 0; next < queue.size(); ++next) {
      const BlockState from = queue[next];
      for (const Transition transition : AllTransitions()) {
        if (kInDram.has(transition) || transition == T::kRecovered) continue;
        const std::optional<BlockState> to = Next(from, transition);
        if (!to || paths.contains(KeyOf(*to))) continue;
        Path path = paths.at(KeyOf(from));
        path.push_back(transition);
        paths.emplace(KeyOf(*to), path);
        queue.push_back(*to);
      }
    }
    return paths;
  }
};

TEST_F(BlockTest, EveryCellHasAtMostOneRuleAndNextFollowsIt) {
  for (const BlockState from : AllStates()) {
    for (const Transition transition : AllTransitions()) {
      std::vector<BlockState> to;
      for (const BlockRule& rule : BlockRules()) {
        if (!rule.transitions.has(transition) || !rule.phases.has(from.phase) ||
            !rule.purposes.has(from.purpose)) {
          continue;
        }
        to.push_back({.phase = rule.to.value_or(from.phase),
                      .purpose = rule.becomes.value_or(from.purpose)});
      }
      ASSERT_LE(to.size(), 1U);
      EXPECT_EQ(Next(from, transition),
                to.empty() ? std::nullopt : std::optional<BlockState>(to[0]));
    }
  }
}

TEST_F(BlockTest, EveryAllowedTransitionLeadsWhereTheTableSaysWithTheSlotsOfThePhase) {
  std::set<Transition> made;
  for (const auto& [key, path] : Paths()) {
    for (const Transition transition : AllTransitions()) {
      StagingPool pool(kSlots);
      {
        Blocks blocks(pool, OptionsOf(true));
        for (const Transition step : path) ASSERT_TRUE(Make(blocks, pool, 1, step));
        const BlockState from = blocks.at(1).state;
        ASSERT_EQ(KeyOf(from), key);
        const std::optional<BlockState> to = Next(from, transition);
        if (!to) continue;
        ASSERT_TRUE(Make(blocks, pool, 1, transition));
        made.insert(transition);
        EXPECT_EQ(blocks.at(1).state, *to);
        EXPECT_EQ(blocks.count(to->phase, to->purpose), *to == BlockState() ? kBlocks : 1U);
        EXPECT_EQ(pool.used(), blocks.staged().size());
        const bool is_out = to->phase == P::kIdle || to->phase == P::kWritten ||
                            to->phase == P::kInstalling || to->phase == P::kMoving ||
                            kInDram.has(transition);
        EXPECT_EQ(blocks.staged().contains(1), !is_out);
        if (*to == BlockState()) {
          EXPECT_THAT(blocks.early(), IsEmpty());
        }
        blocks.CheckInvariants();
      }
      EXPECT_EQ(pool.used(), 0U);
    }
  }
  EXPECT_EQ(made.size(), kTransitions);
}

TEST_F(BlockTest, ARefusedTransitionStopsTheProcess) {
  for (const auto& [key, path] : Paths()) {
    StagingPool pool(kSlots);
    Blocks blocks(pool, OptionsOf(true));
    for (const Transition step : path) ASSERT_TRUE(Make(blocks, pool, 1, step));
    const BlockState from = blocks.at(1).state;
    for (const Transition refused : {T::kReadEnded, T::kWritten, T::kMoved, T::kScalarsDiffer}) {
      if (Next(from, refused)) continue;
      EXPECT_DEATH(blocks.Apply(1, refused), "CHECK failed");
      break;
    }
  }
}

TEST_F(BlockTest, EveryStateLeadsBackToIdle) {
  std::set<std::pair<int, int>> home = {KeyOf({})};
  for (size_t before = 0; before != home.size();) {
    before = home.size();
    for (const BlockState from : AllStates()) {
      for (const Transition transition : AllTransitions()) {
        const std::optional<BlockState> to = Next(from, transition);
        if (to && home.contains(KeyOf(*to))) home.insert(KeyOf(from));
      }
    }
  }
  for (const BlockRule& rule : BlockRules()) {
    for (const BlockState from : AllStates()) {
      if (!rule.phases.has(from.phase) || !rule.purposes.has(from.purpose)) continue;
      EXPECT_TRUE(home.contains(KeyOf(from))) << KeyOf(from).first << " " << KeyOf(from).second;
    }
  }
}

TEST_F(BlockTest, EveryReasonDropsAnEarlyUpdateAndFreesItsSlotsOnceItsTaskHasEnded) {
  for (const Transition reason : kDropReasons) {
    for (const P phase : {P::kUpdating, P::kWriting, P::kWritten}) {
      if (!Next({.phase = phase, .purpose = U::kEarly}, reason)) continue;
      StagingPool pool(kSlots);
      Blocks blocks(pool, OptionsOf(true));
      for (const T step : {T::kReadEarly, T::kReadEnded, T::kUpdateEarly, T::kWrite, T::kWritten}) {
        if (blocks.phase(2) == phase) break;
        ASSERT_TRUE(Make(blocks, pool, 2, step));
      }
      EXPECT_THAT(blocks.early(), ElementsAre(2));
      EXPECT_TRUE(blocks.at(2).weights_slot.has_value());
      blocks.Apply(2, reason);
      EXPECT_THAT(blocks.early(), IsEmpty());
      EXPECT_EQ(blocks.at(2).weights_slot.has_value(), phase != P::kWritten) << "a task writes it";
      if (phase != P::kWritten) {
        EXPECT_EQ(blocks.phase(2), P::kDropped);
        blocks.Apply(2, T::kDropEnded);
      }
      EXPECT_EQ(blocks.at(2).state, BlockState());
      EXPECT_FALSE(blocks.at(2).weights_slot.has_value());
      EXPECT_EQ(pool.used(), 0U);
    }
  }
}

TEST_F(BlockTest, OnlyReasonsDropEarlyUpdates) {
  for (const P phase : {P::kUpdating, P::kWriting, P::kWritten}) {
    std::set<Transition> reasons;
    for (const Transition transition : AllTransitions()) {
      const auto to = Next({.phase = phase, .purpose = U::kEarly}, transition);
      if (to && (to->phase == P::kDropped || to->phase == P::kIdle)) reasons.insert(transition);
    }
    for (const Transition reason : kDropReasons) {
      const bool is_for_written = reason == T::kMovedAway;
      const bool is_for_tasks = reason == T::kTaskFailed || reason == T::kJobFailed;
      const bool applies = phase == P::kWritten ? !is_for_tasks : !is_for_written;
      EXPECT_EQ(reasons.erase(reason), applies ? 1U : 0U) << static_cast<int>(reason);
    }
    EXPECT_THAT(reasons, IsEmpty());
  }
}

TEST_F(BlockTest, ADroppedBlockMayBeReadBesideItsEarlyVersion) {
  StagingPool pool(kSlots);
  Blocks blocks(pool, OptionsOf(true));
  for (const T step : {T::kReadEarly, T::kReadEnded, T::kUpdateEarly, T::kWrite, T::kWritten,
                       T::kReadForAccess, T::kReadEnded, T::kAccess}) {
    ASSERT_TRUE(Make(blocks, pool, 0, step));
  }
  EXPECT_EQ(blocks.purpose(0), U::kBeside);
  EXPECT_THAT(blocks.early(), ElementsAre(0));
  blocks.Apply(0, T::kSumsForgotten);
  EXPECT_THAT(blocks.early(), IsEmpty());
  EXPECT_FALSE(blocks.at(0).weights_slot.has_value());
  EXPECT_EQ(pool.used(), 1U) << "the access has the staging slot";
  blocks.Apply(0, T::kAccessEnded);
  EXPECT_EQ(blocks.at(0).state, BlockState());
  EXPECT_EQ(pool.used(), 0U);
}

TEST_F(BlockTest, TheBlockThatIsNeededLastLosesItsStagingSlot) {
  StagingPool pool(kSlots);
  Blocks asking(pool, OptionsOf(false));
  Blocks other(pool, OptionsOf(true));
  for (const uint32_t block : {0, 1, 2}) ASSERT_TRUE(Make(other, pool, block, T::kReadAhead));
  other.Apply(1, T::kReadEnded);
  other.Apply(2, T::kReadEnded);
  EXPECT_FALSE(asking.AllocateFree(0).has_value());
  EXPECT_TRUE(asking.waits_for_slot());
  const uint32_t slot = *other.at(1).staging_slot;
  EXPECT_EQ(asking.AllocateUrgent(), slot) << "block 1 is behind block 2, and block 0 is read";
  EXPECT_EQ(other.at(1).state, BlockState());
  EXPECT_TRUE(other.waits_for_slot());
  EXPECT_EQ(other.reclaimed(), 1U);
  EXPECT_EQ(other.DrainFirstDropped(), 2U) << "the position of block 1";
  EXPECT_EQ(other.DrainFirstDropped(), UINT32_MAX);
  asking.BeginRead(3, T::kReadForStep, slot);
  asking.CheckInvariants();
  other.CheckInvariants();
}

TEST_F(BlockTest, BlocksThatShareSlotsNeverLoseOne) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  StagingPool pool(kSlots);
  {
    Blocks first(pool, OptionsOf(true));
    Blocks second(pool, OptionsOf(true));
    for (int i = 0; i < 20000; ++i) {
      Blocks& blocks = random() % 2 == 0 ? first : second;
      const auto block = static_cast<uint32_t>(random() % kBlocks);
      std::vector<Transition> allowed;
      for (const Transition transition : AllTransitions()) {
        if (kInDram.has(transition) || transition == T::kReclaimed) continue;
        if (Next(blocks.at(block).state, transition)) allowed.push_back(transition);
      }
      ASSERT_FALSE(allowed.empty());
      if (!Make(blocks, pool, block, allowed[random() % allowed.size()])) {
        if (const auto slot = blocks.AllocateUrgent()) blocks.Release(*slot);
      }
      first.CheckInvariants();
      second.CheckInvariants();
      EXPECT_EQ(pool.used(), first.staged().size() + second.staged().size());
    }
  }
  EXPECT_EQ(pool.used(), 0U);
}

}  // namespace
}  // namespace forebay::daemon::block_test
