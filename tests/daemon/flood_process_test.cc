// SPDX-License-Identifier: Apache-2.0
// Goal    A client that sends requests without end, and never reads an answer, does not end the daemon and costs it neither
//         descriptors nor unbounded memory. No other client waits because of it.
// Method  The test writes RPC messages by hand to the socket of a real daemon, while an ordinary client uses the same daemon.

#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::daemon {
namespace {

using testing::DaemonProcess;
using testing::Eventually;
using testing::HasError;
using ::testing::HasSubstr;
using testing::Quiescent;
using testing::RawSession;
using testing::TempDir;

constexpr uint64_t kNodeInterface = capnp::typeId<schema::Node>();
constexpr uint64_t kAdminInterface = capnp::typeId<schema::Admin>();
constexpr uint16_t kHello = 0;  // Method of Node.
constexpr uint16_t kAdmin = 2;
constexpr uint16_t kStatus = 0;         // Method of Admin.
constexpr int kCalls = 200'000;         // some 20 MB
constexpr int kCallsIntoLoop = 40'000;  // More than any queue holds.
constexpr int kSpareMost = 64;
constexpr int kRoundsBeside = 100;

// A connection that sends requests, and discards the bytes that it reads.
class MuteClient {
 public:
  explicit MuteClient(const std::string& socket)
      : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, socket.data(), socket.size());
    EXPECT_EQ(::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
  }

  // Question 0 is the bootstrap and question 1 the hello. The client sends both at once: the daemon wants the hello within
  // seconds, and a flood takes seconds to write.
  void SayHello() {
    capnp::MallocMessageBuilder builder;
    builder.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
    Append(builder);
    Call(0, kNodeInterface, kHello);
    EXPECT_TRUE(Pump());
  }

  // Appends a call to the answer of question `of`. If `of` is 0, the call goes to the answer itself, else to the capability at
  // its pointer field 1 (AdminResults.admin).
  void Call(uint32_t of, uint64_t interface, uint16_t method) {
    capnp::MallocMessageBuilder builder;
    auto call = builder.initRoot<capnp::rpc::Message>().initCall();
    call.setQuestionId(++last_question_);
    auto target = call.initTarget().initPromisedAnswer();
    target.setQuestionId(of);
    if (of != 0) target.initTransform(1)[0].setGetPointerField(1);
    call.setInterfaceId(interface);
    call.setMethodId(method);
    if (interface == kNodeInterface && method == kHello) {
      auto hello = call.initParams().getContent().initAs<schema::Node::HelloParams>();
      hello.setProtocolVersion(protocol::kProtocolVersion);
    }
    Append(builder);
  }

  // Tells the daemon that the last answer is no longer needed, whether it has arrived or not.
  void Finish() {
    capnp::MallocMessageBuilder builder;
    builder.initRoot<capnp::rpc::Message>().initFinish().setQuestionId(last_question_);
    Append(builder);
  }

  // Writes as much as the socket accepts. Returns false if the daemon has closed the connection.
  bool Pump() {
    while (written_ < bytes_.size()) {
      const ssize_t wrote =
          ::send(fd_.get(), bytes_.data() + written_, bytes_.size() - written_, MSG_NOSIGNAL);
      if (wrote < 0 && errno == EAGAIN) return true;
      if (wrote < 0) return false;
      written_ += static_cast<size_t>(wrote);
    }
    bytes_.clear();
    written_ = 0;
    return true;
  }

  // Reads answers and ignores them.
  void Discard() {
    std::array<char, 65536> bytes;
    while (::recv(fd_.get(), bytes.data(), bytes.size(), 0) > 0) continue;
  }

  bool has_more() const { return !bytes_.empty(); }

 private:
  void Append(capnp::MallocMessageBuilder& builder) {
    const auto words = capnp::messageToFlatArray(builder);
    const auto bytes = words.asChars();
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }

  protocol::UniqueFd fd_;
  std::vector<char> bytes_;
  size_t written_ = 0;
  uint32_t last_question_ = 0;
};

