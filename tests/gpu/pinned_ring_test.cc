// SPDX-License-Identifier: Apache-2.0
// Goal    Copies through the ring deliver the right bytes, even if the source changes afterwards or the device is late. A full
//         ring does not block the caller.
// Method  CUDA over a fake driver that delays all work.

#include "gpu/pinned_ring.h"

#include <algorithm>
#include <memory>
#include <span>

#include "gpu/cuda_device.h"
#include "gtest/gtest.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::gpu {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::FakeCuda;
using ::forebay::testing::HasError;
using ::forebay::testing::Pattern;
using protocol::ErrorId;

constexpr size_t kRingBytes = PinnedRing::kSlots * PinnedRing::kSlotBytes;

class PinnedRingTest : public ::testing::Test {
 protected:
  PinnedRingTest() {
    FakeCuda::Start();
    device_ = CudaDevice::Create({.soname = FakeCuda::Library()}).value();
    stream_ = device_->MakeStream().value();
    ring_ = PinnedRing::Create(*device_).value();
  }

  // Starts to copy all of `from`. The caller may change `from` after the return.
  void Copy(std::span<std::byte> to, std::span<const std::byte> from) {
    size_t begun = 0;
    for (int looks = 0; begun < from.size(); ++looks) {
      ASSERT_LT(looks, 10000);
      ASSERT_OK_AND_ASSIGN(const size_t bytes,
                           ring_->Begin(*stream_, to.subspan(begun), from.subspan(begun)));
      begun += bytes;
    }
  }

  std::shared_ptr<CudaDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<PinnedRing> ring_;
};

TEST_F(PinnedRingTest, BringsTheBytesThatWereThereWhenItBegan) {
  for (const size_t size : {size_t{0}, size_t{1}, PinnedRing::kSlotBytes,
                            PinnedRing::kSlotBytes + 1, kRingBytes, 2 * kRingBytes + 12345}) {
    const Bytes want = Pattern(size, static_cast<uint8_t>(size % 251));
    Bytes from = want;
    const FakeCuda::Memory to = FakeCuda::Allocate(size);
    Copy(*to, from);
    std::ranges::fill(from, FakeCuda::kPoison);
    ASSERT_OK(stream_->Synchronize());
    EXPECT_TRUE(std::ranges::equal(*to, want)) << size << " bytes";
  }
  EXPECT_TRUE(FakeCuda::mistakes().empty());
}

TEST_F(PinnedRingTest, BeginsNothingWhereAllOfItIsUnderWay) {
  FakeCuda::set_looks_until_done(3);
  const Bytes from = Pattern(kRingBytes + 1, 1);
  const FakeCuda::Memory to = FakeCuda::Allocate(from.size());
  EXPECT_EQ(ring_->Begin(*stream_, *to, from), absl::StatusOr<size_t>(kRingBytes));
  const auto last_to = to->subspan(kRingBytes);
  const auto last_from = std::span(from).subspan(kRingBytes);
  EXPECT_EQ(ring_->Begin(*stream_, last_to, last_from), absl::StatusOr<size_t>(0));
  EXPECT_EQ(ring_->Begin(*stream_, last_to, last_from), absl::StatusOr<size_t>(1));
}

TEST_F(PinnedRingTest, SaysThatTheDeviceHasFailed) {
  FakeCuda::FailCopy(0);
  const Bytes from = Pattern(2 * kRingBytes, 1);
  const FakeCuda::Memory to = FakeCuda::Allocate(from.size());
  absl::Status status;
  for (size_t begun = 0; status.ok() && begun < from.size();) {
    const auto bytes = ring_->Begin(*stream_, to->subspan(begun), std::span(from).subspan(begun));
    status = bytes.status();
    begun += bytes.value_or(0);
  }
  EXPECT_THAT(status, HasError(ErrorId::kDevice));
}

}  // namespace
}  // namespace forebay::gpu
