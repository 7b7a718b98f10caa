// SPDX-License-Identifier: Apache-2.0
#include "daemon/fd_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;

// Returns the number in $FDSTORE, or 0. systemd sets the variable since version 254, to FileDescriptorStoreMax=; the unit sets
// it to the same number for older versions. Without the variable the answer is 0, because a service manager without a store
// does not refuse descriptors: it closes them, and the memory of the jobs would be lost without an error.
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

// A descriptor that was handed over at start.
struct Handed {
  std::string name;
  int fd = -1;
};

// Returns the descriptors from number 3 on, as many as LISTEN_FDS says, if LISTEN_PID is this process. A descriptor without a
// name is "unknown".
// Source  sd_listen_fds_with_names(3).
std::vector<Handed> HandedDescriptors(const FdStoreEnvironment& environment) {
  constexpr int kFirst = 3;
  int32_t pid = 0;
  int32_t count = 0;
  std::vector<Handed> handed;
  if (environment.listen_pid != nullptr && environment.listen_fds != nullptr &&
      absl::SimpleAtoi(environment.listen_pid, &pid) && pid == ::getpid() &&
      absl::SimpleAtoi(environment.listen_fds, &count) && count > 0 &&
      count <= std::numeric_limits<int>::max() - kFirst) {
    std::vector<std::string> names;
    if (environment.listen_fdnames != nullptr) {
      names = absl::StrSplit(environment.listen_fdnames, ':');
    }
    for (int fd = kFirst; fd < kFirst + count; ++fd) {
      const auto at = static_cast<size_t>(fd - kFirst);
      if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
        spdlog::warn("{}",
                     ErrnoText(absl::StrCat("descriptor ", fd, " of the service manager"), errno));
        return {};
      }
      handed.push_back({.name = at < names.size() ? names[at] : "unknown", .fd = fd});
    }
  }
  for (const char* name : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) ::unsetenv(name);
  return handed;
}

}  // namespace

FdStore FdStore::Take(const FdStoreEnvironment& environment) {
  FdStore store;
  store.notifier_ = Notifier(environment.notify_socket);
  store.fds_max_ = FdsMax(environment);
  for (const Handed& handed : HandedDescriptors(environment)) {
    const std::string_view name = handed.name;
    if (!name.starts_with(kPrefix)) continue;
    // The store has one descriptor of each name; a second one is closed here.
    store.taken_.emplace(name.substr(kPrefix.size()), handed.fd);
  }
  store.to_forget_ = store.names();
  return store;
}

absl::Status FdStore::Send(const std::string& what, const std::string& message, int fd) const {
  if (!notifier_.HasListener()) return NoStore();
  const int error = notifier_.Send(message, fd);
  if (error == 0) return absl::OkStatus();
  return MakeError(ErrorId::kInternal, ErrnoText(absl::StrCat("service manager: ", what), error));
}

absl::Status FdStore::Remove(const std::string& name) const {
  return Send(absl::StrCat("FDSTOREREMOVE of ", name),
              absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", std::string(kPrefix), name));
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
  RETURN_IF_ERROR(Send(absl::StrCat("FDSTORE of ", name), message, fd));
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
  if (!notifier_.HasListener()) return NoStore();
  const int error = notifier_.Barrier(timeout);
  if (error == 0) return absl::OkStatus();
  return MakeError(
      error == ETIMEDOUT ? ErrorId::kTimeout : ErrorId::kInternal,
      ErrnoText(absl::StrCat("service manager: no answer within ", timeout.count() / 1000, " ms"),
                error));
}

}  // namespace forebay::daemon
