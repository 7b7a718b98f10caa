// SPDX-License-Identifier: Apache-2.0
// Goal    A record gives the state of the last entry that counts, whatever bytes are behind its tail. Copying the entries that
//         count to the other half changes nothing, at whichever entry it happens. Damaged bytes are refused and crash nothing.
// Method  Actions of every kind, chosen at random by a seed as a job in steps emits them, go to a record and to a log that never drops an
//         entry. The file is then cut, damaged and adopted again, byte by byte.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/exec/recovery/kept_record.h"
#include "daemon/exec/recovery/record_entry.h"
#include "daemon/exec/recovery/record_index.h"
#include "gtest/gtest.h"
#include "nvme/checksum.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/step_summary.h"
#include "tests/support/random_records.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::record_log_test {
namespace {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace testing::random_records;

using protocol::ErrorId;
using protocol::UniqueFd;
using testing::HasError;

// Words of a record's header.
constexpr uint64_t kJobBytesWord = 4;
constexpr uint64_t kHalfBytesWord = 5;
constexpr uint64_t kCurrentWord = 9;
constexpr uint64_t kJobOffset = 128;
constexpr uint64_t kTailMask = (uint64_t{1} << 63) - 1;

RecordCounts CountsOf(const DurableJob& job) {
  return {
      .params = job.param_updates.size(),
      .param_group_rows = job.layout->param_group_rows(),
      .partitions = job.layout->partitions().size(),
      .ranks = job.world_size,
      .blocks = job.blocks.size(),
      .digests = 1000,
      .block_digests = 1000,
      .sum_pages = kSumPages,
      .leases = job.weights_on_swap.empty() ? 0 : LeasesRecordedMax(*job.layout, job.world_size),
      .summary_bytes = protocol::NodeSummaryBytes(*job.layout),
      .has_trust = protocol::Info(job.layout->spec().optimizer).passes > 1};
}

class RecordLogTest : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    step_arena_ = UniqueFd(::memfd_create("step", MFD_CLOEXEC));
    ASSERT_EQ(::pwrite(step_arena_.get(), "zeroone.", 8, 0), 8);
    ASSERT_OK_AND_ASSIGN(record_, KeptRecord::Make(MakeRecordJob(job_), kNonce, /*workers=*/1));
  }

  static void Set(KeptRecord& record, const AnyRecord& action) {
    std::visit([&](const auto& one) { record.Set(one); }, action);
  }
  static UniqueFd Duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

  absl::StatusOr<std::string> Found(int fd) const {
    ASSIGN_OR_RETURN(const DurableJob job, FoundJob(fd));
    return Describe(job);
  }
  absl::StatusOr<DurableJob> FoundJob(int fd) const {
    ASSIGN_OR_RETURN(KeptRecord::Adopted adopted,
                     KeptRecord::Adopt(Duplicate(fd), step_arena_.get()));
    return std::move(adopted.job);
  }

  // A record's file.
  struct FileCopy {
    std::vector<std::byte> bytes;

    uint64_t& word(uint64_t index) { return reinterpret_cast<uint64_t*>(bytes.data())[index]; }
    uint64_t tail() { return word(kCurrentWord) & kTailMask; }
    uint64_t half() { return word(kCurrentWord) >> 63; }
    // Offset of a byte of a half.
    uint64_t At(uint64_t half, uint64_t offset) {
      const uint64_t halves = kJobOffset + (word(kJobBytesWord) + 63) / 64 * 64;
      return halves + half * word(kHalfBytesWord) + offset;
    }
    UniqueFd File() const {
      UniqueFd fd(::memfd_create("copy", MFD_CLOEXEC));
      EXPECT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0),
                static_cast<ssize_t>(bytes.size()));
      return fd;
    }
    // Calls `visit` with the head and the words of each entry that counts.
    template <typename Visit>
    void EachEntry(Visit visit) {
      for (uint64_t at = 0; at < tail();) {
        auto& head = *reinterpret_cast<EntryHead*>(&bytes[At(half(), at)]);
        visit(head, std::span(reinterpret_cast<uint64_t*>(&head + 1), head.message_bytes / 8));
        at += sizeof(head) + head.message_bytes;
      }
    }
  };
  static void Repair(EntryHead& head, std::span<const uint64_t> words) {
    head.checksum = nvme::Checksum({}, std::as_bytes(words));
  }
  static FileCopy CopyOf(int fd) {
    struct stat info = {};
    EXPECT_EQ(::fstat(fd, &info), 0);
    FileCopy copy{.bytes = std::vector<std::byte>(static_cast<size_t>(info.st_size))};
    EXPECT_EQ(::pread(fd, copy.bytes.data(), copy.bytes.size(), 0), info.st_size);
    return copy;
  }
  // Returns the record's file after actions of every kind.
  FileCopy CopyInUpdate(uint64_t seed) {
    Actions actions(job_, seed);
    while (actions.published() < 8 || !record_->is_in_step()) Set(*record_, actions.Next());
    for (int i = 0; i < 20; ++i) Set(*record_, actions.Next());
    return CopyOf(record_->fd());
  }

  const DurableJob job_ = MakeJob(GetParam());
  UniqueFd step_arena_;
  std::unique_ptr<KeptRecord> record_;
};

