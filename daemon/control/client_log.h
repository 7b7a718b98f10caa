// SPDX-License-Identifier: Apache-2.0
// Log of clients' errors, limited so that one user cannot fill the log.
#pragma once

#include <kj/async.h>
#include <kj/timer.h>

#include <cstdint>
#include <map>
#include <string>

namespace forebay::daemon {

// Logs a user's first warning at once. Further warnings of the user within a minute are only counted; one line then logs their
// number.
//
// Threads  The control thread.
class ClientLog final : private kj::TaskSet::ErrorHandler {
 public:
  explicit ClientLog(kj::Timer& timer) : timer_(timer), reports_(*this) {}

  void Warn(uint32_t uid, const std::string& text);

 private:
  kj::Promise<void> ReportLater(uint32_t uid);
  void taskFailed(kj::Exception&&) override {}

  kj::Timer& timer_;
  // Number of unlogged warnings since the last line, by uid.
  std::map<uint32_t, uint64_t> suppressed_;
  kj::TaskSet reports_;
};

}  // namespace forebay::daemon
