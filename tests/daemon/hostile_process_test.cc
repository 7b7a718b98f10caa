// SPDX-License-Identifier: Apache-2.0
// Goal    No message or memory write of a client stops the daemon or reaches another job: not wrong versions and messages,
//         rings with impossible indices, commands out of range, holes in the memory, or mappings after the seals.
// Method  A raw client attacks a real daemon. A healthy job of the same daemon trains before and after each attack. A job
//         attacked through its own session trains on too if it has parameters. Every byte of both jobs is compared with the
//         reference.

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/ring.h"
#include "tests/support/attacked_daemon.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::daemon::hostile_process_test {
namespace {

using protocol::Command;
using protocol::ErrorId;
using protocol::Op;
using testing::HasError;
using ::testing::HasSubstr;
using testing::HealthyJob;
using testing::RawSession;

class HostileClient : public testing::AttackedDaemon {
 protected:
  std::unique_ptr<RawSession> Connected() {
    auto raw = RawSession::Connect(socket_);
    EXPECT_OK(raw);
    if (!raw.ok()) return nullptr;
    EXPECT_OK((*raw)->Hello());
    return *std::move(raw);
  }

  std::unique_ptr<RawSession> Attached(const std::string& job) {
    std::unique_ptr<RawSession> raw = Connected();
    if (raw == nullptr) return nullptr;
    const absl::Status status = raw->Attach({.job = job}, layout_spec_);
    EXPECT_OK(status);
    return status.ok() ? std::move(raw) : nullptr;
  }

  static Command Make(Op op) {
    Command command{};
    command.op = static_cast<uint16_t>(op);
    return command;
  }

  // Writes the job's initial parameters. The job must be able to train when the test ends.
  absl::Status WriteAll(RawSession& raw, const std::string& job) {
    ready_jobs_.push_back(job);
    ASSIGN_OR_RETURN(const protocol::Layout layout, protocol::Layout::Create(layout_spec_));
    for (uint32_t g = 0; g < layout.groups().size(); ++g) {
      const std::vector<std::byte> values = testing::MakeValues(layout, g, HealthyJob::kSeed);
      std::memset(raw.grad().data(), 0, layout.partition_bytes(g));
      std::memcpy(raw.grad().data(), values.data(), values.size());
      Command write = Make(Op::kWriteInitial);
      write.partition = g;
      write.length_bytes = layout.partition_bytes(g);
      RETURN_IF_ERROR(raw.Ask(write));
    }
    return raw.Ask(Make(Op::kInitialDone));
  }

