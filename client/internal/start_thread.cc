// SPDX-License-Identifier: Apache-2.0
#include "client/internal/start_thread.h"

#include <signal.h>

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::client::internal {
namespace {

class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> run) {
  const AllSignalsBlocked blocked;  // inherited by the thread
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    return protocol::MakeError(protocol::ErrorId::kLimit,
                               absl::StrCat("cannot start the ", what, ": ", error.what()),
                               "raise the limit of processes (ulimit -u)");
  }
}

}  // namespace forebay::client::internal
