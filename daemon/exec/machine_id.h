// SPDX-License-Identifier: Apache-2.0
// Identity of this machine, for volumes that may be carried to another machine.
#pragma once

#include <string_view>

#include "daemon/exec/volume_place.h"

namespace forebay::daemon {

// Returns the id of the machine whose machine-id has these 32 hexadecimal digits. Returns all zeros for other digits.
// ThisMachine() calls MachineOf() with the contents of /etc/machine-id.
//
// Source  machine-id(5), sd_id128_get_machine_app_specific(3), which returns the same id.
MachineId MachineOf(std::string_view digits);

}  // namespace forebay::daemon