// A log of the same entries that grows without end.
class Log {
 public:
  Log(const DurableJob& job, int step_arena)
      : job_(job), step_arena_(step_arena), index_(CountsOf(job)) {
    job_.kept->spare_slots = job.BlockSlots();
    for (auto& block : job_.blocks) block.reset();
  }

  void Begin(const DurableJob& job) {
    const RecordJob record = MakeRecordJob(job);
    RecordDecision values{.step = job.step};
    values.param_updates.assign(job.param_updates.begin(), job.param_updates.end());
    values.trace.assign(job.trace.begin(), job.trace.end());
    values.extra_states.assign(record.extra_states.begin(), record.extra_states.end());
    Append(values);
    Append(RecordStep{.step = job.step});
    for (uint32_t i = 0; i < job.blocks.size(); ++i) {
      if (!job.blocks[i]) continue;
      Append(RecordBlock{.block = i,
                         .slot = job.blocks[i]->slot,
                         .checksum = job.blocks[i]->checksum,
                         .written_step = job.blocks[i]->written_step,
                         .weights_digests = job.blocks[i]->weights_digests});
    }
    Append(RecordAttempt{.step = job.step + 1, .attempt = job.kept->attempt});
  }

  void Set(const AnyRecord& action) {
    std::visit([this](const auto& one) { Append(one); }, action);
  }

  // Drops the entries that do not count.
  void Compact() {
    std::vector<std::byte> to;
    index_.Move([&](uint64_t offset) {
      EntryHead head;
      std::memcpy(&head, &bytes_[offset], sizeof(head));
      const auto* const begin = &bytes_[offset];
      const uint64_t at = to.size();
      to.insert(to.end(), begin, begin + sizeof(head) + head.message_bytes);
      return at;
    });
    bytes_ = std::move(to);
  }

  // Adds the entries to another index, as an adopted record does.
  void ReadAgain() {
    RecordIndex index(CountsOf(job_));
    for (uint64_t at = 0; at < bytes_.size();) {
      const std::span<const std::byte> rest = std::span(bytes_).subspan(at);
      const absl::StatusOr<uint64_t> size = CheckEntry(rest);
      ASSERT_OK(size.status());
      ASSERT_OK(index.Add(EntryReader(rest).Get(), at));
      at += *size;
    }
    index_ = std::move(index);
  }

  std::string State() const {
    const absl::StatusOr<DurableJob> job = index_.Read(job_, bytes_, step_arena_);
    return job.ok() ? Describe(*job) : job.status().ToString();
  }

 private:
  template <typename Record>
  void Append(const Record& record) {
    if constexpr (std::is_same_v<Record, RecordDecision>) Append(RecordOrder{record});
    const uint64_t at = bytes_.size();
    bytes_.resize(at + EntryBytesMax(record) + sizeof(uint64_t));
    const std::span<std::byte> entry = std::span(bytes_).subspan(at);
    const uint64_t size = WriteEntry(record, entry);
    if constexpr (std::is_same_v<Record, RecordOrder>) {
      if (record.decision.order.params.empty()) return bytes_.resize(at);  // not of an update
    }
    const absl::Status added = index_.Add(EntryReader(entry).Get(), at);
    EXPECT_TRUE(added.ok()) << added;
    bytes_.resize(at + size);
  }

  DurableJob job_;
  int step_arena_;
  std::vector<std::byte> bytes_;
  RecordIndex index_;
};

