// SPDX-License-Identifier: Apache-2.0
// Goal    A record of release 0.2.0 becomes a record of this release with the same job and undo log. Damage crashes nothing.
// Method  left/*.record are records of version 7: KeptRecord of commit a6932100 made them from the actions that a seed gives. The
//         same actions go to a record of this release. The next release removes this test and the files.

#include "daemon/exec/recovery/record_before.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "daemon/exec/recovery/kept_record.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/random_records.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::record_before_test {
namespace {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace testing::random_records;
using protocol::ErrorId;
using protocol::UniqueFd;
using testing::HasError;

struct RecordBefore {
  Kind kind;
  uint64_t seed;
};
// In an update, and prepared.
constexpr auto kRecords = std::to_array<RecordBefore>(
    {{Kind::kOnSwap, 24}, {Kind::kOnSwap, 28}, {Kind::kLamb, 41}, {Kind::kLamb, 23}});

std::string BytesOf(const RecordBefore& record) {
  std::ifstream from(absl::StrCat(LEFT_RECORDS, "/", record.seed, ".record"), std::ios::binary);
  return {std::istreambuf_iterator<char>(from), {}};
}

UniqueFd FileOf(const std::string& bytes) {
  UniqueFd fd(::memfd_create("before", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return fd;
}

UniqueFd StepArena() {
  UniqueFd fd(::memfd_create("step", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(fd.get(), "zeroone.", 8, 0), 8);
  return fd;
}

// Reads the record as another process does.
absl::StatusOr<DurableJob> Found(const KeptRecord& record, int step_arena) {
  UniqueFd fd(::fcntl(record.fd(), F_DUPFD_CLOEXEC, 0));
  ASSIGN_OR_RETURN(KeptRecord::Adopted adopted, KeptRecord::Adopt(std::move(fd), step_arena));
  return std::move(adopted.job);
}

TEST(RecordBefore, IsConverted) {
  const UniqueFd step_arena = StepArena();
  for (const RecordBefore& of : kRecords) {
    const DurableJob job = MakeJob(of.kind);
    ASSERT_OK_AND_ASSIGN(const auto record,
                         KeptRecord::Make(MakeRecordJob(job), kNonce, /*workers=*/1));
    Actions actions(job, of.seed);
    const auto set = [](KeptRecord& to, const AnyRecord& action) {
      std::visit([&](const auto& one) { to.Set(one); }, action);
    };
    for (uint64_t i = 0; i < 20 + 3 * of.seed; ++i) set(*record, actions.Next());
    std::string bytes = BytesOf(of);
    ASSERT_GT(bytes.size(), 4096U);
    const std::string mark = "what workers had in hand";
    bytes.replace(bytes.size() - mark.size(), mark.size(), mark);
    const UniqueFd file = FileOf(bytes);
    EXPECT_TRUE(IsRecordBefore(file));
    EXPECT_FALSE(IsRecordBefore(UniqueFd(::fcntl(record->fd(), F_DUPFD_CLOEXEC, 0))));
    EXPECT_THAT(KeptRecord::Adopt(UniqueFd(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0)), -1),
                HasError(ErrorId::kCorrupt));
    ASSERT_OK_AND_ASSIGN(UniqueFd made, ConvertRecord(file));
    ASSERT_OK_AND_ASSIGN(const KeptRecord::Adopted adopted,
                         KeptRecord::Adopt(std::move(made), step_arena.get()));
    const std::unique_ptr<KeptRecord>& converted = adopted.record;
    EXPECT_EQ(converted->nonce(), kNonce);
    EXPECT_EQ(converted->is_in_step(), record->is_in_step());
    ASSERT_OK_AND_ASSIGN(const DurableJob wanted, Found(*record, step_arena.get()));
    EXPECT_EQ(Describe(adopted.job), Describe(wanted)) << "seed " << of.seed;
    const auto undo = converted->undo_bytes().last(mark.size());
    EXPECT_EQ(std::memcmp(undo.data(), mark.data(), mark.size()), 0);
    // The converted record continues. Slots that blocks had when it was converted are spare then.
    for (int i = 0; i < 300; ++i) {
      const AnyRecord action = actions.Next();
      set(*record, action);
      set(*converted, action);
    }
    ASSERT_OK_AND_ASSIGN(DurableJob later, Found(*record, step_arena.get()));
    ASSERT_OK_AND_ASSIGN(DurableJob converted_later, Found(*converted, step_arena.get()));
    later.kept->spare_slots = converted_later.kept->spare_slots = {};
    EXPECT_EQ(Describe(converted_later), Describe(later)) << "seed " << of.seed;
  }
}

TEST(RecordBefore, OneThatWasDroppedSaysNothing) {
  std::string bytes = BytesOf(kRecords[0]);
  constexpr size_t kIsValidWord = 23;
  bytes.replace(8 * kIsValidWord, 8, 8, '\0');
  EXPECT_THAT(ConvertRecord(FileOf(bytes)), HasError(ErrorId::kJobFailed));
}

// The constants have a checksum. Counts that change are checked.
TEST(RecordBefore, DamageCrashesNothing) {
  std::mt19937_64 random(4);
  const UniqueFd step_arena = StepArena();
  uint64_t refused = 0;
  for (const RecordBefore& of : kRecords) {
    const std::string bytes = BytesOf(of);
    for (int round = 0; round < 2000; ++round) {
      std::string damaged = bytes;
      const uint64_t word = random() >> random() % 64;
      const size_t at = 8 * (2 + random() % (round % 2 == 0 ? 40 : bytes.size() / 8 - 2));
      damaged.replace(at, 8, reinterpret_cast<const char*>(&word), 8);
      auto converted = ConvertRecord(FileOf(damaged));
      if (!converted.ok()) ++refused;
      if (converted.ok()) (void)KeptRecord::Adopt(*std::move(converted), step_arena.get());
    }
  }
  EXPECT_GT(refused, 2000U);
}

}  // namespace
}  // namespace forebay::daemon::record_before_test
