#include "daemon/notify.h"

#include <systemd/sd-daemon.h>

namespace forebay::daemon {

void NotifyReady(const std::string& status) {
  (void)::sd_notify(/*unset_environment=*/0, ("READY=1\nSTATUS=" + status).c_str());
}

void NotifyStopping() { (void)::sd_notify(/*unset_environment=*/0, "STOPPING=1"); }

}  // namespace forebay::daemon
