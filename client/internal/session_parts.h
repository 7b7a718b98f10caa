// SPDX-License-Identifier: Apache-2.0
// A granted session: its terms, its mapped arenas and its counters.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/internal/command_port.h"
#include "client/internal/connection.h"
#include "client/internal/deadline.h"
#include "client/internal/mapping.h"
#include "gpu/device.h"
#include "protocol/layout.h"
#include "protocol/os/unique_fd.h"
#include "protocol/wire.h"

namespace forebay::client::internal {

// Numbers that any thread may read while a call waits.
struct SessionGauge {
  std::atomic<uint64_t> committed_step{0};
  std::atomic<uint64_t> rpc_calls{0};
  std::atomic<uint64_t> commands{0};
  std::atomic<uint64_t> sleeps{0};
  std::atomic<uint64_t> wait_ns_fetch{0};
  std::atomic<uint64_t> wait_ns_grad{0};
  std::atomic<uint64_t> wait_ns_step{0};
  std::atomic<uint64_t> wait_ns_other{0};
  std::atomic<uint64_t> fetched_bytes{0};
  std::atomic<uint64_t> copied_bytes{0};
  std::atomic<uint64_t> grad_bytes{0};
  std::atomic<uint64_t> private_slots{0};
  std::atomic<uint64_t> reattaches{0};

  Counters Snapshot() const;
};

// A session that the daemon has granted.
struct SessionParts {
  // Asks the daemon for a session and maps its arenas. Errors as Attachment::Attach.
  static absl::StatusOr<SessionParts> Create(AttachOptions options);

  absl::Status CheckArenas() const;  // E_PROTOCOL: the arenas do not fit the layout
  absl::Status CheckPartition(uint32_t partition) const;  // E_RANGE
  absl::Status CheckOwn(uint32_t partition) const;        // E_RANGE, E_RANK for another rank's
  absl::Status CheckHasRank() const;                      // E_RANK for a reader
  WaitLimits Limits(Timeout call_timeout) const;
  uint64_t committed_step() const { return gauge->committed_step; }
  uint64_t grad_width() const { return SizeBytes(layout->grad_dtype()); }
  // Elements of a whole piece of a partition's gradient, a multiple of kGradUnitElems.
  uint64_t piece_elems() const { return protocol::kGradPieceBytesMax / grad_width(); }
  std::string_view GroupName(uint32_t partition) const {
    return layout->spec().group_names[layout->partitions()[partition].group];
  }
  std::string_view ParamName(uint32_t param) const { return layout->spec().params[param].name; }
  // Writes into the arena that holds gradients.
  void CopyToArena(uint64_t arena_offset, std::span<const std::byte> bytes) const;

  std::string job = {};
  std::shared_ptr<const protocol::Layout> layout = {};
  bool reader = false;
  uint32_t rank = 0;
  bool writes_initial = false;
  Nodes nodes = {};
  // Fields of the daemon's AttachReply.
  uint64_t prepared_step = 0;
  uint64_t durable_step = 0;
  uint64_t durable_before = 0;
  uint64_t went_back_from = 0;  // see Attachment
  std::vector<std::byte> summary = {};
  std::vector<std::byte> extra_state = {};
  std::vector<std::byte> rank0_extra_state = {};
  std::vector<uint32_t> trace = {};
  uint64_t attempt = 0;
  // Empty in tests that play the daemon themselves.
  std::unique_ptr<Connection> connection = {};
  CommandPort::Options port = {};
  // Terms that the daemon granted. The daemon must grant them again after a restart.
  SessionTerms terms = {};
  // Empty for a reader: the session then ends if its daemon is restarted.
  AttachAgain attach_again = {};
  // The longest pause between two attempts to attach again.
  std::chrono::milliseconds attach_pause_max = kInterruptPeriod;
  // Time limit for a restarted daemon to grant the session again.
  Timeout daemon_wait{};
  std::shared_ptr<Mapping> weights = {};
  // The memory that `weights` maps, if this is a rank with shared attachment.
  protocol::UniqueFd weights_file = {};
  // True if some partitions' weights are on swap. The weights arena is then a cache.
  bool weights_on_swap = false;
  protocol::StepAnswer step_answered_when = protocol::StepAnswer::kPublished;
  // Writable until the device knows them.
  MapAccess weights_access = MapAccess::kRead;
  // Mapping of the arena that holds gradients, the step region, activations and the trace.
  std::shared_ptr<Mapping> grad = {};
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  // Sizes that the client requested. The arena may be larger.
  uint64_t grad_bytes_max = UINT64_MAX;
  uint64_t extra_state_bytes = 0;
  uint64_t activation_bytes = 0;
  uint64_t trace_bytes = 0;
  // Counters, with committed_step set.
  std::shared_ptr<SessionGauge> gauge = {};
  // Time limit of calls that take no timeout.
  Timeout timeout{};
  InterruptCheck interrupt_check;
  std::shared_ptr<gpu::Device> device;
};

}  // namespace forebay::client::internal