TEST_P(RecordLogTest, ATornEntryDoesNotCount) {
  Actions actions(job_, /*seed=*/3);
  ASSERT_OK_AND_ASSIGN(std::string state, Found(record_->fd()));
  std::set<size_t> kinds;
  // RecordTrust or RecordLease is of the other job.
  constexpr size_t kKinds = std::variant_size_v<AnyRecord> - 1;
  uint64_t entries = 0;
  while (kinds.size() < kKinds || entries < 60) {
    FileCopy before = CopyOf(record_->fd());
    const AnyRecord action = actions.Next();
    kinds.insert(action.index());
    Set(*record_, action);
    FileCopy after = CopyOf(record_->fd());
    ++entries;
    // Bytes behind the tail, and those of the other half, are arbitrary.
    FileCopy torn = before;
    const auto fill = [&](uint64_t half, uint64_t from) {
      std::fill(torn.bytes.begin() + static_cast<int64_t>(torn.At(half, from)),
                torn.bytes.begin() + static_cast<int64_t>(torn.At(half + 1, 0)), std::byte{0xa5});
    };
    fill(before.half(), before.tail());
    fill(1 - before.half(), 0);
    const UniqueFd file = torn.File();
    const bool is_same_half = before.half() == after.half();
    const uint64_t end = is_same_half ? after.tail() : before.tail();
    for (uint64_t at = before.tail(); at <= end; ++at) {
      ASSERT_OK_AND_ASSIGN(const std::string found, Found(file.get()));
      ASSERT_EQ(found, state) << at - before.tail() << " bytes of an entry of kind "
                              << action.index();
      const uint64_t offset = after.At(after.half(), at);
      if (!is_same_half) continue;
      ASSERT_EQ(::pwrite(file.get(), &after.bytes[offset], 1, static_cast<off_t>(offset)), 1);
    }
    ASSERT_OK_AND_ASSIGN(state, Found(record_->fd()));
    // The store of the word makes the entry count.
    ASSERT_EQ(::pwrite(file.get(), &after.word(kCurrentWord), 8, 8 * kCurrentWord), 8);
    if (is_same_half) {
      ASSERT_OK_AND_ASSIGN(const std::string whole, Found(file.get()));
      ASSERT_EQ(whole, state);
    }
  }
}

// A tail between two entries is no tail. A tail at an earlier entry gives the state of that entry.
TEST_P(RecordLogTest, EachPrefixIsTheStateOfItsLastEntryOrRefused) {
  Actions actions(job_, /*seed=*/5);
  std::map<uint64_t, std::string> states;  // by the word
  FileCopy copy;
  uint64_t half = 0;
  while (states.size() < 25) {
    Set(*record_, actions.Next());
    copy = CopyOf(record_->fd());
    if (std::exchange(half, copy.half()) != copy.half()) states.clear();
    ASSERT_OK_AND_ASSIGN(states[copy.word(kCurrentWord)], Found(record_->fd()));
  }
  const UniqueFd file = copy.File();
  uint64_t refused = 0;
  for (uint64_t tail = states.begin()->first & kTailMask; tail <= copy.tail(); ++tail) {
    const uint64_t word = half << 63 | tail;
    ASSERT_EQ(::pwrite(file.get(), &word, 8, 8 * kCurrentWord), 8);
    const absl::StatusOr<std::string> found = Found(file.get());
    if (const auto state = states.find(word); state != states.end()) {
      ASSERT_OK(found.status());
      ASSERT_EQ(*found, state->second);
    } else if (!found.ok()) {
      ASSERT_THAT(found, HasError(ErrorId::kCorrupt));
      ++refused;
    }  // else between the order and the decision of a step
  }
  EXPECT_GT(refused, 500U);
}

TEST_P(RecordLogTest, ADamagedByteIsRefused) {
  FileCopy copy = CopyInUpdate(/*seed=*/7);
  const UniqueFd file = copy.File();
  const auto expect_refused = [&](uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; ++at) {
      const std::byte damaged = copy.bytes[at] ^ std::byte{0x10};
      ASSERT_EQ(::pwrite(file.get(), &damaged, 1, static_cast<off_t>(at)), 1);
      const absl::StatusOr<std::string> found = Found(file.get());
      const bool is_version = at / 8 == 1;
      ASSERT_THAT(found, HasError(is_version ? ErrorId::kConfig : ErrorId::kCorrupt)) << at;
      ASSERT_EQ(::pwrite(file.get(), &copy.bytes[at], 1, static_cast<off_t>(at)), 1);
    }
  };
  expect_refused(0, 8 * kCurrentWord);
  expect_refused(kJobOffset, kJobOffset + copy.word(kJobBytesWord));
  expect_refused(copy.At(copy.half(), 0), copy.At(copy.half(), copy.tail()));
  ASSERT_OK(Found(file.get()).status());
}