class Flood : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_)); }

  void ExpectThatOthersAreServed() {
    ASSERT_OK_AND_ASSIGN(const auto admin, client::AdminClient::Connect({.socket = socket_}));
    EXPECT_OK(admin->Status());
  }

  // Expects that the daemon reads only a part of the client's requests while other clients are served.
  void ExpectUnread(MuteClient& mute) {
    for (int i = 0; i < kRoundsBeside; ++i) {
      EXPECT_TRUE(mute.Pump());
      ExpectThatOthersAreServed();
    }
    EXPECT_TRUE(mute.has_more());
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<DaemonProcess> daemon_;
};

// If the daemon read on, it would hold the unread answers as one long chain and free that chain when the connection ends.
TEST_F(Flood, OfAnswersThatNobodyTakesIsReadNoFurther) {
  MuteClient mute(socket_);
  mute.SayHello();
  for (int i = 0; i < kCalls; ++i) {
    mute.Call(0, kNodeInterface, kHello);
    mute.Finish();
  }
  ExpectUnread(mute);
}

TEST_F(Flood, OfCallsThatAreNotFinishedIsReadNoFurther) {
  MuteClient mute(socket_);
  mute.SayHello();
  for (int i = 0; i < kCalls; ++i) mute.Call(0, kNodeInterface, kHello);
  ExpectUnread(mute);
}

TEST_F(Flood, OfCallsIntoTheLoopDoesNotEndTheDaemon) {
  MuteClient mute(socket_);
  mute.SayHello();
  mute.Call(0, kNodeInterface, kAdmin);  // Answer of question 2.
  for (int i = 0; i < kCallsIntoLoop; ++i) {
    mute.Call(2, kAdminInterface, kStatus);
    mute.Finish();
  }
  EXPECT_TRUE(Eventually([&] {
    mute.Discard();
    return !mute.Pump() || !mute.has_more();
  }));
  ExpectThatOthersAreServed();
}

TEST_F(Flood, OfRequestsForADescriptorCostsNoDescriptors) {
  ASSERT_OK_AND_ASSIGN(auto raw, RawSession::Connect(socket_));
  ASSERT_OK(raw->Hello());
  ASSERT_OK(raw->Attach({}, testing::MakeLayoutSpec({.world_size = 1})));
  raw->KeepDescriptors();
  const auto take_all = [&] {
    for (const auto kind : {schema::Session::Kind::RING, schema::Session::Kind::WEIGHTS}) {
      EXPECT_OK(raw->Descriptor(kind));
    }
  };
  take_all();
  const int before = Quiescent([&] { return daemon_->OpenFds(); });
  for (int i = 0; i < 100; ++i) take_all();
  // The relay closes its copy after the client has got its own.
  EXPECT_TRUE(Eventually([&] { return daemon_->OpenFds() <= before; }));
}

// Lowers the daemon's descriptor limit to two spare descriptors, then three, and so on until an attach succeeds. Two are the
// least because the layout takes two on its way through the relay.
TEST_F(Flood, ThatLeavesTooFewDescriptorsIsRefusedUntilThereAreEnough) {
  if (testing::kAddressSanitized)
    GTEST_SKIP() << "the sanitizer's own checks of objects need a descriptor";
  ASSERT_OK_AND_ASSIGN(auto raw, RawSession::Connect(socket_));
  ASSERT_OK(raw->Hello());
  const auto limit_spare = [&](int spare) {
    rlimit limit{};
    ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_NOFILE, nullptr, &limit), 0);
    limit.rlim_cur = static_cast<rlim_t>(Quiescent([&] { return daemon_->OpenFds(); }) + spare);
    ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_NOFILE, &limit, nullptr), 0);
  };
  int refused = 0;
  for (int spare = 2; spare <= kSpareMost; ++spare) {
    SCOPED_TRACE(spare);
    limit_spare(spare);
    const std::string job = absl::StrCat("job", spare);
    const absl::Status status =
        raw->Attach({.job = job}, testing::MakeLayoutSpec({.world_size = 1}));
    if (status.ok()) break;
    EXPECT_THAT(status, HasError(protocol::ErrorId::kLimit));
    EXPECT_THAT(protocol::HintOf(status), HasSubstr("LimitNOFILE"));
    ++refused;
  }
  // The number of refusals depends on whether the relay has already closed its copy of the layout.
  EXPECT_GT(refused, 2);
  EXPECT_LT(refused, kSpareMost);
  limit_spare(kSpareMost);
  ExpectThatOthersAreServed();
}

}  // namespace
}  // namespace forebay::daemon
