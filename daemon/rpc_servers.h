// The capabilities a client holds: Node, Session, Admin. Everything here lives on the control
// thread; the loop is asked by LoopCall and answers through kj's cross-thread fulfillers.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/control_plane.h"
#include "daemon/reactor.h"
#include "daemon/session_io.h"
#include "protocol/forebay.capnp.h"

namespace forebay::daemon {

class SessionHandle;

// What all connections share.
struct ControlContext {
  LoopInbox& inbox;
  kj::TaskSet& tasks;
  std::string socket_path;
  SessionId next_session = 1;
  uint32_t sessions = 0;                          // whose end the loop has not confirmed
  std::map<JobId, uint64_t> rpc_calls = {};       // of sessions, by job
  std::map<uint32_t, uint32_t> connections = {};  // by uid
};

// One client's connection. Sessions end when it does.
struct Connection {
  ControlContext* context = nullptr;
  uint32_t uid = 0;
  int32_t pid = 0;
  bool greeted = false;  // hello was called with our version
  std::vector<std::weak_ptr<SessionHandle>> sessions;
  kj::Own<kj::PromiseFulfiller<void>> close;  // fulfil it to close the connection
};

// The control thread's end of a session, from attach on; its descriptors go when the loop says that
// the session is closed.
class SessionHandle {
 public:
  SessionHandle(ControlContext& context, SessionId id);
  SessionHandle(const SessionHandle&) = delete;
  SessionHandle& operator=(const SessionHandle&) = delete;
  ~SessionHandle();  // ends the session as lost, unless it has ended

  SessionId id() const { return id_; }
  void End(EndCause cause);         // once; later calls do nothing
  void Forget() { ended_ = true; }  // the loop was never told of it
  bool ended() const { return ended_; }

  ControlContext& context;
  JobId job = 0;
  SessionFds fds;

 private:
  SessionId id_;
  bool ended_ = false;
};

schema::Node::Client MakeNode(std::shared_ptr<Connection> connection);

}  // namespace forebay::daemon
