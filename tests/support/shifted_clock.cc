// SPDX-License-Identifier: Apache-2.0
// Loaded into a program before its own libraries (LD_PRELOAD): shifts its wall clock by the seconds in the file that
// FOREBAY_TEST_CLOCK names, which is read at each clock call. The monotonic clock is unchanged. The kernel's file timestamps
// and its waits for a wall-clock time are not shifted: a wait for a shifted time would last years.

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>

namespace {

time_t ShiftSeconds() {
  const char* const file = std::getenv("FOREBAY_TEST_CLOCK");
  if (file == nullptr) return 0;
  char text[32] = {};
  const int fd = open(file, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t size = read(fd, text, sizeof(text) - 1);
  close(fd);
  return size > 0 ? std::strtoll(text, nullptr, 10) : 0;
}

int Read(clockid_t clock, timespec* now) {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  const bool is_of_day =
      clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
  if (result == 0 && is_of_day) now->tv_sec += ShiftSeconds();
  return result;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, timespec* now) noexcept {
  return Read(clock, now);
}

__attribute__((visibility("default"))) int gettimeofday(timeval* __restrict now,
                                                        void* __restrict) noexcept {
  timespec read = {};
  const int result = Read(CLOCK_REALTIME, &read);
  now->tv_sec = read.tv_sec;
  now->tv_usec = read.tv_nsec / 1000;
  return result;
}

__attribute__((visibility("default"))) time_t time(time_t* now) noexcept {
  timespec read = {};
  Read(CLOCK_REALTIME, &read);
  if (now != nullptr) *now = read.tv_sec;
  return read.tv_sec;
}
}
