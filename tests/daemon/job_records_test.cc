// SPDX-License-Identifier: Apache-2.0
// Goal    The store has the newest record of each job that this daemon continues, and no other record.
// Method  A store in memory that can refuse descriptors. Each test leads a record through its states (JobRecords).

#include "daemon/exec/recovery/job_records.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/random_records.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::job_records_test {
namespace {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace testing::random_records;
using protocol::ErrorId;
using protocol::UniqueFd;
using ::testing::ElementsAre;
using testing::HasError;
using ::testing::IsEmpty;

class JobRecordsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    step_arena_ = UniqueFd(::memfd_create("step", MFD_CLOEXEC));
    ASSERT_EQ(::pwrite(step_arena_.get(), "zeroone.", 8, 0), 8);
  }

  DescriptorStore Store() {
    return {.keep =
                [this](const std::string& name, int) {
                  if (is_full_) return protocol::MakeError(ErrorId::kLimit, "full");
                  stored_.insert(name);
                  return absl::OkStatus();
                },
            .drop = [this](const std::string& name) { EXPECT_EQ(stored_.erase(name), 1U); }};
  }
  absl::Status Make(JobRecords& records, bool has_record = true) const {
    RecordJob action = MakeRecordJob(job_);
    action.has_record = has_record;
    return records.Make(action, kNonce, /*workers=*/1);
  }
  // Reads the record through a duplicate of its descriptor, as another process does.
  absl::Status Found(const KeptRecord& record) const {
    return KeptRecord::Adopt(UniqueFd(::fcntl(record.fd(), F_DUPFD_CLOEXEC, 0)), step_arena_.get())
        .status();
  }
  // Makes a record of the previous daemon.
  std::unique_ptr<KeptRecord> RecordBefore() const {
    auto record = KeptRecord::Make(MakeRecordJob(job_), kNonce, /*workers=*/1);
    EXPECT_OK(record.status());
    (*record)->Leave();
    return *std::move(record);
  }
  RecordDecision Decision() const {
    RecordDecision decision{.job = job_.id, .step = job_.step + 1};
    decision.order.step = decision.step;
    decision.order.params.assign(job_.param_updates.size(), true);
    decision.param_updates.assign(job_.param_updates.size(), decision.step);
    return decision;
  }
  std::string NameOf(uint64_t number) const { return RecordDescriptor(job_.id, number); }

  const DurableJob job_ = MakeJob(Kind::kOnSwap);
  UniqueFd step_arena_;
  std::set<std::string> stored_;
  bool is_full_ = false;
};

TEST_F(JobRecordsTest, ANewRecordReplacesTheOldOneInTheStore) {
  StoredDescriptors store(Store());
  JobRecords records(store);
  EXPECT_EQ(records.Find(job_.id), nullptr);
  ASSERT_OK(Make(records));
  const std::shared_ptr<KeptRecord> first = records.Find(job_.id);
  ASSERT_OK(Make(records));
  EXPECT_THAT(stored_, ElementsAre(NameOf(2)));
  EXPECT_THAT(records.stored(), ElementsAre(job_.id));
  EXPECT_THAT(Found(*first), HasError(ErrorId::kJobFailed));
  EXPECT_OK(Found(*records.Find(job_.id)));
  records.End(job_.id);
  EXPECT_THAT(stored_, IsEmpty());
  EXPECT_EQ(records.Find(job_.id), nullptr);
}

TEST_F(JobRecordsTest, ARecordThatCannotBeStoredLeavesTheOldOneOnlyIfThatIsOfTheRun) {
  StoredDescriptors store(Store());
  JobRecords records(store);
  ASSERT_OK(Make(records));
  is_full_ = true;
  EXPECT_THAT(Make(records), HasError(ErrorId::kLimit));
  EXPECT_THAT(stored_, ElementsAre(NameOf(1)));
  EXPECT_THAT(Make(records, /*has_record=*/false), HasError(ErrorId::kLimit));
  EXPECT_THAT(stored_, IsEmpty());
  EXPECT_EQ(records.Find(job_.id), nullptr);
}

TEST_F(JobRecordsTest, ARecordThatWasLeftIsDroppedByItsOwnerAlone) {
  for (const bool is_owned : {false, true}) {
    std::unique_ptr<KeptRecord> before = RecordBefore();
    UniqueFd fd(::fcntl(before->fd(), F_DUPFD_CLOEXEC, 0));
    StoredDescriptors store(Store());
    auto records = std::make_unique<JobRecords>(store);
    records->Add(job_.id, {.record = std::move(before), .number = 5});
    EXPECT_THAT(store.names(), ElementsAre(NameOf(5)));
    EXPECT_FALSE(records->has_update());
    if (is_owned) records->Own();
    records.reset();
    EXPECT_EQ(KeptRecord::Adopt(std::move(fd), step_arena_.get()).ok(), !is_owned);
  }
}

TEST_F(JobRecordsTest, NewRecordsHaveLargerNumbersThanThoseThatWereLeft) {
  stored_ = {NameOf(5)};
  StoredDescriptors store(Store());
  JobRecords records(store);
  records.Add(job_.id, {.record = RecordBefore(), .number = 5});
  records.Own();
  ASSERT_OK(Make(records));
  EXPECT_THAT(stored_, ElementsAre(NameOf(6)));
}

TEST_F(JobRecordsTest, AConvertedRecordIsStoredOnceItIsOwned) {
  stored_ = {NameOf(5)};
  StoredDescriptors store(Store());
  JobRecords records(store);
  records.Add(job_.id, {.record = RecordBefore(), .number = 5, .is_converted = true});
  EXPECT_THAT(stored_, ElementsAre(NameOf(5)));
  records.Own();
  EXPECT_THAT(stored_, ElementsAre(NameOf(6)));
  records.Own();
  EXPECT_THAT(stored_, ElementsAre(NameOf(6)));
}

TEST_F(JobRecordsTest, WithoutAStoreARecordServesAnUpdateAlone) {
  for (const bool is_in_update : {false, true}) {
    std::unique_ptr<KeptRecord> before = RecordBefore();
    if (is_in_update) before->Set(Decision());
    StoredDescriptors store({});
    JobRecords records(store);
    records.Add(job_.id, {.record = std::move(before), .number = 5});
    records.Own();
    EXPECT_EQ(records.Find(job_.id) != nullptr, is_in_update);
    EXPECT_EQ(records.has_update(), is_in_update);
    EXPECT_THAT(records.stored(), IsEmpty());
    records.End(job_.id);
    EXPECT_FALSE(records.has_update());
  }
}

TEST_F(JobRecordsTest, ARecordThatIsLeftSurvivesItsDaemon) {
  StoredDescriptors store(Store());
  auto records = std::make_unique<JobRecords>(store);
  ASSERT_OK(Make(*records));
  UniqueFd fd(::fcntl(records->Find(job_.id)->fd(), F_DUPFD_CLOEXEC, 0));
  EXPECT_EQ(records->Leave(job_.id), job_.step);
  records.reset();
  EXPECT_OK(KeptRecord::Adopt(std::move(fd), step_arena_.get()));
  EXPECT_THAT(stored_, ElementsAre(NameOf(1)));
}

}  // namespace
}  // namespace forebay::daemon::job_records_test
