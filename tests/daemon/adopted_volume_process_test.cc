// SPDX-License-Identifier: Apache-2.0
// Goal    A daemon that is started on swap paths of another place, or on a copy of another daemon's paths, is refused until an
//         operator says that it may adopt the jobs. After that, the original and the copy are two separate volumes.
// Method  Real daemons on folders that are renamed and copied, and with machine ids that an interposed library sets. Each
//         daemon trains a durable job, whose every weight and state is known.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon::adopted_volume_process_test {
namespace {

using testing::Ended;
using testing::HasError;
using ::testing::HasSubstr;
using testing::RunningProgram;
using testing::RunProgram;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr uint64_t kSeed = 1;
constexpr testing::JobShape kShape{.world_size = 1, .groups = 2, .group_elems = 9000};

// A daemon's socket and its two swap paths, in one folder.
struct Node {
  std::string folder;

  std::string socket() const { return folder + "/s"; }
  std::string path(const std::string& name) const { return folder + "/" + name; }
  std::vector<std::string> Arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {FOREBAYD_PATH};
    for (const std::string& setting :
         {"socket.path=" + socket(), std::string("memlock=best_effort"),
          "swap.paths=" + path("a") + "," + path("b"), std::string("swap.capacity=32MiB"),
          std::string("swap.probe=never"), std::string("update.block_elems=4096"),
          std::string("update.workers=2"), std::string("dram.limit=64MiB"),
          std::string("jobs.durability=step")}) {
      all.insert(all.end(), {"--set", setting});
    }
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::unique_ptr<RunningProgram> Start(const std::vector<std::string>& more = {}) const {
    return RunningProgram::Start(Arguments(more), "forebayd ready");
  }
};

// Trains one rank, with a learning rate that each step chooses, and compares the job with a scalar reference trainer.
class Trained {
 public:
  Trained() : layout_(*protocol::Layout::Create(testing::MakeLayoutSpec(kShape))) {
    reference_ = std::make_unique<testing::ReferenceTrainer>(layout_, 1, kSeed);
  }
  Trained(const Trained& other) : layout_(other.layout_), rates_(other.rates_) {
    reference_ = std::make_unique<testing::ReferenceTrainer>(layout_, 1, kSeed);
    for (size_t i = 0; i < rates_.size(); ++i) Advance(i + 1, rates_[i]);
  }
  Trained& operator=(const Trained&) = delete;

  // Attaches, compares the job with the reference, trains `steps` more steps with learning rate `rate`, and compares again.
  absl::Status Train(const std::string& socket, double rate, int steps) {
    ASSIGN_OR_RETURN(const auto session,
                     client::Attachment::Attach({.socket = socket,
                                                 .job = "job",
                                                 .layout = testing::MakeLayoutSpec(kShape),
                                                 .timeout = kTimeout}));
    if (session->writes_initial()) RETURN_IF_ERROR(testing::WriteInitial(*session, kSeed));
    if (session->committed_step() != rates_.size()) {
      return absl::DataLossError("the job is at step " + std::to_string(session->committed_step()) +
                                 ", not " + std::to_string(rates_.size()));
    }
    RETURN_IF_ERROR(Compare(*session));
    for (int i = 0; i < steps; ++i) {
      const uint64_t t = rates_.size() + 1;
      for (uint32_t group = kShape.groups; group-- > 0;) {
        RETURN_IF_ERROR(testing::DeliverGradient(*session, group, /*rank=*/0, t));
      }
      RETURN_IF_ERROR(session
                          ->Step(t, testing::MakeHyperParams(rate), /*max_grad_norm=*/0,
                                 /*extra_state=*/{}, kTimeout)
                          .status());
      rates_.push_back(rate);
      Advance(t, rate);
    }
    RETURN_IF_ERROR(Compare(*session));
    return session->Detach();
  }

 private:
  void Advance(uint64_t t, double rate) {
    std::array<uint32_t, kShape.groups> groups{};
    std::iota(groups.begin(), groups.end(), 0U);
    reference_->Step(t, testing::MakeHyperParams(rate), /*max_grad_norm=*/0, groups);
  }
  absl::Status Compare(client::Attachment& session) const {
    for (uint32_t group = 0; group < kShape.groups; ++group) {
      ASSIGN_OR_RETURN(const client::Lease lease, session.Fetch(group, kTimeout));
      const bool same = std::ranges::equal(lease.bytes, reference_->Weights(group));
      RETURN_IF_ERROR(session.Release(lease));
      if (!same) return absl::DataLossError("weights differ");
    }
    return testing::CheckStates(session, *reference_);
  }

  protocol::Layout layout_;
  std::vector<double> rates_ = {};  // Learning rates, by step.
  std::unique_ptr<testing::ReferenceTrainer> reference_;
};

class AdoptedVolume : public ::testing::Test {
 protected:
  // Clients before and after a restart are one run.
  void SetUp() override { ASSERT_EQ(::setenv("FOREBAY_RUN", "test", 0), 0); }
  void TearDown() override { ::unsetenv("LD_PRELOAD"); }

