// SPDX-License-Identifier: Apache-2.0
// A session's connection to a daemon: created at attach, and again if the daemon was restarted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/internal/attach_request.h"
#include "client/internal/command_port.h"
#include "client/internal/control.h"
#include "client/internal/deadline.h"
#include "client/internal/mapping.h"
#include "protocol/os/unique_fd.h"

namespace forebay::client::internal {

// The control plane of an attached session, and the doorbells and ring of its channel. Members are destroyed in reverse order.
struct Connection {
  std::unique_ptr<Control> control;
  protocol::UniqueFd command_doorbell;
  protocol::UniqueFd completion_doorbell;
  std::shared_ptr<Mapping> ring;
};

// Identity of a memory file: equal for two descriptors of one memfd. For an arena of a daemon on another node: device 0 and the
// inode of that daemon's arena, not of the local arena in its place.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;

  bool operator==(const FileIdentity&) const = default;
};

// Committed step of a session, and sizes and identities of its arenas. After a restart of the daemon the session continues only
// if they are the same; a step in flight may have been committed meanwhile.
struct SessionTerms {
  uint64_t committed_step = 0;
  uint64_t weights_bytes = 0;
  uint64_t grad_arena_bytes = 0;
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t trace_bytes = 0;
  bool weights_on_swap = false;
  uint32_t leases = 0;  // number of leases that the daemon retained
  FileIdentity weights = {};
  FileIdentity grad_arena = {};
};

// Describes the first difference between two terms. Empty if the terms are equal.
std::string Difference(const SessionTerms& before, const SessionTerms& after);

// A session as a daemon has granted it, before its arenas are mapped and Control::Mapped is called.
struct GrantedSession {
  SessionTerms terms;
  // `reply`, `weights`, `grad_arena` and `connection` are empty in tests that play the daemon themselves.
  AttachReply reply = {};
  protocol::UniqueFd weights = {};
  protocol::UniqueFd grad_arena = {};
  std::unique_ptr<Connection> connection = {};
  CommandPort::Options port = {};
};

// Connects to the daemon and attaches. `encoded`: the encoded layout. `remote_arenas`: the local arenas of a rank that attaches
// again to a daemon on another node, else null.
//
// Errors  As Control::Connect and the daemon's of an attach.
absl::StatusOr<GrantedSession> ConnectAndAttach(const std::string& socket,
                                                const AttachRequest& request,
                                                std::span<const std::byte> encoded,
                                                const WaitLimits& limits,
                                                const RemoteArenas* remote_arenas = nullptr);

// Attaches again with the daemon that has the socket now. Errors as ConnectAndAttach.
using AttachAgain =
    std::function<absl::StatusOr<GrantedSession>(const SessionBefore&, const WaitLimits&)>;

}  // namespace forebay::client::internal