TEST_P(RecordLogTest, AnyWordAtTheTailCrashesNothing) {
  FileCopy copy = CopyInUpdate(/*seed=*/9);
  const UniqueFd file = copy.File();
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t word = copy.word(kCurrentWord) ^ uint64_t { 1 } << bit;
    ASSERT_EQ(::pwrite(file.get(), &word, 8, 8 * kCurrentWord), 8);
    const absl::StatusOr<std::string> found = Found(file.get());
    if (bit >= 3) continue;
    ASSERT_THAT(found, HasError(ErrorId::kCorrupt));
  }
}

// The checksums are right, so that only the checks of the numbers can refuse the bytes.
TEST_P(RecordLogTest, DamagedNumbersCrashNothing) {
  const FileCopy copy = CopyInUpdate(/*seed=*/11);
  std::mt19937_64 random(12);
  uint64_t refused = 0;
  for (int round = 0; round < 4000; ++round) {
    FileCopy damaged = copy;
    uint64_t entries = 0;
    damaged.EachEntry([&](EntryHead&, std::span<uint64_t>) { ++entries; });
    uint64_t index = random() % entries;
    damaged.EachEntry([&](EntryHead& head, std::span<uint64_t> words) {
      if (index-- != 0) return;
      uint64_t& word = words[random() % words.size()];
      word = random() % 2 == 0 ? word ^ uint64_t { 1 } << random() % 64 : random();
      Repair(head, words);
    });
    if (!Found(damaged.File().get()).ok()) ++refused;
  }
  EXPECT_GT(refused, 500U);
}

TEST_P(RecordLogTest, AnEntryOfANewerDaemonIsRefusedAndNotDropped) {
  record_->Set(RecordAttempt{.step = 7, .attempt = 3});
  FileCopy copy = CopyOf(record_->fd());
  copy.EachEntry([](EntryHead& head, std::span<uint64_t> words) {
    auto& kind = *reinterpret_cast<uint16_t*>(&words[1]);
    if (kind != schema::RecordEntry::ATTEMPT) return;
    kind = 1000;
    Repair(head, words);
  });
  EXPECT_THAT(Found(copy.File().get()), HasError(ErrorId::kConfig));
}

TEST_P(RecordLogTest, CompactionAtAnyEntryChangesNothing) {
  constexpr size_t kEntries = 120;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    Actions actions(job_, seed);
    std::vector<AnyRecord> all;
    std::vector<std::string> states;
    Log plain(job_, step_arena_.get());
    plain.Begin(job_);
    for (size_t i = 0; i < kEntries; ++i) {
      plain.Set(all.emplace_back(actions.Next()));
      states.push_back(plain.State());
    }
    for (size_t at = 0; at < kEntries; ++at) {
      Log log(job_, step_arena_.get());
      log.Begin(job_);
      for (size_t i = 0; i <= at; ++i) log.Set(all[i]);
      log.Compact();
      ASSERT_EQ(log.State(), states[at]) << "seed " << seed << ", entry " << at;
      log.ReadAgain();
      ASSERT_EQ(log.State(), states[at]) << "seed " << seed << ", entry " << at;
      for (size_t i = at + 1; i < std::min(at + 30, kEntries); ++i) {
        log.Set(all[i]);
        if (i % 7 != 0) continue;
        ASSERT_EQ(log.State(), states[i]) << "seed " << seed << ", entry " << i;
      }
    }
  }
}

TEST_P(RecordLogTest, AlternatingHalvesAndAdoptionChangeNothing) {
  for (uint64_t seed = 20; seed < 24; ++seed) {
    ASSERT_OK_AND_ASSIGN(record_, KeptRecord::Make(MakeRecordJob(job_), kNonce, /*workers=*/1));
    Actions actions(job_, seed);
    Log log(job_, step_arena_.get());
    log.Begin(job_);
    uint64_t halves = 0;
    uint64_t half = 0;
    for (int i = 0; i < 1500; ++i) {
      const AnyRecord action = actions.Next();
      Set(*record_, action);
      log.Set(action);
      if (i % 300 == 299) log.Compact();
      const uint64_t now = CopyOf(record_->fd()).half();
      if (std::exchange(half, now) != now) ++halves;
      ASSERT_OK_AND_ASSIGN(const std::string found, Found(record_->fd()));
      ASSERT_EQ(found, log.State()) << "seed " << seed << ", action " << i;
      if (i % 100 != 50) continue;
      record_->Leave();
      ASSERT_OK_AND_ASSIGN(auto adopted,
                           KeptRecord::Adopt(Duplicate(record_->fd()), step_arena_.get()));
      record_ = std::move(adopted.record);
    }
    EXPECT_GT(halves, 10U);
  }
}

