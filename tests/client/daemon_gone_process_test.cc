// SPDX-License-Identifier: Apache-2.0
// Goal    After the daemon's death every call of every client returns E_DAEMON_GONE with a hint, and a new connection returns
//         E_NO_DAEMON. Clients can attach to a daemon that is started on the same socket, and train.
// Method  A real forebayd is killed with SIGKILL. Each call has a separate session, in which the call is the first after the
//         death. The calls of the Python package are tested in python/test_daemon_gone.py.

#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "client/forebay.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/refused_call.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using testing::DaemonProcess;
using testing::ExpectRefusal;

constexpr Timeout kTimeout = std::chrono::seconds(60);
constexpr int64_t kTimeoutMs = 60'000;

class DaemonGone : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_)); }

  void TearDown() override {
    EXPECT_THAT(AdminClient::Connect({.socket = socket_}), testing::HasError(ErrorId::kNoDaemon));
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_));
    EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_}));
  }

  testing::TempDir dir_;
  std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<DaemonProcess> daemon_;
};

// A call, and what the session had to do before the death.
struct Call {
  std::string name;
  std::function<absl::Status(Attachment&, const Lease&)> call;
  bool ready = true;  // the job has its parameters, the session a lease and a slot of group 0
};

TEST_F(DaemonGone, IsWhatEachCallOfASessionSays) {
  std::vector<std::byte> bytes(64);
  const auto values = [](Attachment& session) {
    return testing::MakeValues(session.layout(), 0, 1);
  };
  const auto slot = [](Attachment& session, uint32_t group) {
    return session.GradSlot(group, GradFill::kZero, kTimeout).status();
  };
  const std::vector<Call> calls = {
      {"WriteInitial",
       [&](Attachment& s, const Lease&) { return s.WriteInitial(0, values(s), kTimeout); }, false},
      {"InitialDone", [&](Attachment& s, const Lease&) { return s.InitialDone(kTimeout); }, false},
      {"Fetch", [&](Attachment& s, const Lease&) { return s.Fetch(1, kTimeout).status(); }},
      {"Release", [&](Attachment& s, const Lease& lease) { return s.Release(lease); }},
      {"GradSlot", [&](Attachment& s, const Lease&) { return slot(s, 1); }},
      {"GradSlotThatIsOpen", [&](Attachment& s, const Lease&) { return slot(s, 0); }},
      {"GradReady", [&](Attachment& s, const Lease&) { return s.GradReady(0); }},
      {"AddGradient",
       [&](Attachment& s, const Lease&) {
         const std::vector<float> gradient(s.layout().params()[0].elems);
         return s.AddGradient(0, std::as_bytes(std::span(gradient)), kTimeout);
       }},
      {"FlushGradients", [&](Attachment& s, const Lease&) { return s.FlushGradients(); }},
      {"DropGradients", [&](Attachment& s, const Lease&) { return s.DropGradients(); }},
      {"Step",
       [&](Attachment& s, const Lease&) {
         return s.Step(1, testing::MakeHyperParams(), 0, {}, kTimeout).status();
       }},
      {"ReadState",
       [&](Attachment& s, const Lease&) {
         std::vector<float> read(8);
         return s.ReadState({.param = "layer0.bias", .state = "exp_avg"}, read, kTimeout).status();
       }},
      {"Detach", [&](Attachment& s, const Lease&) { return s.Detach(); }},
  };
  std::vector<std::unique_ptr<Attachment>> sessions;
  std::vector<Lease> leases(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_OK_AND_ASSIGN(sessions.emplace_back(),
                         Attachment::Attach({.socket = socket_,
                                             .job = calls[i].name,
                                             .layout = testing::MakeLayoutSpec({}),
                                             .timeout = kTimeout}));
    if (!calls[i].ready) continue;
    ASSERT_OK(testing::WriteInitial(*sessions[i], 1));
    ASSERT_OK_AND_ASSIGN(leases[i], sessions[i]->Fetch(0, kTimeout));
    ASSERT_OK(slot(*sessions[i], 0));
  }
  daemon_->Kill();
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(calls[i].name);
    ExpectRefusal(calls[i].call(*sessions[i], leases[i]), ErrorId::kDaemonGone, {"the daemon"});
  }
}

TEST_F(DaemonGone, IsWhatEachCallOfAnAdministratorSays) {
  const std::vector<std::function<absl::Status(AdminClient&)>> calls = {
      [](AdminClient& admin) { return admin.Status().status(); },
      [](AdminClient& admin) { return admin.Trace("job").status(); },
      [](AdminClient& admin) { return admin.DeleteJob("job"); }};
  std::vector<std::unique_ptr<AdminClient>> admins;
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_OK_AND_ASSIGN(admins.emplace_back(), AdminClient::Connect({.socket = socket_}));
  }
  daemon_->Kill();
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectRefusal(calls[i](*admins[i]), ErrorId::kDaemonGone, {});
  }
}

// ------------------------------------------------------------------------------------------- in C

