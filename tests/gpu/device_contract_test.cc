// SPDX-License-Identifier: Apache-2.0
// Goal    Every device meets the contract of gpu/device.h, so that its users can be tested on any device.
// Method  One set of cases runs on the host, on CUDA over a fake driver that delays all work, on one that works in random legal
//         orders, and on a GPU if there is one.

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/cuda_device.h"
#include "gpu/device.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "protocol/os/clock.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/host_pages.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::gpu {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::FakeCuda;
using ::forebay::testing::HostPages;
using ::forebay::testing::Pattern;

struct DeviceCase {
  std::string name;
  std::function<std::shared_ptr<Device>()> make;
};

void PrintTo(const DeviceCase& one, std::ostream* out) { *out << one.name; }

std::shared_ptr<Device> OnFake(const FakeCuda::Options& options, uint64_t piece_bytes) {
  FakeCuda::Start(options);
  return CudaDevice::Create({.soname = FakeCuda::Library(), .piece_bytes = piece_bytes}).value();
}

std::vector<DeviceCase> Devices() {
  std::vector<DeviceCase> all{
      {"Host", [] { return std::make_shared<HostDevice>(); }},
      {"LateCuda", [] { return OnFake({}, uint64_t{1} << 30); }},
      {"CudaInPieces", [] { return OnFake({.registers_read_only = false}, 8192); }}};
  constexpr uint64_t kSeeds = 5;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    all.push_back({"RandomCuda" + std::to_string(seed),
                   [seed] { return OnFake({.seed = seed}, uint64_t{1} << 20); }});
  }
  if (CudaDevice::Create({}).ok()) {
    all.push_back({"Cuda", [] { return CudaDevice::Create({}).value(); }});
  }
  return all;
}

// Host memory that is registered with the device.
class Pinned {
 public:
  Pinned(Device& device, size_t size_bytes)
      : pages_(size_bytes),
        registration_(device.Register(pages_.bytes(), HostAccess::kReadWrite).value()) {}
  Pinned(Device& device, const Bytes& content) : Pinned(device, content.size()) {
    std::ranges::copy(content, pages_.bytes().begin());
  }

  std::span<std::byte> bytes() const { return pages_.bytes(); }
  Bytes content() const { return {pages_.bytes().begin(), pages_.bytes().end()}; }

 private:
  HostPages pages_;
  std::unique_ptr<HostRegistration> registration_;
};

class DeviceContract : public ::testing::TestWithParam<DeviceCase> {
 protected:
  void TearDown() override {
    stream_.reset();
    device_.reset();
    EXPECT_EQ(FakeCuda::leftovers(), FakeCuda::Leftovers());
    EXPECT_EQ(FakeCuda::mistakes(), std::vector<std::string>());
  }

  void ExpectCopied(std::span<const std::byte> from, const Bytes& want) {
    const Pinned to(*device_, from.size());
    ASSERT_OK_AND_ASSIGN(const auto memory, stream_->Allocate(from.size()));
    ASSERT_OK(stream_->Copy(memory.bytes(), from));
    ASSERT_OK(stream_->Copy(to.bytes(), memory.bytes()));
    ASSERT_OK(stream_->Synchronize());
    EXPECT_EQ(to.content(), want);
  }

  std::shared_ptr<Device> device_ = GetParam().make();
  std::unique_ptr<Stream> stream_ = device_->MakeStream().value();
};

TEST_P(DeviceContract, WhatIsCopiedThereAndBackIsTheSame) {
  for (const size_t size : std::array<size_t, 5>{0, 1, 63, 4097, 3000000}) {
    const Pinned from(*device_, Pattern(size, 1));
    const Pinned to(*device_, size);
    ASSERT_OK_AND_ASSIGN(const auto memory, stream_->Allocate(size));
    ASSERT_EQ(memory.bytes().size(), size);
    ASSERT_OK(stream_->Copy(memory.bytes(), from.bytes()));
    ASSERT_OK(stream_->Copy(to.bytes(), memory.bytes()));
    ASSERT_OK(stream_->Synchronize());
    EXPECT_EQ(to.content(), from.content()) << size << " bytes";
  }
}

TEST_P(DeviceContract, MemoryThatIsNotRegisteredIsCopiedToo) {
  const Bytes from = Pattern(10001, 1);
  Bytes to(from.size());
  ASSERT_OK_AND_ASSIGN(const auto memory, stream_->Allocate(from.size()));
  ASSERT_OK(stream_->Copy(memory.bytes(), from));
  ASSERT_OK(stream_->Copy(to, memory.bytes()));
  ASSERT_OK(stream_->Synchronize());
  EXPECT_EQ(to, from);
}

