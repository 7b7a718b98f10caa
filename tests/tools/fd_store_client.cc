// SPDX-License-Identifier: Apache-2.0
// A service for descriptor_store_test. Prints NAME=CONTENT of each descriptor that it received, then executes its arguments in
// order. Exit status 1: an argument failed, and stdout says why.
//
// usage: fd_store_client [keep NAME CONTENT | flush | forget | ready]...

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/fd_store.h"
#include "daemon/notify.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"

namespace {

using forebay::daemon::FdStore;
using forebay::protocol::UniqueFd;

constexpr std::chrono::seconds kPatience(30);

std::string ContentOf(int fd) {
  std::array<char, 64> content{};
  const ssize_t size = ::pread(fd, content.data(), content.size(), 0);
  return std::string(content.data(), size < 0 ? 0 : static_cast<size_t>(size));
}

absl::Status Keep(FdStore& store, const std::string& name, const std::string& content) {
  const UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (::write(fd.get(), content.data(), content.size()) != static_cast<ssize_t>(content.size())) {
    return absl::InternalError("memfd");
  }
  return store.Keep(name, fd.get());
}

}  // namespace

int main(int argc, char** argv) {
  ::alarm(kPatience.count());
  const char* const notify_socket = std::getenv("NOTIFY_SOCKET");
  FdStore store = FdStore::Take({.notify_socket = notify_socket,
                                 .fdstore = std::getenv("FDSTORE"),
                                 .listen_pid = std::getenv("LISTEN_PID"),
                                 .listen_fds = std::getenv("LISTEN_FDS"),
                                 .listen_fdnames = std::getenv("LISTEN_FDNAMES")});
  for (const std::string& name : store.names()) {
    const UniqueFd fd = store.Release(name);
    std::printf("%s=%s\n", name.c_str(), ContentOf(fd.get()).c_str());
  }
  absl::Status status;
  for (int i = 1; i < argc && status.ok(); ++i) {
    const std::string_view what = argv[i];
    if (what == "flush") status = store.Flush(kPatience);
    if (what == "forget") status = store.Forget(kPatience);
    if (what == "ready") forebay::daemon::Notifier(notify_socket).Ready("ready");
    if (what == "keep") {
      status = Keep(store, argv[i + 1], argv[i + 2]);
      i += 2;
    }
  }
  if (!status.ok()) std::printf("%s\n", forebay::protocol::FormatError(status).c_str());
  return status.ok() ? 0 : 1;
}
