// SPDX-License-Identifier: Apache-2.0
// Goal    A path's rates come from its latest transfers, over the time in which the path was busy. The path's share of writes
//         follows from its rates. Failures without a success mark a path; the same number of successes removes the mark.
// Method  Values computed by hand.

#include "daemon/core/blocks/path_table.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "daemon/core/base/limits.h"
#include "gtest/gtest.h"
#include "nvme/path_rates.h"

namespace forebay::daemon::path_table_test {
namespace {

constexpr uint64_t kMb = 1'000'000;
constexpr uint64_t kMs = 1'000'000;  // in nanoseconds

// Adds a transfer. All times are 1 ms later than the arguments, so that no transfer begins at 0.
void Add(PathTable& paths, PathTransfer transfer, uint64_t begin_ms, uint64_t end_ms) {
  transfer.begin_ns = (1 + begin_ms) * kMs;
  transfer.end_ns = (1 + end_ms) * kMs;
  paths.AddTransfer(transfer);
}

// Adds `count` transfers of 1 MB and `each_ms` milliseconds, one after the other.
void AddMany(PathTable& paths, uint32_t path, Direction direction, uint64_t each_ms, int count,
             uint64_t begin_ms) {
  for (int i = 0; i < count; ++i) {
    Add(paths, {.path = path, .direction = direction, .bytes = kMb}, begin_ms, begin_ms + each_ms);
    begin_ms += each_ms;
  }
}

nvme::PathRates Measured(double read, double write, double mixed) {
  return {.read = read,
          .write = write,
          .mixed = mixed,
          .request_bytes = 1 << 20,
          .depth = 16,
          .read_seconds = 1e-3};
}

TEST(PathTableTest, SharesAreThoseOfMeasuredMixedRates) {
  PathTable paths(3, {Measured(3e9, 1e9, 1.2e9), std::nullopt, Measured(4e9, 4e9, 0.4e9)});
  // The path without measured rates counts with the mean rate, 0.8 GB/s.
  EXPECT_DOUBLE_EQ(paths.share(0), 0.5);
  EXPECT_DOUBLE_EQ(paths.share(1), 1.0 / 3);
  EXPECT_DOUBLE_EQ(paths.share(2), 1.0 / 6);
  EXPECT_DOUBLE_EQ(paths.rate(1, Direction::kRead), 0);
  // A mix of equal bytes moves 0.6 GB/s in each direction, half of 1.2 GB/s. The read and write rates have the ratio of the
  // rates measured alone, 3 to 1.
  EXPECT_DOUBLE_EQ(paths.rate(0, Direction::kRead), 2.4e9);
  EXPECT_DOUBLE_EQ(paths.rate(0, Direction::kWrite), 0.8e9);
  EXPECT_DOUBLE_EQ(paths.rate(2, Direction::kRead), 0.4e9);
}

TEST(PathTableTest, WithoutAnyRateSharesAreEqual) {
  PathTable paths(4, {});
  for (uint32_t path = 0; path < 4; ++path) EXPECT_DOUBLE_EQ(paths.share(path), 0.25);
  EXPECT_EQ(paths.Weights(), (std::vector<uint32_t>{65536, 65536, 65536, 65536}));
  EXPECT_EQ(PathTable(0, {}).Weights(), std::vector<uint32_t>{});
}

TEST(PathTableTest, FewTransfersGiveNoRate) {
  PathTable paths(2, {});
  AddMany(paths, 0, Direction::kRead, 1, PathTable::kTransfersMin - 1, 0);
  EXPECT_DOUBLE_EQ(paths.rate(0, Direction::kRead), 0);
  AddMany(paths, 0, Direction::kRead, 1, 1, 100);
  EXPECT_DOUBLE_EQ(paths.rate(0, Direction::kRead), 1e9);
  EXPECT_DOUBLE_EQ(paths.share(0), 0.5) << "nothing is known of the other";
}

// If two transfers run at once and end together, their time counts once.
TEST(PathTableTest, TimeIsTheBusyTimeOfThePath) {
  PathTable paths(1, {});
  for (uint64_t i = 0; i < 8; ++i) {
    Add(paths, {.direction = Direction::kRead, .bytes = kMb}, 10 * i, 10 * i + 4);
    Add(paths, {.direction = Direction::kRead, .bytes = kMb}, 10 * i, 10 * i + 4);
  }
  // The two transfers of a pair take 4 ms together: the first counts with 4 ms and the second with none. An older transfer
  // counts less than the next one, in the ratio 31/32.
  EXPECT_NEAR(paths.rate(0, Direction::kRead), 0.5e9, 0.02e9);
  PathTable mixed(1, {});
  for (uint64_t i = 0; i < 8; ++i) {
    Add(mixed, {.direction = Direction::kRead, .bytes = kMb}, 10 * i, 10 * i + 1);
    Add(mixed, {.direction = Direction::kWrite, .bytes = kMb}, 10 * i, 10 * i + 4);
  }
  EXPECT_DOUBLE_EQ(mixed.rate(0, Direction::kRead), 1e9);
  EXPECT_DOUBLE_EQ(mixed.rate(0, Direction::kWrite), 1e9 / 3);
}

TEST(PathTableTest, TransfersWithoutATimeCountForNothing) {
  PathTable paths(1, {Measured(1e9, 1e9, 1e9)});
  for (int i = 0; i < 100; ++i) paths.AddTransfer({.bytes = kMb});
  EXPECT_DOUBLE_EQ(paths.rate(0, Direction::kRead), 1e9);
}

TEST(PathTableTest, OfAMeasuredPathTheCurrentRateIsThatOfItsTransfersAlone) {
  PathTable paths(2, {Measured(1e9, 1e9, 1e9), std::nullopt});
  AddMany(paths, 0, Direction::kRead, 2, PathTable::kTransfersMin - 1, 0);
  EXPECT_DOUBLE_EQ(paths.current_rate(0, Direction::kRead), 0);
  EXPECT_DOUBLE_EQ(paths.rate(0, Direction::kRead), 1e9);
  AddMany(paths, 0, Direction::kRead, 2, 200, 100);
  EXPECT_NEAR(paths.current_rate(0, Direction::kRead), 0.5e9, 1e4);
  EXPECT_DOUBLE_EQ(paths.current_rate(0, Direction::kWrite), 0);
  EXPECT_DOUBLE_EQ(paths.rate(0, Direction::kWrite), 1e9);
  AddMany(paths, 1, Direction::kWrite, 4, PathTable::kTransfersMin, 0);
  EXPECT_DOUBLE_EQ(paths.current_rate(1, Direction::kWrite), 0.25e9);
}

TEST(PathTableTest, SharesFollowARateThatDrifts) {
  PathTable paths(2, {Measured(1e9, 1e9, 1e9), Measured(1e9, 1e9, 1e9)});
  AddMany(paths, 0, Direction::kRead, 1, 50, 0);
  EXPECT_DOUBLE_EQ(paths.share(0), 0.5) << "as measured";
  AddMany(paths, 0, Direction::kRead, 2, 200, 1000);
  AddMany(paths, 0, Direction::kWrite, 2, 200, 2000);
  EXPECT_NEAR(paths.rate(0, Direction::kRead), 0.5e9, 1e4);
  EXPECT_NEAR(paths.share(0), 1.0 / 3, PathTable::kDrift / 3);
  EXPECT_NEAR(paths.Weights().at(0), 32768, 2 * PathTable::kDrift * 32768);
}

TEST(PathTableTest, APathThatHardlyMovesKeepsTheLeastShare) {
  PathTable paths(2, {Measured(1e9, 1e9, 1e9), Measured(1e9, 1e9, 1e9)});
  AddMany(paths, 0, Direction::kWrite, 100000, 300, 0);
  EXPECT_NEAR(paths.share(0), 1.0 / 257, 1e-4);
}

TEST(PathTableTest, ReadsAtOnceFollowWhatMustBeInFlight) {
  PathTable paths(2, {Measured(1e9, 1e9, 1e9), std::nullopt});
  EXPECT_EQ(paths.reads_at_once(0, 4 << 20), 5U) << "16 MiB in flight, and one that ends";
  EXPECT_EQ(paths.reads_at_once(0, 64 << 20), kReadsPerPath);
  EXPECT_EQ(paths.reads_at_once(0, 4096), PathTable::kReadsMax);
  EXPECT_EQ(paths.reads_at_once(1, 4096), kReadsPerPath) << "not measured";
  nvme::PathRates slow = Measured(1e9, 1e9, 1e9);
  slow.read_seconds = 0.1;  // 100 MB
  EXPECT_EQ(PathTable(1, {slow}).reads_at_once(0, 20 * kMb), 6U);
}

TEST(PathTableTest, FailuresMarkAPathAndSuccessesTakeTheMarkAway) {
  for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
    PathTable paths(2, {});
    const Direction other = direction == Direction::kRead ? Direction::kWrite : Direction::kRead;
    for (uint32_t i = 1; i < PathTable::kPathErrorsMax; ++i) paths.OnFailed(1, direction);
    paths.OnSucceeded(1, direction);
    for (uint32_t i = 1; i < PathTable::kPathErrorsMax; ++i) {
      paths.OnFailed(1, direction);
      paths.OnSucceeded(1, other);
    }
    EXPECT_FALSE(paths.any_marked());
    paths.OnFailed(1, direction);
    EXPECT_TRUE(paths.is_marked(1));
    EXPECT_TRUE(paths.any_marked());
    EXPECT_FALSE(paths.works(1));
    EXPECT_TRUE(paths.works(0));
    EXPECT_EQ(paths.Weights(), (std::vector<uint32_t>{65536, 1}));
    for (uint32_t i = 1; i < PathTable::kPathErrorsMax; ++i) {
      paths.OnSucceeded(1, Direction::kWrite);
      paths.OnSucceeded(1, Direction::kRead);
    }
    EXPECT_TRUE(paths.is_marked(1));
    paths.OnSucceeded(1, Direction::kWrite);
    EXPECT_FALSE(paths.any_marked());
    EXPECT_TRUE(paths.works(1));
    EXPECT_EQ(paths.marks(), 1U);
    EXPECT_EQ(paths.mark_changes(), 2U);
  }
}

TEST(PathTableTest, OneFailedWriteMakesAPathSuspectUntilOneSucceeds) {
  PathTable paths(1, {});
  paths.OnFailed(0, Direction::kRead);
  EXPECT_TRUE(paths.works(0));
  paths.OnFailed(0, Direction::kWrite);
  EXPECT_TRUE(paths.is_suspect(0));
  paths.OnSucceeded(0, Direction::kRead);
  EXPECT_TRUE(paths.is_suspect(0));
  paths.OnSucceeded(0, Direction::kWrite);
  EXPECT_TRUE(paths.works(0));
}

}  // namespace
}  // namespace forebay::daemon::path_table_test