TEST_P(DeviceContract, WorkOfOneStreamRunsInOrder) {
  const Pinned first(*device_, Pattern(1000, 1));
  const Pinned second(*device_, Pattern(1000, 2));
  const Pinned end(*device_, 1000);
  const Pinned last(*device_, 1000);
  ASSERT_OK_AND_ASSIGN(const auto middle, stream_->Allocate(1000));
  ASSERT_OK(stream_->Copy(middle.bytes(), first.bytes()));
  ASSERT_OK(stream_->Copy(end.bytes(), middle.bytes()));
  ASSERT_OK(stream_->Copy(middle.bytes(), second.bytes()));
  ASSERT_OK(stream_->Copy(last.bytes(), middle.bytes()));
  ASSERT_OK(stream_->Synchronize());
  EXPECT_EQ(end.content(), first.content());
  EXPECT_EQ(last.content(), second.content());
}

TEST_P(DeviceContract, AnEventIsDoneOnceTheWorkBeforeItIs) {
  const Pinned from(*device_, Pattern(100, 1));
  const Pinned to(*device_, 100);
  ASSERT_OK(stream_->Copy(to.bytes(), from.bytes()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const Event> event, stream_->Record());
  ASSERT_OK_AND_ASSIGN(const bool is_done, event->Done());
  if (is_done) {
    EXPECT_EQ(to.content(), from.content());
  }
  ASSERT_OK(stream_->Synchronize());
  EXPECT_EQ(event->Done(), absl::StatusOr<bool>(true));
  EXPECT_EQ(to.content(), from.content());
  ASSERT_OK(stream_->WaitFor(*event));
  stream_.reset();
  EXPECT_EQ(event->Done(), absl::StatusOr<bool>(true));
}

TEST_P(DeviceContract, AnEventThatIsLookedAtIsDoneSomeTime) {
  const Pinned from(*device_, Pattern(100, 1));
  const Pinned to(*device_, 100);
  ASSERT_OK(stream_->Copy(to.bytes(), from.bytes()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const Event> event, stream_->Record());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  bool is_done = false;
  while (!is_done && std::chrono::steady_clock::now() < deadline) {
    ASSERT_OK_AND_ASSIGN(is_done, event->Done());
  }
  EXPECT_EQ(to.content(), from.content());
}

TEST_P(DeviceContract, ATimedEventKnowsWhenTheWorkBeforeItEnded) {
  // Maximum error of a device time: another process may take the CPU while the clocks of GPU and host are compared.
  constexpr uint64_t kSlackNs = 100'000'000;
  const Pinned from(*device_, Pattern(100, 1));
  const Pinned to(*device_, 100);
  // The first call also determines the device's clock.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!stream_->RecordTimed().ok()) ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  for (int round = 0; round < 3; ++round) {
    const uint64_t before_ns = protocol::MonotonicNs();
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const TimedEvent> begun, stream_->RecordTimed());
    ASSERT_OK(stream_->Copy(to.bytes(), from.bytes()));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const TimedEvent> ended, stream_->RecordTimed());
    ASSERT_OK_AND_ASSIGN(const std::optional<uint64_t> early, ended->EndedNs());
    if (early.has_value()) {
      EXPECT_EQ(to.content(), from.content());
    }
    ASSERT_OK(stream_->Synchronize());
    const uint64_t after_ns = protocol::MonotonicNs();
    ASSERT_OK_AND_ASSIGN(const std::optional<uint64_t> begun_ns, begun->EndedNs());
    ASSERT_OK_AND_ASSIGN(const std::optional<uint64_t> ended_ns, ended->EndedNs());
    ASSERT_TRUE(begun_ns.has_value() && ended_ns.has_value());
    EXPECT_LE(before_ns, *begun_ns + kSlackNs);
    EXPECT_LE(*begun_ns, *ended_ns);
    EXPECT_LE(*ended_ns, after_ns + kSlackNs);
  }
}

