// Messages to the service manager; without one they do nothing.
#pragma once

#include <chrono>
#include <string>

namespace forebay::daemon {

void NotifyReady(const std::string& status);  // READY=1
void NotifyStopping();                        // STOPPING=1
void NotifyWatchdog();                        // WATCHDOG=1

// How long the service manager waits for NotifyWatchdog() before it ends this process; 0: it does not.
std::chrono::microseconds WatchdogLimit();

}  // namespace forebay::daemon
