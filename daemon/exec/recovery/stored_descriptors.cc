// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/stored_descriptors.h"

#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {

absl::StatusOr<uint64_t> SizeOf(const protocol::UniqueFd& fd) {
  struct stat info = {};
  if (::fstat(fd.get(), &info) == 0) return static_cast<uint64_t>(info.st_size);
  return protocol::MakeError(protocol::ErrorId::kInternal,
                             protocol::ErrnoText("fstat of a stored descriptor", errno));
}

std::string WeightsDescriptor(JobId job) { return absl::StrCat("weights.", job); }
std::string StatesDescriptor(JobId job) { return absl::StrCat("states.", job); }
std::string StepDescriptor(JobId job) { return absl::StrCat("step.", job); }
std::string GradientsDescriptor(JobId job, uint32_t rank) {
  return absl::StrCat("gradients.", job, ".", rank);
}
std::string ProcessDescriptor(JobId job, uint32_t rank, bool has_detached) {
  return absl::StrCat(has_detached ? "detached." : "process.", job, ".", rank);
}
std::string StagingDescriptor(uint64_t slot_bytes, uint64_t number) {
  return absl::StrCat("staging.", slot_bytes, ".", number);
}
std::string RecordDescriptor(JobId job, uint64_t number) {
  return absl::StrCat("record.", job, ".", number);
}

std::set<std::string> StoredDescriptors::names() const {
  std::set<std::string> names;
  for (const auto& [name, arena] : listed_) names.insert(name);
  return names;
}

void StoredDescriptors::List(const std::string& name, const ArenaRegistry::Arena& arena) {
  if (is_available()) listed_[name] = arena;
}

absl::Status StoredDescriptors::Put(const std::string& name, int fd) {
  if (!is_available()) return absl::OkStatus();
  RETURN_IF_ERROR(store_.keep(name, fd));
  listed_[name] = {};
  return absl::OkStatus();
}

absl::Status StoredDescriptors::Put(const std::string& name, const ArenaRegistry::Arena& arena) {
  if (arena == nullptr || !is_available()) return absl::OkStatus();
  const auto listed = listed_.find(name);
  if (listed != listed_.end() && listed->second.lock() == arena) return absl::OkStatus();
  ASSIGN_OR_RETURN(const protocol::UniqueFd fd, arena->DuplicateFd());
  RETURN_IF_ERROR(Put(name, fd.get()));
  listed_[name] = arena;
  return absl::OkStatus();
}

void StoredDescriptors::Drop(const std::string& name) {
  if (listed_.erase(name) > 0) store_.drop(name);
}

void StoredDescriptors::Drop(const std::string& name, const ArenaRegistry::Arena& arena) {
  const auto listed = listed_.find(name);
  if (listed != listed_.end() && listed->second.lock() == arena) Drop(name);
}

}  // namespace forebay::daemon