  const protocol::LayoutSpec layout_spec_ = testing::MakeLayoutSpec(kShape);
};

TEST_F(HostileClient, OfAnotherVersionIsRefusedWithBothNumbers) {
  ASSERT_OK_AND_ASSIGN(auto raw, RawSession::Connect(socket_));
  const absl::Status status = raw->Hello(protocol::kProtocolVersion + 41);
  EXPECT_THAT(status, HasError(ErrorId::kProtocol));
  EXPECT_THAT(status.message().data(), HasSubstr(std::to_string(protocol::kProtocolVersion + 41)));
  EXPECT_THAT(status.message().data(), HasSubstr(std::to_string(protocol::kProtocolVersion)));
  EXPECT_THAT(raw->Attach({}, layout_spec_), HasError(ErrorId::kProtocol));
}

TEST_F(HostileClient, OfThisReleaseOrTheOneBeforeGetsARingOfItsVersion) {
  for (const uint32_t version : {protocol::kProtocolVersionBefore, protocol::kProtocolVersion}) {
    ASSERT_OK_AND_ASSIGN(auto raw, RawSession::Connect(socket_));
    ASSERT_OK(raw->Hello(version));
    ASSERT_OK(raw->Attach({.job = "job" + std::to_string(version)}, layout_spec_));
    ASSERT_OK_AND_ASSIGN(const protocol::UniqueFd fd, raw->Descriptor(schema::Session::Kind::RING));
    protocol::RingHeader header{};
    ASSERT_EQ(::pread(fd.get(), &header, sizeof(header), 0), static_cast<ssize_t>(sizeof(header)));
    EXPECT_EQ(header.magic, protocol::kRingMagic);
    EXPECT_EQ(header.version, version);
  }
  ASSERT_OK_AND_ASSIGN(auto older, RawSession::Connect(socket_));
  EXPECT_THAT(older->Hello(protocol::kProtocolVersionBefore - 1), HasError(ErrorId::kProtocol));
}

TEST_F(HostileClient, GetsNoJobForALayoutThatIsNone) {
  auto raw = Connected();
  EXPECT_THAT(raw->Attach({.layout_bytes = 64}), HasError(ErrorId::kProtocol));  // no descriptor
  const std::vector<std::byte> garbage(64, std::byte{0xA5});
  const protocol::UniqueFd memfd = testing::MakeMemfd(garbage);
  EXPECT_THAT(raw->Attach({.layout_fd = memfd.get(), .layout_bytes = 64}),
              HasError(ErrorId::kProtocol));
  EXPECT_THAT(raw->Attach({.layout_fd = memfd.get(), .layout_bytes = 128}),
              HasError(ErrorId::kProtocol));  // longer than the memfd
  EXPECT_THAT(raw->Attach({.layout_fd = memfd.get(), .layout_bytes = uint64_t{1} << 40}),
              HasError(ErrorId::kLayout));
  const protocol::UniqueFd fifo(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  EXPECT_THAT(raw->Attach({.layout_fd = fifo.get(), .layout_bytes = 64}),
              HasError(ErrorId::kProtocol));
  EXPECT_THAT(raw->Attach({.job = "../job"}, layout_spec_), HasError(ErrorId::kJobName));
  EXPECT_THAT(raw->Attach({.rank = 5}, layout_spec_), HasError(ErrorId::kRank));
  EXPECT_THAT(raw->Attach({.extra_state_bytes = uint64_t{1} << 60}, layout_spec_),
              HasError(ErrorId::kExtraState));
  EXPECT_THAT(raw->Attach({.grad_arena_bytes = 0}, layout_spec_), HasError(ErrorId::kRange));
}

TEST_F(HostileClient, GetsNoJobForALevelOfDurabilityThatIsNone) {
  auto raw = Connected();
  ASSERT_NE(raw, nullptr);
  const std::string with_zero("step\0", 5);
  for (const std::string& text : {std::string("epoch=0"), with_zero, std::string(200'000, 's')}) {
    const absl::Status status = raw->Attach({.durability = text}, layout_spec_);
    EXPECT_THAT(status, HasError(ErrorId::kOption));
    EXPECT_LT(status.message().size(), 200U);
    EXPECT_THAT(protocol::HintOf(status), HasSubstr("memory, step, or epoch=N"));
  }
  EXPECT_OK(raw->Attach({.durability = "memory"}, layout_spec_));
}

TEST_F(HostileClient, WhoseModelDoesNotFitGetsEveryTermOfTheSum) {
  auto raw = Connected();
  ASSERT_NE(raw, nullptr);
  const protocol::LayoutSpec huge =
      testing::MakeLayoutSpec({.world_size = 1, .groups = 4096, .group_elems = 131072});
  const absl::Status status = raw->Attach({.job = "huge"}, huge);
  EXPECT_THAT(status, HasError(ErrorId::kDramLimit));
  for (const char* term : {"weights", "gradient sums", "gradient arena", "ring", "the limit is"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(term));
  }
  EXPECT_THAT(protocol::HintOf(status), HasSubstr("dram.limit"));
}

TEST_F(HostileClient, LosesItsSessionWithAnImpossibleRingIndex) {
  const std::vector<std::function<void(protocol::RingMemory&)>> attacks = {
      [](protocol::RingMemory& ring) { ring.command_tail.index += protocol::kRingEntries + 1; },
      [](protocol::RingMemory& ring) { ring.command_tail.index = ~uint64_t{0}; },
  };
  for (size_t i = 0; i < attacks.size(); ++i) {
    SCOPED_TRACE(i);
    auto raw = Attached("bad" + std::to_string(i));
    ASSERT_NE(raw, nullptr);
    ASSERT_OK(raw->Map());
    ASSERT_OK(WriteAll(*raw, "bad" + std::to_string(i)));
    attacks[i](raw->ring());
    raw->RingDoorbell();
    // The daemon closes the connection, so that calls fail after a while.
    EXPECT_TRUE(testing::Eventually([&] { return !raw->Explain(1).ok(); }));
    EXPECT_TRUE(testing::Eventually(
        [&] { return raw->Explain(1).code() == absl::StatusCode::kUnavailable; }));
  }
  logged_ = {"error[E_RING]: the memory shared by client and daemon was overwritten",
             "ring's producer is 260, this side is at 3 (256 entries)",
             "ring's producer is 18446744073709551615, this side is at ",
             "hint: the session has ended: look for stray writes"};
}

TEST_F(HostileClient, GetsAnErrorForEachCommandThatIsWrong) {
  auto raw = Attached("bad");
  ASSERT_NE(raw, nullptr);
  ASSERT_OK(raw->Map());
  EXPECT_THAT(raw->Ask(Make(Op::kFetch)), HasError(ErrorId::kNotReady));
  ASSERT_OK(WriteAll(*raw, "bad"));
  ASSERT_OK_AND_ASSIGN(const protocol::Layout layout, protocol::Layout::Create(layout_spec_));

  Command command = Make(static_cast<Op>(999));
  EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kProtocol));
  command = Make(Op::kFetch);
  command.partition = 99;
  EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kRange));
  command = Make(Op::kRelease);
  command.lease_id = 4711;
  EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kLease));

  Command gradient = Make(Op::kGradReady);
  gradient.step = 1;
  gradient.length_bytes = layout.partition_bytes(0);
  for (const uint64_t offset :
       {uint64_t{1}, uint64_t{4096} << 20, std::numeric_limits<uint64_t>::max() - 63}) {
    command = gradient;
    command.arena_offset_bytes = offset;
    EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kRange)) << offset;
  }
  command = gradient;
  command.length_bytes -= 64;
  EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kRange));
  command = gradient;
  command.step = 0;
  EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kStep));

  command = Make(Op::kStep);
  command.step = 1;
  command.length_bytes = std::numeric_limits<uint64_t>::max() - 63;
  EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kRange));
  command = Make(Op::kReadState);
  command.element_offset = std::numeric_limits<uint64_t>::max();
  command.length_bytes = 4096;
  EXPECT_THAT(raw->Ask(command), HasError(ErrorId::kRange));
  EXPECT_OK(raw->Ask(Make(Op::kFetch)));
}

