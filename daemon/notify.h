// Words to the service manager; nothing happens where there is none.
#pragma once

#include <string>

namespace forebay::daemon {

void NotifyReady(const std::string& status);  // READY=1
void NotifyStopping();                        // STOPPING=1

}  // namespace forebay::daemon
