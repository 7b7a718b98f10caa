// SPDX-License-Identifier: Apache-2.0
// Block devices for tests. Containers usually have none, and only root can make one.
#pragma once

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "gtest/gtest.h"
#include "protocol/os/unique_fd.h"

namespace forebay::testing {

// Path of some block device in /dev, for tests that query its name and numbers and read no data. Empty if /dev has no block
// device.
inline std::string AnyBlockDevice() {
  std::string device;
  for (const auto& entry : std::filesystem::directory_iterator("/dev")) {
    std::error_code error;
    if (entry.is_block_file(error)) device = entry.path();
  }
  return device;
}

// A loop device over a file (man 4 loop). No process may have the device open when the destructor runs.
class LoopDevice {
 public:
  // Makes a loop device over the new file `backing`. Returns null, but also makes the file, if the kernel or this user has no
  // loop devices.
  static std::unique_ptr<LoopDevice> Make(const std::string& backing, uint64_t bytes) {
    const protocol::UniqueFd file(
        ::open(backing.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR));
    EXPECT_EQ(::ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
    const protocol::UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
    while (control.valid()) {
      const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
      if (number < 0) break;
      auto device = std::make_unique<LoopDevice>();
      device->path_ = "/dev/loop" + std::to_string(number);
      device->fd_.Reset(::open(device->path_.c_str(), O_RDWR | O_CLOEXEC));
      if (!device->fd_.valid()) break;
      if (::ioctl(device->fd_.get(), LOOP_SET_FD, file.get()) == 0) return device;
      const bool is_taken = errno == EBUSY;  // another test took the device
      device->fd_.Reset();
      if (!is_taken) break;
    }
    return nullptr;
  }
  LoopDevice() = default;
  LoopDevice(const LoopDevice&) = delete;
  LoopDevice& operator=(const LoopDevice&) = delete;
  ~LoopDevice() {
    if (!fd_.valid()) return;
    EXPECT_EQ(::ioctl(fd_.get(), LOOP_CLR_FD), 0);
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  protocol::UniqueFd fd_;
};

}  // namespace forebay::testing