TEST_P(DeviceContract, AnEventIsNotRecordedAgainWhileSomebodyHoldsIt) {
  const Pinned from(*device_, Pattern(100, 1));
  const Pinned to(*device_, 100);
  std::vector<std::shared_ptr<const Event>> held;
  for (int round = 0; round < 20; ++round) {
    ASSERT_OK_AND_ASSIGN(std::shared_ptr<const Event> event, stream_->Record());
    ASSERT_OK(stream_->Synchronize());
    if (round % 2 == 0) held.push_back(std::move(event));
  }
  ASSERT_OK(stream_->Copy(to.bytes(), from.bytes()));
  EXPECT_OK(stream_->Record());
  for (const auto& event : held) EXPECT_EQ(event->Done(), absl::StatusOr<bool>(true));
  ASSERT_OK(stream_->Synchronize());
}

TEST_P(DeviceContract, AStreamThatWaitsForAnEventRunsBehindIt) {
  const Pinned from(*device_, Pattern(5000, 1));
  const Pinned to(*device_, 5000);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> second, device_->MakeStream());
  ASSERT_OK_AND_ASSIGN(const auto memory, stream_->Allocate(5000));
  ASSERT_OK(stream_->Copy(memory.bytes(), from.bytes()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const Event> copied, stream_->Record());
  ASSERT_OK(second->WaitFor(*copied));
  ASSERT_OK(second->Copy(to.bytes(), memory.bytes()));
  ASSERT_OK(second->Synchronize());
  EXPECT_EQ(to.content(), from.content());
}

TEST_P(DeviceContract, AStreamEndsItsWorkBeforeItDies) {
  const Pinned from(*device_, Pattern(100, 1));
  const Pinned to(*device_, 100);
  ASSERT_OK(stream_->Copy(to.bytes(), from.bytes()));
  stream_.reset();
  EXPECT_EQ(to.content(), from.content());
}

TEST_P(DeviceContract, MemoryIsFreedBehindTheWorkThatUsesIt) {
  const Pinned from(*device_, Pattern(3000, 1));
  const Pinned to(*device_, 3000);
  {
    ASSERT_OK_AND_ASSIGN(const auto memory, stream_->Allocate(3000));
    ASSERT_OK(stream_->Copy(memory.bytes(), from.bytes()));
    ASSERT_OK(stream_->Copy(to.bytes(), memory.bytes()));
  }
  ASSERT_OK(stream_->Synchronize());
  EXPECT_EQ(to.content(), from.content());
}

TEST_P(DeviceContract, MemoryMayOutliveItsStream) {
  ASSERT_OK_AND_ASSIGN(const auto memory, stream_->Allocate(100));
  stream_.reset();
}

TEST_P(DeviceContract, AStreamOfAnotherLibrarysIsUsedAndLeftAlone) {
  const Pinned from(*device_, Pattern(100, 1));
  const Pinned to(*device_, 100);
  for (int use = 0; use < 2; ++use) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> borrowed, device_->BorrowStream(0));
    ASSERT_OK(borrowed->Copy(to.bytes(), from.bytes()));
    ASSERT_OK(borrowed->Synchronize());
    EXPECT_EQ(to.content(), from.content());
  }
}

TEST_P(DeviceContract, MemoryThatWasMappedWritableMayBeMadeReadOnly) {
  HostPages pages(20000);
  std::ranges::copy(Pattern(20000, 1), pages.bytes().begin());
  ASSERT_OK_AND_ASSIGN(const auto registration,
                       device_->Register(pages.bytes(), HostAccess::kReadWrite));
  pages.Protect(PROT_READ);
  ExpectCopied(pages.bytes(), Pattern(20000, 1));
}

TEST_P(DeviceContract, ReadOnlyMemoryIsRegisteredWhereTheDeviceSaysSo) {
  HostPages pages(20000);
  std::ranges::copy(Pattern(20000, 1), pages.bytes().begin());
  pages.Protect(PROT_READ);
  const auto registration = device_->Register(pages.bytes(), HostAccess::kRead);
  if (!device_->registers_read_only()) {
    EXPECT_THAT(registration, testing::HasError(protocol::ErrorId::kUnsupported));
    return;
  }
  ASSERT_OK(registration);
  ExpectCopied(pages.bytes(), Pattern(20000, 1));
}

TEST_P(DeviceContract, MemoryThatIsNoLongerRegisteredCanBeAgain) {
  const HostPages pages(50000);
  for (int use = 0; use < 2; ++use) {
    EXPECT_OK(device_->Register(pages.bytes(), HostAccess::kReadWrite));
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract, ::testing::ValuesIn(Devices()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace forebay::gpu