// Everything that a record can hold at once, and then again.
TEST_P(RecordLogTest, AnEntryAlwaysFits) {
  const uint64_t rows = job_.layout->param_group_rows();
  const auto digests = job_.blocks[0]->weights_digests;
  const auto slot_of = [&](uint32_t page) {
    return nvme::Slot{
        .path = 0, .offset_bytes = (page + 1) * job_.slot_bytes, .size_bytes = job_.slot_bytes};
  };
  const nvme::Slot slot{.path = 1, .offset_bytes = 4096, .size_bytes = job_.slot_bytes};
  const std::vector<std::byte> summary(protocol::NodeSummaryBytes(*job_.layout));
  uint64_t lease = 0;
  for (uint64_t i = 0; i < LeasesMax(job_); ++i) {
    record_->Set(RecordLease{.lease = {.lease = ++lease}});
  }
  for (uint64_t step = 7; step < 10; ++step) {
    for (int round = 0; round < 50; ++round) {
      for (uint32_t i = 0; i < job_.param_updates.size(); ++i) {
        record_->Set(RecordUpdates{.param = i, .updates = step});
      }
      for (uint32_t i = 0; i < job_.blocks.size(); ++i) {
        const bool has_digests = job_.blocks[i] && job_.blocks[i]->weights_digests;
        record_->Set(RecordBlock{
            .block = i, .slot = slot, .weights_digests = has_digests ? digests : nullptr});
      }
      for (uint32_t i = 0; i < kSumPages; ++i) {
        record_->Set(RecordSums{.page = i, .step = step, .frame = i, .slot = slot_of(i)});
      }
      record_->Set(RecordPrepared{.step = step,
                                  .hyper_params = std::pmr::vector<protocol::HyperParams>(rows),
                                  .extra_states = std::pmr::vector<StatePart>(kRanks),
                                  .summary = summary});
      if (lease == 0) continue;
      record_->Set(RecordLeaseEnd{.lease = lease});
      record_->Set(RecordLease{.lease = {.lease = ++lease}});
    }
    RecordDecision decision{
        .step = step,
        .order = {.hyper_params = std::pmr::vector<protocol::HyperParams>(rows)},
        .extra_states = std::pmr::vector<StatePart>(kRanks),
        .summary = summary};
    decision.order.params.assign(job_.param_updates.size(), true);
    decision.param_updates.assign(job_.param_updates.size(), step);
    decision.trace.assign(job_.layout->partitions().size(), 0);
    record_->Set(decision);
    const std::pmr::vector<float> trust(job_.param_updates.size());
    for (int round = 0; round < 50; ++round) {
      if (HasTrust(job_)) record_->Set(RecordTrust{.step = step, .trust = trust});
      for (uint32_t i = 0; i < job_.blocks.size(); ++i) {
        record_->Set(RecordStaged{.block = i, .step = step});
        const bool has_digests = job_.blocks[i] && job_.blocks[i]->weights_digests;
        record_->Set(RecordBlock{.block = i,
                                 .slot = slot,
                                 .weights_digests = has_digests ? digests : nullptr,
                                 .step = step});
        record_->Set(RecordInstalled{.block = i});
      }
      for (uint32_t i = 0; i < kSumPages; ++i) {
        record_->Set(RecordSums{.page = i, .step = step, .frame = i, .slot = slot_of(i)});
      }
      ASSERT_OK(Found(record_->fd()).status());
    }
    record_->Set(RecordStep{.step = step});
    ASSERT_OK(Found(record_->fd()).status());
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RecordLogTest, ::testing::Values(Kind::kOnSwap, Kind::kLamb),
                         [](const auto& kind) {
                           return std::string(kind.param == Kind::kLamb ? "Lamb" : "OnSwap");
                         });

}  // namespace
}  // namespace forebay::daemon::record_log_test
