// SPDX-License-Identifier: Apache-2.0
// The log of what clients do wrong: one user cannot fill it.
#pragma once

#include <kj/async.h>
#include <kj/timer.h>

#include <cstdint>
#include <map>
#include <string>

namespace forebay::daemon {

// A user's first warning is logged at once. Within a minute after it the others are counted only, and
// then one line says how many they were.
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
  std::map<uint32_t, uint64_t> suppressed_;  // by uid, since its last line
  kj::TaskSet reports_;
};

}  // namespace forebay::daemon
