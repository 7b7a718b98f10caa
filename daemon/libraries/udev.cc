// SPDX-License-Identifier: Apache-2.0
// Functions of libudev that hwloc's archive calls; Debian has no archive of libudev. hwloc calls them for disks alone, which no
// topology of ours has. Without libudev it would read /run/udev itself.

extern "C" {

struct udev;
struct udev_device;

udev* udev_new() { return nullptr; }
udev* udev_unref(udev* /*udev*/) { return nullptr; }
udev_device* udev_device_new_from_subsystem_sysname(udev* /*udev*/, const char* /*subsystem*/,
                                                    const char* /*name*/) {
  return nullptr;
}
udev_device* udev_device_unref(udev_device* /*device*/) { return nullptr; }
const char* udev_device_get_property_value(udev_device* /*device*/, const char* /*key*/) {
  return nullptr;
}
}