class SessionInC {
 public:
  SessionInC(const std::string& socket, const std::string& job) {
    const uint64_t shape[] = {64};
    const forebay_param param = {
        .name = "w", .shape = shape, .dims = 1, .group = 0, .param_group = 0, .frozen = 0};
    const char* const groups[] = {"all"};
    forebay_options options{};
    options.struct_size = sizeof(options);
    options.socket = socket.c_str();
    options.job = job.c_str();
    options.world_size = 1;
    options.dtype = "float32";
    options.optimizer = "adamw";
    options.format = "fp32";
    options.params = &param;
    options.param_count = 1;
    options.group_names = groups;
    options.group_count = 1;
    options.timeout_ms = kTimeoutMs;
    EXPECT_EQ(forebay_attach(&options, &session_), FOREBAY_OK) << forebay_last_error_message();
  }
  SessionInC(const SessionInC&) = delete;
  SessionInC& operator=(const SessionInC&) = delete;
  ~SessionInC() { forebay_free(session_); }

  void MakeReady() {
    const float values[64] = {};
    EXPECT_EQ(forebay_write_initial(session_, 0, values, sizeof(values), kTimeoutMs), 0);
    EXPECT_EQ(forebay_initial_done(session_, kTimeoutMs), 0);
    EXPECT_EQ(forebay_fetch(session_, 0, kTimeoutMs, &lease_), 0);
    EXPECT_EQ(forebay_start_fetch(session_, 0, &ticket_), 0);
    EXPECT_EQ(Slot(), 0);
  }

  int32_t Slot() { return forebay_grad_slot(session_, 0, kTimeoutMs, &slot_, &slot_bytes_); }
  int32_t Step() {
    forebay_hyper hyper{};
    hyper.lr = 0.1;
    hyper.beta1 = 0.9;
    hyper.beta2 = 0.999;
    hyper.eps = 1e-8;
    forebay_step_args args{};
    args.struct_size = sizeof(args);
    args.step = 1;
    args.hyper = &hyper;
    args.hyper_count = 1;
    return forebay_step(session_, &args, kTimeoutMs, nullptr);
  }

  forebay_session* get() { return session_; }
  forebay_lease* lease() { return &lease_; }
  forebay_ticket* ticket() { return &ticket_; }

 private:
  forebay_session* session_ = nullptr;
  forebay_lease lease_{};
  forebay_ticket ticket_{};
  void* slot_ = nullptr;
  uint64_t slot_bytes_ = 0;
};

TEST_F(DaemonGone, IsWhatEachCallInCSays) {
  float bytes[64] = {};
  const struct {
    std::string name;
    std::function<int32_t(SessionInC&)> call;
    bool ready = true;
  } calls[] = {
      {"write_initial",
       [&](auto& c) { return forebay_write_initial(c.get(), 0, bytes, sizeof(bytes), kTimeoutMs); },
       false},
      {"initial_done", [](auto& c) { return forebay_initial_done(c.get(), kTimeoutMs); }, false},
      {"fetch", [](auto& c) { return forebay_fetch(c.get(), 0, kTimeoutMs, c.lease()); }},
      {"start_fetch", [](auto& c) { return forebay_start_fetch(c.get(), 0, c.ticket()); }},
      {"is_fetch_done",
       [](auto& c) {
         int32_t done = 0;
         return forebay_is_fetch_done(c.get(), c.ticket(), &done);
       }},
      {"release", [](auto& c) { return forebay_release(c.get(), c.lease()); }},
      {"add_gradient",
       [&](auto& c) { return forebay_add_gradient(c.get(), 0, bytes, sizeof(bytes), kTimeoutMs); }},
      {"flush_gradients",
       [](auto& c) { return forebay_flush_gradients(c.get(), FOREBAY_ALL_GROUPS); }},
      {"grad_slot", [](auto& c) { return c.Slot(); }},
      {"grad_ready", [](auto& c) { return forebay_grad_ready(c.get(), 0); }},
      {"drop_gradients", [](auto& c) { return forebay_drop_gradients(c.get()); }},
      {"step", [](auto& c) { return c.Step(); }},
      {"read_state",
       [&](auto& c) {
         forebay_state_args args{};
         args.struct_size = sizeof(args);
         args.param = "w";
         args.state = "exp_avg";
         args.elems = 1;
         float value = 0;
         return forebay_read_state(c.get(), &args, &value, kTimeoutMs, nullptr);
       }},
      {"detach", [](auto& c) { return forebay_detach(c.get()); }},
  };
  std::vector<std::unique_ptr<SessionInC>> sessions;
  for (const auto& one : calls) {
    sessions.push_back(std::make_unique<SessionInC>(socket_, one.name));
    if (one.ready) sessions.back()->MakeReady();
  }
  daemon_->Kill();
  for (size_t i = 0; i < sessions.size(); ++i) {
    SCOPED_TRACE(calls[i].name);
    const int32_t code = calls[i].call(*sessions[i]);
    EXPECT_STREQ(forebay_error_name(code), "E_DAEMON_GONE");
    EXPECT_EQ(forebay_last_error_id(), code);
    EXPECT_EQ(forebay_last_error_retryable(), 1);
    EXPECT_NE(std::string(forebay_last_error_hint()), "");
  }
}

}  // namespace
}  // namespace forebay::client
