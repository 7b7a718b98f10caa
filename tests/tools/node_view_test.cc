// SPDX-License-Identifier: Apache-2.0
// Goal    `forebay status`, `swap` and `jobs` print the speed of a path and of a step as shares of the path's measured rates,
//         and the bytes that a step moved. They print nothing if these are unknown.
// Method  Messages as a daemon sends them, with numbers that are easy to divide.

#include "tools/forebay/node_view.h"

#include <capnp/message.h>

#include <cstdint>
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/forebay.capnp.h"

namespace forebay::tools {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class NodeView : public ::testing::Test {
 protected:
  NodeView() {
    auto swap = status_.initSwap(1);
    swap[0].setPath("/a");
    auto jobs = status_.initJobs(1);
    jobs[0].setName("gpt");
    jobs[0].setBlocks(4);
  }

  schema::SwapPathStatus::Builder path() { return status_.getSwap()[0]; }
  schema::JobStatus::Builder job() { return status_.getJobs()[0]; }
  void Measure() {
    path().setReadRate(4e9);
    path().setWriteRate(2e9);
    path().setMixedRate(2.5e9);
  }
  std::string Swap() { return SwapText(status_.asReader()); }
  std::string Jobs() { return JobsText(status_.asReader()); }

  // The message is allocated separately: its destructor may throw, and the destructor of a test must not.
  const std::unique_ptr<capnp::MallocMessageBuilder> message_ =
      std::make_unique<capnp::MallocMessageBuilder>();
  schema::NodeStatus::Builder status_ = message_->initRoot<schema::NodeStatus>();
};

TEST_F(NodeView, TheRatesOfAPathNowAreSharesOfItsMeasuredOnes) {
  Measure();
  path().setReadRateNow(3e9);
  path().setReadShare(0.75);
  path().setWriteRateNow(1.8e9);
  path().setWriteShare(0.9);
  for (const std::string& text : {Swap(), StatusText(status_.asReader())}) {
    EXPECT_THAT(text, AllOf(HasSubstr("RATE NOW GB/S"), HasSubstr("4.00 read, 2.00 written"),
                            HasSubstr("3.00 (75 %) read, 1.80 (90 %) written")));
  }
}

TEST_F(NodeView, OfADirectionWithoutTransfersThereIsNoShare) {
  Measure();
  path().setReadRateNow(4e9);  // as measured
  path().setWriteRateNow(1.8e9);
  path().setWriteShare(0.9);
  EXPECT_THAT(Swap(), AllOf(HasSubstr("  1.80 (90 %) written"), Not(HasSubstr("%) read"))));
}

TEST_F(NodeView, OfAPathThatWasNotMeasuredThereAreRatesAlone) {
  path().setReadRateNow(3e9);
  EXPECT_THAT(Swap(),
              AllOf(HasSubstr("3.00 read"), Not(HasSubstr("(")), Not(HasSubstr("written"))));
}

TEST_F(NodeView, AStepIsAShareOfTheMeasuredRateOfAllPaths) {
  Measure();
  job().setLastStepSeconds(3);
  job().setLastDecisionSeconds(1);
  job().setLastUpdateBytes(4'000'000'000);
  EXPECT_THAT(Jobs(), HasSubstr("3.000 s, 0.80 of the disk's rate"));
  path().setMixedRate(0);
  EXPECT_THAT(Jobs(), AllOf(HasSubstr("3.000 s"), Not(HasSubstr("of the disk's rate"))));
}

TEST_F(NodeView, AJobShowsWhatAStepReadsAndWritesOnSwap) {
  EXPECT_THAT(Jobs(), AllOf(HasSubstr("SWAP PER STEP"), Not(HasSubstr("written"))));
  job().setLastStepReadBytes(uint64_t{3} << 30);
  job().setLastStepWrittenBytes(uint64_t{2} << 30);
  EXPECT_THAT(Jobs(), HasSubstr("3.0 GiB read, 2.0 GiB written"));
}

}  // namespace
}  // namespace forebay::tools
