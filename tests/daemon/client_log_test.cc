// SPDX-License-Identifier: Apache-2.0
// Goal    One user cannot fill the log: the user's first warning is logged at once, then one line a minute gives the number of
//         further warnings. Other users' warnings are logged as usual.
// Method  Time that the test moves; the log in memory.

#include "daemon/control/client_log.h"

#include <kj/async.h>
#include <kj/timer.h>

#include <memory>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "spdlog/sinks/ostream_sink.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

class ClientLogTest : public ::testing::Test {
 protected:
  ClientLogTest() : wait_scope_(loop_), timer_(kj::origin<kj::TimePoint>()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_st>(text_)));
    spdlog::set_pattern("%v");
  }
  ~ClientLogTest() noexcept override { spdlog::shutdown(); }

  std::string LogAfter(int seconds) {
    timer_.advanceTo(timer_.now() + seconds * kj::SECONDS);
    wait_scope_.poll();
    const std::string text = text_.str();
    text_.str("");
    return text;
  }

  std::ostringstream text_;
  kj::EventLoop loop_;
  kj::WaitScope wait_scope_;
  kj::TimerImpl timer_;
};

TEST_F(ClientLogTest, HasOneLineAMinuteOfEachUser) {
  ClientLog log(timer_);
  log.Warn(7, "process 1 is refused");
  EXPECT_EQ(LogAfter(0), "uid 7: process 1 is refused\n");
  for (int i = 0; i < 22'000; ++i) log.Warn(7, "process 1 is refused");
  log.Warn(8, "process 2 is refused");
  EXPECT_EQ(LogAfter(59), "uid 8: process 2 is refused\n");
  EXPECT_EQ(LogAfter(1), "uid 7: more warnings of its clients in the last 60 s: 22000\n");
  log.Warn(7, "process 1 is refused");
  EXPECT_EQ(LogAfter(60), "uid 7: more warnings of its clients in the last 60 s: 1\n");
  EXPECT_EQ(LogAfter(60), "") << "nothing more happened";
  log.Warn(7, "process 1 is refused");
  EXPECT_EQ(LogAfter(0), "uid 7: process 1 is refused\n") << "a first one again";
}

}  // namespace
}  // namespace forebay::daemon
