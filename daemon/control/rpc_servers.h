// SPDX-License-Identifier: Apache-2.0
// Capabilities that a client holds: Node, Session, Admin. They live on the control thread. They send a LoopCall to the loop
// thread, which answers with a ControlCall.
#pragma once

#include <kj/async.h>
#include <kj/memory.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/control/control_plane.h"
#include "daemon/control/status_message.h"
#include "daemon/exec/node_snapshot.h"
#include "daemon/exec/reactor.h"
#include "daemon/exec/session_io.h"
#include "protocol/error.h"
#include "protocol/forebay.capnp.h"
#include "protocol/os/check.h"
#include "protocol/wire.h"

namespace forebay::daemon {

class SessionHandle;

// A promise on the control thread that an answer of the loop thread fulfils.
class Waiter {
 public:
  virtual ~Waiter() noexcept(false) = default;  // kj destructors may throw
};

template <typename Value>
class ValueWaiter final : public Waiter {
 public:
  explicit ValueWaiter(kj::Own<kj::PromiseFulfiller<kj::Own<Value>>> fulfiller)
      : fulfiller_(kj::mv(fulfiller)) {}
  void Fulfill(Value value) { fulfiller_->fulfill(kj::heap<Value>(std::move(value))); }

 private:
  kj::Own<kj::PromiseFulfiller<kj::Own<Value>>> fulfiller_;
};

// State that all connections share.
struct ControlContext {
  LoopInbox& inbox;
  ControlQueue& replies;
  kj::TaskSet& tasks;
  ServedAt served_at;
  kj::Own<kj::PromiseFulfiller<void>> stop;  // fulfil it to end the control thread
  protocol::Durability least_durability;     // ControlPlaneOptions::least_durability
  SessionId next_session = 1;
  uint64_t next_scrub = 1;
  uint64_t next_exchange = 1;
  uint32_t sessions = 0;  // sessions whose end the loop has not confirmed
  std::map<uint64_t, std::unique_ptr<Waiter>> waiters = {};
  uint64_t next_waiter = 1;

  // A promise, and the function that the loop thread calls once to fulfil it.
  template <typename Value>
  struct Reply {
    kj::Promise<kj::Own<Value>> promise;
    uint64_t waiter;  // key in `waiters` until the answer
    absl::AnyInvocable<void(Value)> answer;
  };

  // A value that crosses to the control thread shares no status with the loop's thread.
  static void Unshare(absl::Status& status) { status = protocol::Unshared(status); }
  static void Unshare(AttachResult& result) { Unshare(result.answer.status); }
  static void Unshare(NodeSnapshot& snapshot) {
    for (JobSnapshot& job : snapshot.jobs) {
      Unshare(job.view.failed);
      Unshare(job.view.swap_wait);
    }
  }
  template <typename Value>
  static void Unshare(absl::StatusOr<Value>& value) {
    if (!value.ok()) value = protocol::Unshared(value.status());
  }
  template <typename Value>
  static void Unshare(Value&) {}

  template <typename Value>
  Reply<Value> Expect() {
    auto paf = kj::newPromiseAndFulfiller<kj::Own<Value>>();
    const uint64_t waiter = next_waiter++;
    waiters.emplace(waiter, std::make_unique<ValueWaiter<Value>>(kj::mv(paf.fulfiller)));
    auto answer = [queue = &replies, waiter](Value value) {
      Unshare(value);
      ControlCall call = [waiter, value = std::move(value)](ControlContext& here) mutable {
        const auto node = here.waiters.extract(waiter);
        if (node.empty()) return;
        static_cast<ValueWaiter<Value>&>(*node.mapped()).Fulfill(std::move(value));
      };
      FOREBAY_CHECK(queue->Push(std::move(call)));
    };
    return {kj::mv(paf.promise), waiter, std::move(answer)};
  }
};

// Connection of one client. The client's sessions end with the connection.
struct Connection {
  ControlContext* context = nullptr;
  Viewer viewer;
  int32_t pid = 0;
  int pidfd = -1;  // pidfd of the client, while the connection exists; -1: not watched
  bool may_act_for_others = false;  // the peer is root, or the daemon's own user
  // Time for which sessions of ranks are retained after this connection is lost, for the ranks to attach again.
  std::chrono::milliseconds session_wait{0};
  bool handshake_done = false;  // hello was called with a version that is served
  uint32_t protocol_version = protocol::kProtocolVersion;  // version that the client speaks
  std::vector<std::weak_ptr<SessionHandle>> sessions;
  kj::Own<kj::PromiseFulfiller<void>> close;  // fulfil it to close the connection
};

// State of a session on the control thread, from attach on. Its descriptors are released when the loop thread reports that the
// session is closed.
class SessionHandle {
 public:
  SessionHandle(ControlContext& context, SessionId id);
  SessionHandle(const SessionHandle&) = delete;
  SessionHandle& operator=(const SessionHandle&) = delete;
  ~SessionHandle();  // ends the session as disconnected, unless it has ended

  SessionId id() const { return id_; }
  void End(EndCause cause);         // only the first call has an effect
  void Forget() { ended_ = true; }  // the loop thread does not have the session
  bool ended() const { return ended_; }

  ControlContext& context;
  // Returns the capability that carries a descriptor: one for each kind, so that a client that asks again costs no descriptor.
  // Returns nothing if the session has no such descriptor or is over, or if the descriptor could not be copied.
  kj::Maybe<schema::Descriptor::Client> Descriptor(schema::Session::Kind kind);
  void LetGo();  // Releases all descriptors.

  SessionFds fds;
  // calls of the job's sessions; set by the answer to attach
  std::shared_ptr<std::atomic<uint64_t>> rpc_calls;

 private:
  SessionId id_;
  bool ended_ = false;
  std::map<schema::Session::Kind, schema::Descriptor::Client> descriptors_;
};

schema::Node::Client MakeNode(std::shared_ptr<Connection> connection);

}  // namespace forebay::daemon