  Node MakeNode(const std::string& name) const {
    const Node node{.folder = dir_.Make(name)};
    std::filesystem::create_directory(node.path("a"));
    std::filesystem::create_directory(node.path("b"));
    return node;
  }
  static void ExpectRefused(const Node& node, const std::string& why) {
    const Ended ended = RunProgram(node.Arguments());
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_THAT(ended.errors, HasSubstr("error[E_SWAP_PATH]"));
    EXPECT_THAT(ended.errors, HasSubstr(why));
    EXPECT_THAT(ended.errors, HasSubstr("hint: forebayd --adopt takes the volume over"));
  }

  const testing::TempDir dir_;
};

TEST_F(AdoptedVolume, UnderAnotherMountPointIsRefusedUntilItIsAdopted) {
  const Node before = MakeNode("before");
  Trained job;
  auto daemon = before.Start();
  ASSERT_OK(job.Train(before.socket(), 1e-2, 2));
  daemon->Kill();
  const Node after{.folder = dir_.path() + "/after"};
  std::filesystem::rename(before.folder, after.folder);
  ExpectRefused(after, "swap path 0 (" + after.path("a") + "/forebay.swap) was last used as " +
                           before.path("a") + "/forebay.swap; swap path 1 (");
  ExpectRefused(after, "durable on it: 1 job: ");
  for (const bool is_first : {true, false}) {
    daemon = is_first ? after.Start({"--adopt"}) : after.Start();
    EXPECT_THAT(daemon->errors(), HasSubstr("swap: recovered 1 job: "));
    const bool was_adopted =
        daemon->errors().find("swap: adopted: swap path 0 (") != std::string::npos;
    EXPECT_EQ(was_adopted, is_first) << daemon->errors();
    ASSERT_OK(job.Train(after.socket(), 1e-2, 1));
    daemon->Kill();
  }
}

TEST_F(AdoptedVolume, OfAnotherMachineIsRefusedUntilItIsAdopted) {
  const Node node = MakeNode("node");
  Trained job;
  const auto on = [](const char* machine) {
    ASSERT_EQ(::setenv("LD_PRELOAD", OTHER_MACHINE_PATH, 1), 0);
    ASSERT_EQ(::setenv("FOREBAY_TEST_MACHINE", machine, 1), 0);
  };
  on("first");
  auto daemon = node.Start();
  ASSERT_OK(job.Train(node.socket(), 1e-2, 1));
  daemon->Kill();
  on("second");
  ExpectRefused(node, "the volume was last used on another machine; durable on it: 1 job: ");
  on("");
  daemon = node.Start();
  ASSERT_OK(job.Train(node.socket(), 1e-2, 1));
  daemon->Kill();
  on("second");
  ExpectRefused(node, "another machine");
  daemon = node.Start({"--adopt"});
  ASSERT_OK(job.Train(node.socket(), 1e-2, 1));
  daemon->Kill();
  daemon = node.Start();
  EXPECT_OK(job.Train(node.socket(), 1e-2, 1));
  daemon->Kill();
  on("first");
  ExpectRefused(node, "another machine");
}

// A copy of the folders, `cp -a`, that a second daemon gets.
TEST_F(AdoptedVolume, ThatIsACopyAndItsOriginalAreTrainedSideBySide) {
  const Node original = MakeNode("original");
  Trained of_original;
  auto first = original.Start();
  ASSERT_OK(of_original.Train(original.socket(), 1e-2, 3));
  first->Kill();
  const Node copy = MakeNode("copy");
  for (const char* path : {"a", "b"}) {
    ASSERT_EQ(RunProgram({"/bin/cp", "-a", original.path(path), copy.folder}).exit_code, 0);
  }
  first = original.Start();
  ExpectRefused(copy, "was last used as " + original.path("a") + "/forebay.swap");
  auto second = copy.Start({"--adopt"});
  Trained of_copy(of_original);
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(::testing::Message() << "round " << round);
    ASSERT_OK(of_original.Train(original.socket(), 1e-2, 1));
    ASSERT_OK(of_copy.Train(copy.socket(), 3e-2, 2));
    first->Kill();
    second->Kill();
    first = original.Start();
    second = copy.Start();
    EXPECT_THAT(second->errors(), HasSubstr("swap: recovered 1 job: "));
  }
  ASSERT_OK(of_original.Train(original.socket(), 1e-2, 1));
  ASSERT_OK(of_copy.Train(copy.socket(), 3e-2, 1));
  first->Kill();
  second->Kill();
  // A volume of one file of the original and one of the copy is refused. Adopted by force, it gives an error and no wrong
  // bytes.
  std::filesystem::remove_all(copy.path("a"));
  std::filesystem::rename(original.path("a"), copy.path("a"));
  ExpectRefused(copy, "swap path 0 (" + copy.path("a"));
  second = copy.Start({"--adopt"});
  EXPECT_THAT(of_copy.Train(copy.socket(), 3e-2, 1), HasError(protocol::ErrorId::kCorrupt));
}

TEST_F(AdoptedVolume, IsNotMadeAnewAtOnce) {
  const Node node = MakeNode("node");
  const Ended ended = RunProgram(node.Arguments({"--adopt", "--reclaim"}));
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_THAT(ended.errors, HasSubstr("--adopt keeps the jobs that --reclaim gives up"));
}

}  // namespace
}  // namespace forebay::daemon::adopted_volume_process_test
