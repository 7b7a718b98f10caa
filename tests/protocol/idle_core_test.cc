// SPDX-License-Identifier: Apache-2.0
// Goal    The count of runnable threads is parsed as the kernel writes it.
// Method  Lines of /proc/loadavg, and invalid lines.

#include "protocol/os/idle_core.h"

#include "gtest/gtest.h"

namespace forebay::protocol::idle_core_test {
namespace {

TEST(IdleCore, ReadsTheRunnableThreadsOfALoadavgLine) {
  EXPECT_EQ(RunnableThreads("0.20 0.18 0.12 3/80 11206\n"), 3);
  EXPECT_EQ(RunnableThreads("0.20 0.18 0.12 12/80 11206\n"), 12);
  EXPECT_EQ(RunnableThreads(""), -1);
  EXPECT_EQ(RunnableThreads("no such line"), -1);
}

}  // namespace
}  // namespace forebay::protocol::idle_core_test