TEST_F(HostileClient, CannotReleaseTheLeaseOfAnotherSession) {
  auto one = Attached("one");
  ASSERT_NE(one, nullptr);
  ASSERT_OK(one->Map());
  ASSERT_OK(WriteAll(*one, "one"));
  ASSERT_OK_AND_ASSIGN(const protocol::Completion fetched, one->Call(Make(Op::kFetch)));
  Command release = Make(Op::kRelease);
  release.lease_id = fetched.lease_id;
  std::jthread([&] {  // A thread of its own, because a thread has one event loop.
    auto two = Attached("two");
    ASSERT_NE(two, nullptr);
    ASSERT_OK(two->Map());
    ASSERT_OK(WriteAll(*two, "two"));
    EXPECT_THAT(two->Ask(release), HasError(ErrorId::kLease));
    ASSERT_OK_AND_ASSIGN(const protocol::Completion own, two->Call(Make(Op::kFetch)));
    Command release_own = release;
    release_own.lease_id = own.lease_id;
    EXPECT_OK(two->Ask(release_own));
  })
      .join();
  EXPECT_OK(one->Ask(release));
  EXPECT_THAT(one->Ask(release), HasError(ErrorId::kLease));
}

TEST_F(HostileClient, HarmsOnlyItselfWithAHoleInItsGradArena) {
  auto raw = Attached("bad");
  ASSERT_NE(raw, nullptr);
  ASSERT_OK(raw->Map());
  ASSERT_OK(WriteAll(*raw, "bad"));
  ASSERT_OK_AND_ASSIGN(const protocol::Layout layout, protocol::Layout::Create(layout_spec_));
  Command gradient = Make(Op::kGradReady);
  gradient.step = 1;
  gradient.length_bytes = layout.partition_bytes(0);
  const auto punch = [&] {
    return ::fallocate(raw->grad_fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                       static_cast<off_t>(raw->grad().size()));
  };
  EXPECT_EQ(punch(), 0);
  EXPECT_OK(raw->Ask(gradient));
  EXPECT_EQ(punch(), 0);
  EXPECT_EQ(::madvise(raw->grad().data(), 4096, MADV_REMOVE), 0);
}

