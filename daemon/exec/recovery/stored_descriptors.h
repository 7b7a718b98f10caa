// SPDX-License-Identifier: Apache-2.0
// Descriptors by which jobs outlive their daemon, and the names of these descriptors. The keeper of the descriptors (fd_store.h)
// does not know their contents.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/exec/arena_registry.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

using DescriptorsByName = std::map<std::string, protocol::UniqueFd>;

// Function of the keeper: returns when the service manager has every descriptor that was stored.
using FlushStore = absl::AnyInvocable<absl::Status()>;

// Functions of the keeper that store and drop one descriptor while the daemon runs, so that another daemon finds it if this
// daemon is killed. Both run on the loop thread.
struct DescriptorStore {
  absl::AnyInvocable<absl::Status(const std::string& name, int fd)> keep;
  absl::AnyInvocable<void(const std::string& name)> drop;
};

// Returns the bytes of a descriptor's file. Errors: E_INTERNAL.
absl::StatusOr<uint64_t> SizeOf(const protocol::UniqueFd& fd);

std::string WeightsDescriptor(JobId job);
std::string StatesDescriptor(JobId job);
std::string StepDescriptor(JobId job);
std::string GradientsDescriptor(JobId job, uint32_t rank);
std::string ProcessDescriptor(JobId job, uint32_t rank, bool has_detached);
// Name of a staging arena with slots of this size. The arena with the largest number is the newest.
std::string StagingDescriptor(uint64_t slot_bytes, uint64_t number);
// Name of a record. Each record of a job has another number; the newest intact record counts.
std::string RecordDescriptor(JobId job, uint64_t number);

// The descriptors that the store has for the next daemon.
//
// States      A name is listed if the store has a descriptor under the name, from this daemon or the previous one.
// Invariants  1. A listed name of an arena is listed with the arena whose descriptor the store has, while the arena lives.
//             2. Without a store no name is listed. Put() then does nothing.
class StoredDescriptors {
 public:
  explicit StoredDescriptors(DescriptorStore store) : store_(std::move(store)) {}

  bool is_available() const { return store_.keep != nullptr; }
  std::set<std::string> names() const;
  // Lists a name under which the store has a descriptor of the previous daemon.
  void List(const std::string& name, const ArenaRegistry::Arena& arena = nullptr);

  // Puts a descriptor into the store. Does nothing if `arena` is null, or if the store has this arena under this name.
  absl::Status Put(const std::string& name, int fd);
  absl::Status Put(const std::string& name, const ArenaRegistry::Arena& arena);
  // Drops the name if it is listed; with `arena` only if the descriptor is that of `arena`.
  void Drop(const std::string& name);
  void Drop(const std::string& name, const ArenaRegistry::Arena& arena);

 private:
  DescriptorStore store_;
  std::map<std::string, std::weak_ptr<pinned_mem::PinnedArena>> listed_;
};

}  // namespace forebay::daemon
