// SPDX-License-Identifier: Apache-2.0
// Goal    A session registers its arenas with the device in the way that the device accepts, copies the right bytes in each
//         way, and ends with the error's name if the device fails.
// Method  Both ends of a real ring are in one process, and a script plays the daemon. CUDA is a driver that is stricter than
//         the hardware.

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <string>

#include "client/internal/session_parts.h"
#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gtest/gtest.h"
#include "tests/client/scripted_daemon.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/pattern.h"

namespace forebay::client::internal {
namespace {

using protocol::Command;
using protocol::ErrorId;
using protocol::Op;
using testing::Bytes;
using testing::FakeCuda;
using testing::HasError;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Pattern;

constexpr uint32_t kGroup = 2;
constexpr size_t kGroupBytes = 512;

class SessionDeviceTest : public SessionTest {
 protected:
  enum class Weights : uint8_t { kReadOnly, kWritable };

  void StartOn(const FakeCuda::Options& options, Weights weights) {
    FakeCuda::Start(options);
    device_ = gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
    StartSession(Obey(), [&](SessionParts& parts) {
      parts.device = device_;
      std::ranges::copy(Pattern(weights_->bytes().size(), 7), weights_->bytes().begin());
      if (weights == Weights::kReadOnly) parts.weights->MakeReadOnly();
      if (weights == Weights::kWritable) parts.weights_access = MapAccess::kReadWrite;
    });
    stream_ = device_->MakeStream().value();
  }
  void TearDown() override {
    stream_.reset();
    session_.reset();
    device_.reset();
    EXPECT_EQ(FakeCuda::leftovers(), FakeCuda::Leftovers());
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
  }

  absl::Status CopyGroup(std::span<std::byte> to) {
    const std::array<WeightsCopy, 1> copies{
        WeightsCopy{.partition = kGroup, .first_elem = 0, .to = to}};
    return session_->CopyWeights(copies, *stream_, kTimeout);
  }
  void ExpectGroupIsCopied() {
    const FakeCuda::Memory to = FakeCuda::Allocate(kGroupBytes);
    ASSERT_OK(CopyGroup(*to));
    ASSERT_OK(stream_->Synchronize());
    const uint64_t begin = layout_->groups()[kGroup].weights_offset_bytes;
    EXPECT_TRUE(std::ranges::equal(*to, weights_->bytes().subspan(begin, kGroupBytes)));
  }
  absl::StatusOr<StepResult> Step() {
    return session_->Step(1, std::array<protocol::HyperParams, 1>{}, 0, {}, kTimeout);
  }
  // Expects that every call returns the error of the device's failure.
  void ExpectOver() {
    for (const absl::Status& status :
         {session_->Fetch(kGroup, kTimeout).status(), session_->FlushGradients(),
          session_->DropGradients(), session_->GradNorm(std::nullopt, kTimeout).status(),
          Step().status()}) {
      EXPECT_THAT(status, HasError(ErrorId::kDevice));
      EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
    }
  }
  // Returns the access rights ("r--s" and the like) of the page that the weights begin on.
  std::string RightsOfWeights() {
    std::ifstream maps("/proc/self/maps");
    const auto want = reinterpret_cast<uintptr_t>(weights_->bytes().data());
    for (std::string line; std::getline(maps, line);) {
      const size_t dash = line.find('-');
      const size_t space = line.find(' ');
      const uintptr_t begin = std::stoull(line.substr(0, dash), nullptr, 16);
      const uintptr_t end = std::stoull(line.substr(dash + 1, space - dash - 1), nullptr, 16);
      if (begin <= want && want < end) return line.substr(space + 1, 2);
    }
    return "not mapped";
  }

