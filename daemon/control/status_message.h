// SPDX-License-Identifier: Apache-2.0
// Snapshots of the node as messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/control/control_plane.h"
#include "daemon/core/base/job_name.h"
#include "daemon/exec/node_snapshot.h"
#include "protocol/forebay.capnp.h"

namespace forebay::daemon {

void FillInfo(const std::string& identity, schema::NodeInfo::Builder info);

// Who asks. Jobs of others are shown to root, to the daemon's own user and to operators only.
struct Viewer {
  uint32_t uid = 0;
  OtherUsers others = OtherUsers::kRefused;

  bool MaySee(uint32_t owner) const { return owner == uid || others == OtherUsers::kAllowed; }
};

// Fills the status message of the node. Omits group names if the message would be too long (256 KiB).
void FillStatus(const NodeSnapshot& snapshot, const Viewer& viewer, const ServedAt& served_at,
                schema::NodeStatus::Builder status);

void FillTrace(const std::vector<ShownEvent>& events, capnp::List<schema::TraceEvent>::Builder out);

}  // namespace forebay::daemon
