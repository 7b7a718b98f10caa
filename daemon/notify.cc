#include "daemon/notify.h"

#include <systemd/sd-daemon.h>

#include <cstdint>

namespace forebay::daemon {

void NotifyReady(const std::string& status) {
  (void)::sd_notify(/*unset_environment=*/0, ("READY=1\nSTATUS=" + status).c_str());
}

void NotifyStopping() { (void)::sd_notify(/*unset_environment=*/0, "STOPPING=1"); }

void NotifyWatchdog() { (void)::sd_notify(/*unset_environment=*/0, "WATCHDOG=1"); }

std::chrono::microseconds WatchdogLimit() {
  uint64_t limit_us = 0;
  const int enabled = ::sd_watchdog_enabled(/*unset_environment=*/0, &limit_us);
  return std::chrono::microseconds(enabled > 0 ? limit_us : 0);
}

}  // namespace forebay::daemon
