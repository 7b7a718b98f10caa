// Goal    The estimate that refuses an arena before the kernel would kill somebody is a sane
//         number.
// Method  Compare it with MemTotal and with sysconf's free pages.

#include "pinned_mem/internal/available_memory.h"

#include <unistd.h>

#include "gtest/gtest.h"

namespace forebay::pinned_mem::internal {
namespace {

TEST(AvailableMemory, IsMoreThanNothingAndLessThanTheMachineHas) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t total_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes;
  EXPECT_GT(AvailableBytes(), uint64_t{1} << 20);
  EXPECT_LE(AvailableBytes(), total_bytes);
}

}  // namespace
}  // namespace forebay::pinned_mem::internal
