// SPDX-License-Identifier: Apache-2.0
// Which machine this is, for volumes that may be carried to another one.
#pragma once

#include <string_view>

#include "daemon/exec/volume_place.h"

namespace forebay::daemon {

// Of the 32 digits in a machine-id; others are not known. ThisMachine() is that of /etc/machine-id.
//
// Source  machine-id(5), sd_id128_get_machine_app_specific(3), which it is the same as.
MachineId MachineOf(std::string_view digits);

}  // namespace forebay::daemon
