// Goal    Nothing that a client does with a descriptor blocks the daemon: doorbells that are full,
//         descriptors whose close blocks, descriptors that nobody receives.
// Method  A raw client against a real daemon. Beside it a healthy job trains after each attack.

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "protocol/os/unique_fd.h"
#include "protocol/ring.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::daemon {
namespace {

using protocol::Command;
using protocol::Op;
using protocol::UniqueFd;
using testing::DaemonProcess;
using testing::HealthyJob;
using testing::RawSession;
using testing::TempDir;

class HostileDescriptors : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_));
    ASSERT_OK_AND_ASSIGN(healthy_, HealthyJob::Attach({.socket = socket_}));
    ASSERT_OK(healthy_->TrainOneMoreStep());
  }

  void TearDown() override {
    ASSERT_TRUE(daemon_->IsAlive());
    EXPECT_OK(healthy_->TrainOneMoreStep());
    EXPECT_EQ(daemon_->Stop().exit_code, 0);
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<HealthyJob> healthy_;
};

// Makes every later write to the doorbell block, as far as the client can.
void Fill(int doorbell) {
  ASSERT_EQ(::fcntl(doorbell, F_SETFL, O_NONBLOCK), 0);
  const uint64_t most = ~uint64_t{0} - 1;
  while (::write(doorbell, &most, sizeof(most)) > 0) {
  }
  ASSERT_EQ(::fcntl(doorbell, F_SETFL, 0), 0);
}

TEST_F(HostileDescriptors, AFullBlockingDoorbellDoesNotBlockTheLoop) {
  constexpr uint64_t kCommands = 2 * protocol::kRingEntries;
  ASSERT_OK_AND_ASSIGN(auto raw, RawSession::Connect(socket_));
  ASSERT_OK(raw->Hello());
  ASSERT_OK(raw->Attach({.job = "attacker"}, testing::MakeLayoutSpec({.world_size = 1})));
  ASSERT_OK(raw->Map());
  for (const auto kind :
       {schema::Session::Kind::COMPLETION_DOORBELL, schema::Session::Kind::COMMAND_DOORBELL}) {
    ASSERT_OK_AND_ASSIGN(const UniqueFd doorbell, raw->Descriptor(kind));
    Fill(doorbell.get());
  }
  // The client claims to sleep and never empties its doorbell.
  protocol::RingMemory& ring = raw->ring();
  uint64_t head = 0;
  for (uint64_t sent = 0; sent < kCommands; ++sent) {
    protocol::internal::StoreWord<uint32_t>(ring.completion_head.sleeping, 1,
                                            std::memory_order_seq_cst);
    Command command{};
    command.op = static_cast<uint16_t>(Op::kFetch);
    protocol::internal::StoreEntry(ring.commands[sent % protocol::kRingEntries], command);
    protocol::internal::StoreWord(ring.command_tail.index, sent + 1, std::memory_order_seq_cst);
    Fill(raw->command_doorbell_fd());
    ASSERT_TRUE(testing::Eventually([&] {
      head = protocol::internal::LoadWord(ring.completion_tail.index, std::memory_order_seq_cst);
      return head == sent + 1;
    })) << "after "
        << sent << " commands";
    protocol::internal::StoreWord(ring.completion_head.index, head, std::memory_order_seq_cst);
  }
}

}  // namespace
}  // namespace forebay::daemon
