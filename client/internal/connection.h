// SPDX-License-Identifier: Apache-2.0
// A session's connection to a daemon: made at attach, and again where the daemon was restarted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/internal/command_port.h"
#include "client/internal/control.h"
#include "client/internal/deadline.h"
#include "client/internal/mapping.h"
#include "protocol/os/unique_fd.h"

namespace forebay::client::internal {

// What the channel of an attached session uses, and the calls of the control plane. Members die in
// reverse order.
struct Connection {
  std::unique_ptr<Control> control;
  protocol::UniqueFd command_doorbell;
  protocol::UniqueFd completion_doorbell;
  std::shared_ptr<Mapping> ring;
};

// Of a file: two descriptors of one memfd have the same. Of an arena of a daemon on another node: of that one, not of what
// stands for it here; device 0.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;

  bool operator==(const FileIdentity&) const = default;
};

// Where a session stands in its job, and what its arenas are. A restart of the daemon changes none of it.
struct SessionTerms {
  uint64_t committed_step = 0;
  uint64_t weights_bytes = 0;
  uint64_t grad_arena_bytes = 0;
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t trace_bytes = 0;
  bool weights_on_swap = false;
  uint32_t leases = 0;  // that it goes on with
  FileIdentity weights = {};
  FileIdentity grad_arena = {};
};

// What differs, for people; empty: nothing.
std::string Difference(const SessionTerms& before, const SessionTerms& after);

// A session as a daemon has granted it, before its arenas are mapped and Control::Mapped is called.
struct GrantedSession {
  SessionTerms terms;
  // These four are empty in tests that play the daemon themselves.
  AttachReply reply = {};
  protocol::UniqueFd weights = {};
  protocol::UniqueFd grad_arena = {};
  std::unique_ptr<Connection> connection = {};
  CommandPort::Options port = {};
};

// `remote_arenas`: of a rank that comes back, where the daemon is on another node.
//
// Errors  As Control::Connect and the daemon's of an attach.
absl::StatusOr<GrantedSession> ConnectAndAttach(const std::string& socket, const AttachCall& call,
                                                const WaitLimits& limits,
                                                const RemoteArenas* remote_arenas = nullptr);

// Asks for the session once more, of whichever daemon has the socket. Errors as ConnectAndAttach.
using AttachAgain =
    std::function<absl::StatusOr<GrantedSession>(const SessionBefore&, const WaitLimits&)>;

}  // namespace forebay::client::internal
