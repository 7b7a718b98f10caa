// SPDX-License-Identifier: Apache-2.0
// Goal    A peer that connects to a gateway and is no agent of the gateway's release gets the reason as an error. The peer
//         never takes more of the gateway's memory than one request may have. The gateway continues to serve.
// Method  A real gateway and daemon; their peer is this test, with TLS and the control plane's own messages.

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <kj/compat/tls.h>
#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/gateway/tls_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/descriptor.h"
#include "protocol/error.h"
#include "protocol/remote.capnp.h"
#include "protocol/remote_wire.h"
#include "protocol/rpc_stream.h"
#include "protocol/wire.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"

namespace forebay::gateway {
namespace {

using protocol::ErrorId;
using testing::DaemonProcess;
using testing::HasError;
using ::testing::HasSubstr;
using testing::RunningProgram;
using testing::TempDir;

constexpr char kToken[] = "0123456789abcdef0123";

struct Greeting {
  uint32_t protocol_version = protocol::kProtocolVersion;
  uint32_t remote_version = protocol::kRemoteVersion;
  std::string token = kToken;
};

// An agent's connection to the gateway.
class Peer {
 public:
  Peer(kj::TlsContext& tls, uint32_t port)
      : io_(kj::setupAsyncIo()),
        stream_(Connect(tls, port)),
        network_(*stream_, capnp::rpc::twoparty::Side::CLIENT, protocol::AnswerLimits()),
        rpc_(capnp::makeRpcClient(network_)),
        gateway_(protocol::BootstrapOf<schema::Gateway>(rpc_)) {}

  // Throws kj::Exception if the connection breaks.
  absl::Status Hello(const Greeting& greeting = {}) {
    auto request = gateway_.helloRequest();
    request.setProtocolVersion(greeting.protocol_version);
    request.setRemoteVersion(greeting.remote_version);
    request.setToken(greeting.token.c_str());
    auto response = request.send().wait(io_.waitScope);
    if (response.hasNode()) node_ = response.getNode();
    return protocol::StatusOf(response.getOutcome());
  }

  absl::Status AddLayout(size_t bytes) {
    auto request = KJ_ASSERT_NONNULL(node_).layoutRequest();
    request.initBytes(static_cast<unsigned>(bytes));
    return protocol::StatusOf(request.send().wait(io_.waitScope).getOutcome());
  }

 private:
  kj::Own<kj::AsyncIoStream> Connect(kj::TlsContext& tls, uint32_t port) {
    auto address = io_.provider->getNetwork().parseAddress("127.0.0.1", port).wait(io_.waitScope);
    return tls.wrapClient(address->connect().wait(io_.waitScope), "localhost").wait(io_.waitScope);
  }

  kj::AsyncIoContext io_;
  kj::Own<kj::AsyncIoStream> stream_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
  schema::Gateway::Client gateway_;
  kj::Maybe<schema::RemoteNode::Client> node_;
};

class GatewayProcess : public ::testing::Test {
 public:
  ~GatewayProcess() noexcept override {}  // kj::Own's may throw

 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(dir_.path() + "/s"));
    const std::string certificate = dir_.path() + "/ca.pem";
    const std::string key = dir_.path() + "/ca.key";
    const auto made = testing::RunProgram(
        {"/usr/bin/openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate});
    ASSERT_EQ(made.exit_code, 0) << made.errors;
    const std::string tokens = dir_.Write("tokens", absl::StrCat("trainer ", kToken, "\n"));
    dir_.Write("token", kToken);
    for (const std::string& secret : {key, tokens, dir_.path() + "/token"}) {
      ASSERT_EQ(::chmod(secret.c_str(), 0600), 0);
    }
    const std::string config = dir_.Write(
        "gateway.toml",
        absl::StrCat("bind = \"127.0.0.1:0\"\ntokens = \"", tokens, "\"\n[daemon]\nsocket = \"",
                     dir_.path(), "/s\"\n[tls]\ncertificate = \"", certificate, "\"\nkey = \"", key,
                     "\"\n[principal.trainer]\nuid = 12345\n"));
    gateway_ = RunningProgram::Start({FOREBAY_GATEWAY_PATH, "--config", config}, "ready");
    const std::string said = gateway_->errors();
    const size_t port = said.find("port=");
    ASSERT_NE(port, said.npos) << said;
    ASSERT_TRUE(absl::SimpleAtoi(said.substr(port + 5, said.find('\n', port) - port - 5), &port_));
    ASSERT_OK_AND_ASSIGN(const AgentCredentials credentials, LoadCredentials(dir_.path()));
    ASSERT_OK_AND_ASSIGN(tls_, MakeClientTls(credentials));
  }

  void TearDown() override {
    if (!HasFatalFailure()) {
      EXPECT_OK(Peer(*tls_, port_).Hello()) << "the gateway does not go on";
    }
  }

  const TempDir dir_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<RunningProgram> gateway_;
  kj::Own<kj::TlsContext> tls_;
  uint32_t port_ = 0;
};

TEST_F(GatewayProcess, NamesBothReleasesWhereTheyDiffer) {
  Peer peer(*tls_, port_);
  const auto numbers = [](uint32_t protocol_version, uint32_t remote_version) {
    return absl::StrCat("protocol ", protocol_version, " (remote ", remote_version, ")");
  };
  const uint32_t next_protocol = protocol::kProtocolVersion + 1;
  const uint32_t next_remote = protocol::kRemoteVersion + 1;
  for (const Greeting& other :
       {Greeting{.protocol_version = next_protocol}, Greeting{.remote_version = next_remote}}) {
    const absl::Status status = peer.Hello(other);
    EXPECT_THAT(status, HasError(ErrorId::kProtocol));
    EXPECT_THAT(status.message(),
                HasSubstr("agent speaks " + numbers(other.protocol_version, other.remote_version)));
    EXPECT_THAT(status.message(),
                HasSubstr("this gateway " + absl::StrCat(protocol::kProtocolVersion, " (remote ",
                                                         protocol::kRemoteVersion, ")")));
    EXPECT_THAT(protocol::HintOf(status), HasSubstr("one release"));
  }
  EXPECT_OK(peer.Hello());
}

TEST_F(GatewayProcess, TakesOneHelloOfAConnection) {
  Peer peer(*tls_, port_);
  ASSERT_OK(peer.Hello());
  const absl::Status status = peer.Hello();
  EXPECT_THAT(status, HasError(ErrorId::kProtocol));
  EXPECT_THAT(status.message(), HasSubstr("second hello"));
}

TEST_F(GatewayProcess, TakesNoTokenThatIsLargerThanARequest) {
  Peer peer(*tls_, port_);
  EXPECT_ANY_THROW((void)peer.Hello({.token = std::string(2 * protocol::kRequestBytesMax, 'a')}));
}

TEST_F(GatewayProcess, TakesNoPieceOfALayoutThatIsLargerThanOne) {
  Peer peer(*tls_, port_);
  ASSERT_OK(peer.Hello());
  EXPECT_OK(peer.AddLayout(1));
  bool was_refused = false;
  try {
    was_refused = !peer.AddLayout(protocol::kRequestBytesMax).ok();
  } catch (const kj::Exception&) {
    was_refused = true;
  }
  EXPECT_TRUE(was_refused);
}

TEST_F(GatewayProcess, SaysWhereNoDaemonAnswersBehindIt) {
  daemon_.reset();
  Peer peer(*tls_, port_);
  EXPECT_THAT(peer.Hello(), HasError(ErrorId::kNoDaemon));
  ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(dir_.path() + "/s"));
}

}  // namespace
}  // namespace forebay::gateway
