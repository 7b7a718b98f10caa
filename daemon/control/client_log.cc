// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/client_log.h"

#include <utility>

#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

constexpr int kPeriodSeconds = 60;

}  // namespace

void ClientLog::Warn(uint32_t uid, const std::string& text) {
  const auto [entry, first] = suppressed_.try_emplace(uid, 0);
  if (!first) {
    ++entry->second;
    return;
  }
  spdlog::warn("uid {}: {}", uid, text);
  reports_.add(ReportLater(uid));
}

kj::Promise<void> ClientLog::ReportLater(uint32_t uid) {
  return timer_.afterDelay(kPeriodSeconds * kj::SECONDS).then([this, uid]() -> kj::Promise<void> {
    const auto entry = suppressed_.find(uid);
    const uint64_t count = std::exchange(entry->second, 0);
    if (count == 0) {
      suppressed_.erase(entry);
      return kj::READY_NOW;
    }
    spdlog::warn("uid {}: more warnings of its clients in the last {} s: {}", uid, kPeriodSeconds,
                 count);
    return ReportLater(uid);
  });
}

}  // namespace forebay::daemon