TEST_F(HostileClient, CanNeitherSealNorResizeAnArenaNorWriteTheWeights) {
  auto raw = Attached("bad");
  ASSERT_NE(raw, nullptr);
  ASSERT_OK(raw->Map());
  for (const auto kind : {schema::Session::Kind::GRAD_ARENA, schema::Session::Kind::RING}) {
    ASSERT_OK_AND_ASSIGN(const protocol::UniqueFd fd, raw->Descriptor(kind));
    for (const int seal : {F_SEAL_SEAL, F_SEAL_FUTURE_WRITE, F_SEAL_WRITE}) {
      EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seal), -1) << seal;
      EXPECT_EQ(errno, EPERM);
    }
    EXPECT_EQ(::ftruncate(fd.get(), 0), -1);
    EXPECT_EQ(::ftruncate(fd.get(), 1 << 30), -1);
  }
  const int weights = raw->weights_fd();
  EXPECT_EQ(::fcntl(weights, F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, weights, 0), MAP_FAILED);
  EXPECT_EQ(errno, EACCES);
  EXPECT_EQ(::mprotect(const_cast<std::byte*>(raw->weights().data()), 4096, PROT_READ | PROT_WRITE),
            -1);
  EXPECT_EQ(::fallocate(weights, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
  EXPECT_EQ(::ftruncate(weights, 0), -1);
  EXPECT_EQ(::fcntl(weights, F_ADD_SEALS, F_SEAL_SEAL), -1);
}

TEST_F(HostileClient, WhoseCommandsCameBeforeMappedIsAnsweredAfterIt) {
  auto raw = Attached("early");
  ASSERT_NE(raw, nullptr);
  ASSERT_OK(raw->Map());
  EXPECT_OK(raw->Mapped());  // a repeat is harmless
  EXPECT_THAT(raw->Descriptor(schema::Session::Kind::EXTRA_STATE), HasError(ErrorId::kNotReady));
  EXPECT_OK(raw->Detach());
  EXPECT_THAT(raw->Mapped(), HasError(ErrorId::kFenced));
  EXPECT_THAT(raw->Descriptor(schema::Session::Kind::RING), HasError(ErrorId::kFenced));
}

// Returns true if the other end has closed the connection.
bool IsClosed(int fd) {
  pollfd poll_fd{.fd = fd, .events = POLLIN, .revents = 0};
  char byte = 0;
  return ::poll(&poll_fd, 1, 0) == 1 && ::read(fd, &byte, 1) == 0;
}

TEST_F(HostileClient, ThatDoesNotSayHelloLosesItsConnection) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(socket_.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, socket_.data(), socket_.size());
  const protocol::UniqueFd silent(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address);
  ASSERT_EQ(::connect(silent.get(), generic, sizeof(address)), 0);
  EXPECT_TRUE(testing::Eventually([&] { return IsClosed(silent.get()); }));
}

TEST_F(HostileClient, ThatFloodsTheRingIsEvicted) {
  auto raw = Attached("flood");
  ASSERT_NE(raw, nullptr);
  ASSERT_OK(raw->Map());
  ASSERT_OK(WriteAll(*raw, "flood"));
  // The client sends two rings full of commands and never takes their completions.
  protocol::RingMemory& ring = raw->ring();
  uint64_t tail = 0;
  const auto evicted = [&] {
    const uint64_t head =
        protocol::internal::LoadWord(ring.command_head.index, std::memory_order_acquire);
    tail = head + protocol::kRingEntries;
    protocol::internal::StoreWord(ring.command_tail.index, tail, std::memory_order_seq_cst);
    raw->RingDoorbell();
    return raw->Explain(1).code() == absl::StatusCode::kUnavailable;
  };
  EXPECT_TRUE(testing::Eventually(evicted));
}

}  // namespace
}  // namespace forebay::daemon::hostile_process_test