  std::shared_ptr<gpu::CudaDevice> device_;
  std::unique_ptr<gpu::Stream> stream_;
};

TEST_F(SessionDeviceTest, RegistersReadOnlyWeightsWhereTheDeviceTakesThem) {
  StartOn({}, Weights::kReadOnly);
  const auto known = FakeCuda::registrations();
  ASSERT_EQ(known.size(), 2U);
  for (const FakeCuda::Registration& one : known) {
    const bool is_weights = one.begin == weights_->bytes().data();
    EXPECT_TRUE(is_weights || one.begin == grad_->bytes().data());
    EXPECT_EQ(one.is_read_only, is_weights);
  }
  EXPECT_EQ(session_->device_access(), "cuda:0 reads weights in place");
  ExpectGroupIsCopied();
  session_.reset();
  EXPECT_THAT(FakeCuda::registrations(), IsEmpty());
}

TEST_F(SessionDeviceTest, RegistersWritableWeightsAndThenOnlyReadsThem) {
  StartOn({.registers_read_only = false}, Weights::kWritable);
  EXPECT_EQ(FakeCuda::registrations().size(), 2U);
  EXPECT_EQ(RightsOfWeights(), "r-");
  EXPECT_THAT(session_->device_access(), HasSubstr("mapped writable once"));
  ExpectGroupIsCopied();
}

TEST_F(SessionDeviceTest, CopiesThroughARingWhatTheDeviceCannotReach) {
  StartOn({.registers_read_only = false}, Weights::kReadOnly);
  for (const FakeCuda::Registration& one : FakeCuda::registrations()) {
    EXPECT_NE(one.begin, weights_->bytes().data());
  }
  EXPECT_EQ(session_->device_access(), "cuda:0 reads weights through a ring of 16 MiB");
  for (int copy = 0; copy < 20; ++copy) ExpectGroupIsCopied();
}

TEST_F(SessionDeviceTest, ThatReachesNoMemoryOfTheHostsIsRefused) {
  FakeCuda::Start({.registers_read_only = false, .register_bytes_max = 0});
  device_ = gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
  StartSession(Obey());
  SessionParts parts{.layout = layout_,
                     .port = {},
                     .weights = weights_,
                     .grad = grad_,
                     .step_region_offset = kGradBytes,
                     .step_region_bytes = kStepBytes,
                     .gauge = gauge_,
                     .timeout = kTimeout,
                     .interrupt_check = {},
                     .device = device_};
  EXPECT_THAT(Attachment::Assemble(std::move(parts)), HasError(ErrorId::kUnsupported));
}

TEST_F(SessionDeviceTest, ACopyOfWeightsThatFailsEndsTheSession) {
  StartOn({}, Weights::kReadOnly);
  FakeCuda::FailCopy(0);
  const FakeCuda::Memory to = FakeCuda::Allocate(kGroupBytes);
  ASSERT_OK(CopyGroup(*to)) << "it has begun";
  EXPECT_THAT(Step(), HasError(ErrorId::kDevice));
  ExpectOver();
  EXPECT_THAT(session_->Detach(), HasError(ErrorId::kDevice));
  FakeCuda::Start();  // a new driver forgets memory of the broken device
}

TEST_F(SessionDeviceTest, AGradientThatWasNotCopiedIsNotDelivered) {
  StartOn({}, Weights::kReadOnly);
  FakeCuda::FailCopy(0);
  const FakeCuda::Memory gradient = FakeCuda::Allocate(kGroupBytes);
  ASSERT_OK(session_->AddGradient(2, *gradient, *stream_, gradient, kTimeout));
  EXPECT_THAT(Step(), HasError(ErrorId::kDevice));
  ExpectOver();
  for (const Command& command : daemon_.WaitForCommands(0)) {
    EXPECT_NE(command.op, static_cast<uint16_t>(Op::kGradReady));
    EXPECT_NE(command.op, static_cast<uint16_t>(Op::kStep));
  }
  FakeCuda::Start();
}

// The calls of a copy, a gradient and a step are 59, and one query more for each event that the thread of CopyWatch looks at
// first. The last parameter is beyond them: nothing fails.
constexpr size_t kCalls = 80;

class SessionDeviceFault : public SessionDeviceTest,
                           public ::testing::WithParamInterface<size_t> {};

TEST_P(SessionDeviceFault, ACallOfTheDriverThatFailsIsAnErrorAndNothingIsApplied) {
  StartOn({}, Weights::kReadOnly);
  FakeCuda::FailCall(FakeCuda::calls() + GetParam());
  const FakeCuda::Memory to = FakeCuda::Allocate(kGroupBytes);
  const FakeCuda::Memory gradient = FakeCuda::Allocate(kGroupBytes);
  absl::Status status = CopyGroup(*to);
  status.Update(session_->AddGradient(2, *gradient, *stream_, gradient, kTimeout));
  status.Update(Step().status());
  if (!status.ok()) {
    EXPECT_LT(GetParam(), kCalls - 1);
    EXPECT_THAT(status, HasError(ErrorId::kDevice));
    EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA_ERROR_UNKNOWN"));
    EXPECT_THAT(Step(), HasError(ErrorId::kDevice));
  } else {
    EXPECT_GT(GetParam(), 15U);
  }
  stream_.reset();
  session_.reset();
  device_.reset();
  EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
  FakeCuda::Start();  // a new driver forgets memory that was not freed
}

INSTANTIATE_TEST_SUITE_P(Calls, SessionDeviceFault, ::testing::Range<size_t>(0, kCalls));

}  // namespace
}  // namespace forebay::client::internal
