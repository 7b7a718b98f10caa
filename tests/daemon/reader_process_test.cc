// SPDX-License-Identifier: Apache-2.0
// Goal    Two ranks train to the bits of a reference without readers, while one reader is killed, another is stopped while it
//         holds a lease, and a third reads. The stopped reader's session ends after reader.lease_max, and its error gives the
//         reason.
// Method  A real daemon. Readers that are killed and stopped are processes; the ranks and the other
//         readers are threads of the test.

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon::reader_process_test {
namespace {

using client::AdminClient;
using client::Attachment;
using protocol::ErrorId;
using protocol::Layout;
using testing::DaemonProcess;
using testing::Eventually;
using testing::HasError;
using ::testing::HasSubstr;
using testing::JobShape;
using testing::ReferenceTrainer;
using testing::RunningProgram;
using testing::TempDir;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr uint64_t kSeed = testing::HealthyJob::kSeed;
const JobShape kShape;  // A job of two ranks, with held_client's layout.

class DaemonReaders : public ::testing::Test {
 protected:
  void Start(const std::string& lease_max) {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_, {"update.block_elems=1024",
                                                                 "reader.lease_max=" + lease_max}));
    ASSERT_OK_AND_ASSIGN(admin_, AdminClient::Connect({.socket = socket_}));
    for (uint32_t rank = 0; rank < kShape.world_size; ++rank) {
      ASSERT_OK_AND_ASSIGN(ranks_.emplace_back(), Attach(rank, /*reader=*/false));
      if (rank == 0) {
        ASSERT_OK(testing::WriteInitial(*ranks_[0], kSeed));
      }
    }
  }

  absl::StatusOr<std::unique_ptr<Attachment>> Attach(uint32_t rank, bool reader) {
    return Attachment::Attach({.socket = socket_,
                               .job = "job",
                               .reader = reader,
                               .rank = rank,
                               .world_size = kShape.world_size,
                               .layout = testing::MakeLayoutSpec(kShape),
                               .timeout = kTimeout});
  }

  // Trains one step of both ranks and of the reference, and expects that no rank gets an error.
  void Train() {
    const uint64_t t = ranks_[0]->committed_step() + 1;
    std::vector<uint32_t> groups;
    for (uint32_t g = 0; g < kShape.groups; ++g) groups.push_back(g);
    reference_.Step(t, testing::MakeHyperParams(), 0, groups);
    std::vector<absl::StatusOr<client::StepResult>> results(ranks_.size());
    {
      std::vector<std::jthread> threads;
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        threads.emplace_back([&, rank] {
          results[rank] = testing::TrainStep(*ranks_[rank], {rank, t, 0});
        });
      }
    }
    for (const auto& result : results) {
      ASSERT_OK(result);
      EXPECT_EQ(result->committed_step, t);
    }
  }

  void ExpectWeights(Attachment& session) {
    for (uint32_t g = 0; g < kShape.groups; ++g) {
      ASSERT_OK_AND_ASSIGN(const client::Lease lease, session.Fetch(g, kTimeout));
      EXPECT_TRUE(std::ranges::equal(lease.bytes, reference_.Weights(g))) << "group " << g;
      EXPECT_OK(session.Release(lease));
    }
  }

  std::unique_ptr<RunningProgram> HoldLease() {
    return RunningProgram::Start({HELD_CLIENT_PATH, socket_, "0", "2", "read"}, "held");
  }

  // Returns the node's status. The reader is valid until the next call.
  schema::JobStatus::Reader Job() {
    auto status = admin_->Status();
    EXPECT_OK(status);
    if (!status.ok() || (*status)->getJobs().size() != 1) return {};
    status_ = *std::move(status);
    return status_->getJobs()[0];
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const Layout layout_ = *Layout::Create(testing::MakeLayoutSpec(kShape));
  ReferenceTrainer reference_{layout_, kShape.world_size, kSeed};
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<AdminClient> admin_;
  client::NodeStatus status_;
  std::vector<std::unique_ptr<Attachment>> ranks_;
};

TEST_F(DaemonReaders, ThatAreKilledOrStoppedAreNotNoticedByTheRanks) {
  Start("200");
  ASSERT_OK_AND_ASSIGN(const auto reader, Attach(0, /*reader=*/true));
  Train();

  const auto killed = HoldLease();
  ASSERT_THAT(killed->errors(), HasSubstr("held"));
  EXPECT_EQ(Job().getLeases(), 1U);
  killed->Kill();
  Train();
  EXPECT_TRUE(Eventually([&] { return Job().getSessions() == 3 && Job().getLeases() == 0; }));

  const auto stopped = HoldLease();
  ASSERT_THAT(stopped->errors(), HasSubstr("held"));
  ASSERT_EQ(::kill(stopped->pid(), SIGSTOP), 0);
  for (int i = 0; i < 3; ++i) Train();
  EXPECT_EQ(Job().getLeases(), 0U);
  EXPECT_EQ(Job().getCommittedStep(), 5U);
  EXPECT_EQ(Job().getFailed(), "");
  stopped->Kill();

  for (const auto& rank : ranks_) ExpectWeights(*rank);
  ExpectWeights(*reader);
}

TEST_F(DaemonReaders, ThatHoldALeaseTooLongAreEndedWithTheReason) {
  Start("50");
  ASSERT_OK_AND_ASSIGN(const auto slow, Attach(0, /*reader=*/true));
  ASSERT_OK_AND_ASSIGN(const client::Lease lease, slow->Fetch(1, kTimeout));
  Train();
  const absl::Status released = slow->Release(lease);
  EXPECT_THAT(released, HasError(ErrorId::kLease));
  EXPECT_THAT(std::string(released.message()), HasSubstr("reader.lease_max"));
  ASSERT_OK_AND_ASSIGN(const auto again, Attach(0, /*reader=*/true));
  ExpectWeights(*again);
}

TEST_F(DaemonReaders, ReadStatesAndHaveNoRank) {
  Start("10000");
  Train();
  ASSERT_OK_AND_ASSIGN(const auto reader, Attach(0, /*reader=*/true));
  EXPECT_EQ(reader->committed_step(), 1U);
  EXPECT_TRUE(reader->extra_state().empty());
  EXPECT_OK(testing::CheckStates(*reader, reference_));
  EXPECT_THAT(testing::CallStep(*reader, {.rank = 0, .t = 2}), HasError(ErrorId::kRank));
  EXPECT_THAT(testing::DeliverGradient(*reader, 0, 0, 2), HasError(ErrorId::kRank));
  EXPECT_OK(reader->Detach());
  Train();
}

}  // namespace
}  // namespace forebay::daemon::reader_process_test
