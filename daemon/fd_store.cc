#include "daemon/fd_store.h"

#include <systemd/sd-daemon.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <span>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;

// What $FDSTORE says. systemd sets it since version 254, to FileDescriptorStoreMax=; the unit sets it
// to the same for older ones. Where nobody says so, the answer is no: a service manager that keeps none
// does not refuse the descriptors, it closes them, and the memory of the jobs would be gone without a word.
uint64_t FdsMax(const FdStoreEnvironment& environment) {
  if (environment.notify_socket == nullptr || *environment.notify_socket == '\0') return 0;
  uint32_t fds_max = 0;
  if (environment.fdstore == nullptr || !absl::SimpleAtoi(environment.fdstore, &fds_max)) return 0;
  return fds_max;
}

bool IsName(std::string_view name) {
  return !name.empty() && name.size() <= FdStore::kNameBytesMax &&
         std::ranges::all_of(name, [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-';
         });
}

absl::Status NoStore() {
  return MakeError(
      ErrorId::kUnsupported, "the service manager keeps no descriptors of this service",
      "set FileDescriptorStoreMax= and Environment=FDSTORE= in the unit, to one number");
}

// Of a function of sd-daemon.h: 0 where $NOTIFY_SOCKET is not set, below 0 a negative errno.
absl::Status Sent(int result, const std::string& what) {
  if (result > 0) return absl::OkStatus();
  if (result == 0) return NoStore();
  const std::string text = ErrnoText(absl::StrCat("service manager: ", what), -result);
  return MakeError(result == -ETIMEDOUT ? ErrorId::kTimeout : ErrorId::kInternal, text);
}

absl::Status Remove(const std::string& name) {
  const std::string message =
      absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", std::string(FdStore::kPrefix), name);
  return Sent(::sd_notify(/*unset_environment=*/0, message.c_str()),
              absl::StrCat("FDSTOREREMOVE of ", name));
}

}  // namespace

FdStore FdStore::Take(const FdStoreEnvironment& environment) {
  FdStore store;
  store.fds_max_ = FdsMax(environment);
  char** names = nullptr;
  const int count = ::sd_listen_fds_with_names(/*unset_environment=*/1, &names);
  if (count < 0) {
    spdlog::warn("{}", ErrnoText("descriptors of the service manager", -count));
    return store;
  }
  for (int i = 0; i < count; ++i) {
    const std::string_view name = names[i];
    if (!name.starts_with(kPrefix)) continue;
    // Keep() leaves one of each name; a second one is closed here.
    store.taken_.emplace(name.substr(kPrefix.size()), SD_LISTEN_FDS_START + i);
  }
  for (int i = 0; i < count; ++i) std::free(names[i]);
  std::free(names);
  store.to_forget_ = store.names();
  return store;
}

std::vector<std::string> FdStore::names() const {
  std::vector<std::string> names;
  for (const auto& [name, fd] : taken_) names.push_back(name);
  return names;
}

protocol::UniqueFd FdStore::Release(std::string_view name) {
  const auto at = taken_.find(name);
  if (at == taken_.end()) return protocol::UniqueFd();
  protocol::UniqueFd fd = std::move(at->second);
  taken_.erase(at);
  return fd;
}

absl::Status FdStore::Forget(std::chrono::microseconds timeout, const std::set<std::string>& kept) {
  std::erase_if(to_forget_, [&](const std::string& name) {
    if (!kept.contains(name)) return false;
    kept_.insert(name);
    return true;
  });
  if (to_forget_.empty()) return absl::OkStatus();
  for (const std::string& name : to_forget_) RETURN_IF_ERROR(Remove(name));
  RETURN_IF_ERROR(Flush(timeout));
  to_forget_.clear();
  return absl::OkStatus();
}

absl::Status FdStore::Keep(std::string_view wanted_name, int fd) {
  const std::string name(wanted_name);
  if (!is_available()) return NoStore();
  if (!IsName(name)) {
    return MakeError(ErrorId::kInternal, absl::StrCat("\"", name, "\" is no name of a descriptor"));
  }
  if (!kept_.contains(name) && kept_.size() >= fds_max_) {
    return MakeError(ErrorId::kLimit,
                     absl::StrCat("the service manager keeps ", fds_max_,
                                  " descriptors of this service; ", name, " is one more"),
                     "raise FileDescriptorStoreMax= and FDSTORE in the unit");
  }
  RETURN_IF_ERROR(Remove(name));
  const std::string message =
      absl::StrCat("FDSTORE=1\nFDNAME=", std::string(FdStore::kPrefix), name, "\nFDPOLL=0");
  RETURN_IF_ERROR(Sent(::sd_pid_notify_with_fds(/*pid=*/0, /*unset_environment=*/0, message.c_str(),
                                                &fd, /*n_fds=*/1),
                       absl::StrCat("FDSTORE of ", name)));
  kept_.emplace(name);
  return absl::OkStatus();
}

absl::Status FdStore::Drop(std::string_view name) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return absl::OkStatus();
  const std::string dropped = *found;
  kept_.erase(found);
  return Remove(dropped);
}

absl::Status FdStore::Flush(std::chrono::microseconds timeout) {
  return Sent(::sd_notify_barrier(/*unset_environment=*/0, static_cast<uint64_t>(timeout.count())),
              absl::StrCat("no answer within ", timeout.count() / 1000, " ms"));
}

}  // namespace forebay::daemon
