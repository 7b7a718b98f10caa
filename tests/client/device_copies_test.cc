// SPDX-License-Identifier: Apache-2.0
// Goal    Weights that are copied to a device, and gradients that are copied from the device, have the right bytes however late
//         the device does its work. Each event and each wait of the copies is needed.
// Method  A scripted daemon serves leases from its own slots and poisons slots that are returned. The device runs work only
//         when a thread waits for the work. The calls come in FSDP2's order, on FSDP2's streams: copies for a gather, the
//         gather, compute, the reduction. The test runs once with all waits, and once without each of the waits.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/wire.h"
#include "tests/client/poisoning_daemon.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal {
namespace {

using protocol::Command;
using protocol::kGradUnitElems;
using protocol::Op;
using testing::FakeCuda;

constexpr uint32_t kUnits = 3;
constexpr uint32_t kParamsOfUnit = 2;
constexpr uint64_t kElemsOfParam = kGradUnitElems + 128;  // units of cache lines: nothing is padded
constexpr uint64_t kElemsOfUnit = kParamsOfUnit * kElemsOfParam;
constexpr uint64_t kUnitBytes = kElemsOfUnit * sizeof(float);
constexpr Timeout kTimeout = kTestDeadline;

// Parameter 3 has a gradient in odd steps alone.
bool HasGradient(uint64_t step, uint32_t param) { return param != 3 || step % 2 == 1; }

std::shared_ptr<gpu::Device> StartDevice(const FakeCuda::Options& options = {}) {
  FakeCuda::Start(options);
  return gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
}

enum class Flush : uint8_t { kEachUnit, kAtTheEnd };

// A rank that trains.
class Training {
 public:
  // The grad arena has room for `gradients` units at once.
  Training(const std::shared_ptr<gpu::Device>& device, uint64_t gradients, Flush flush)
      : flush_(flush),
        daemon_(UnitsSpec(kUnits, kParamsOfUnit, kElemsOfParam), gradients, device),
        session_(daemon_.session().get()) {
    for (std::unique_ptr<gpu::Stream>* stream : {&copy_in_, &gather_, &compute_, &reduce_}) {
      *stream = device->MakeStream().value();
    }
  }
  ~Training() {
    EndSession();
    FakeCuda::set_counts_waits(false);
    for (std::unique_ptr<gpu::Stream>* stream : {&copy_in_, &gather_, &compute_, &reduce_}) {
      stream->reset();
    }
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // Trains two steps, then writes masters. Returns the errors; empty if there are none.
  std::vector<std::string> Run() {
    for (uint64_t step = 1; step <= 2; ++step) {
      Forward();
      Backward(step);
      // FSDP2 may prefetch a unit that it does not use.
      const FakeCuda::Memory dropped = step == 1 ? Prefetch(0) : nullptr;
      const std::array<protocol::HyperParams, 1> hyper{};
      Note(session_->Step(step, hyper, 0, {}, kTimeout).status(), "Step");
      const auto wrong =
          daemon_.CheckGradients(step, [&](uint32_t param) { return HasGradient(step, param); });
      wrong_.insert(wrong_.end(), wrong.begin(), wrong.end());
      if (dropped != nullptr) CheckWeights(step - 1, 0, *dropped, "a prefetch that was dropped");
      EndOfPass(step - 1);
    }
    Forward();
    const std::vector<float> masters(kElemsOfUnit, 1.0F);
    Note(session_->WriteState(kUnits - 1, 0, "master", masters, kTimeout), "WriteState");
    Note(session_->Detach(), "Detach");
    return std::move(wrong_);
  }

  Attachment& session() { return *session_; }
  ScriptedDaemon& daemon() { return daemon_.script(); }
  gpu::Stream& copy_in() { return *copy_in_; }
  std::span<std::byte> grad() const { return daemon_.grad(); }

  // Delivers a gradient whose reduction is under way; `step` gives its values.
  void Gradient(uint32_t param, uint64_t step) {
    const FakeCuda::Memory values = Kept(kElemsOfParam * sizeof(float));
    for (uint64_t i = 0; i < kElemsOfParam; ++i) {
      const float value = GradientOf(step, param, i);
      std::memcpy(values->data() + i * sizeof(float), &value, sizeof(value));
    }
    const FakeCuda::Memory own = Kept(kElemsOfParam * sizeof(float));
    Note(compute_->Copy(*own, *values), "compute");
    Follow(*compute_, *reduce_);
    const FakeCuda::Memory reduced = FakeCuda::Allocate(kElemsOfParam * sizeof(float));
    Note(reduce_->Copy(*reduced, *own), "reduce");
    Note(session_->AddGradient(param, *reduced, *reduce_, reduced, kTimeout), "AddGradient");
  }

 private:
  void EndSession() { daemon_.EndSession(); }
  void Note(const absl::Status& status, const std::string& what) {
    if (!status.ok()) wrong_.push_back(what + ": " + std::string(status.message()));
  }
  // Makes one stream wait for another, as FSDP2 does itself. These events and waits are not counted, so no test leaves them
  // out.
  void Follow(gpu::Stream& before, gpu::Stream& after) {
    FakeCuda::set_counts_waits(false);
    const auto event = before.Record().value();
    EXPECT_OK(after.WaitFor(*event));
    FakeCuda::set_counts_waits(true);
  }
  // Allocates memory that lives until EndOfPass() has synchronised the caller's streams.
  FakeCuda::Memory Kept(size_t size_bytes) {
    return kept_.emplace_back(FakeCuda::Allocate(size_bytes));
  }
  void EndOfPass(uint64_t step) {
    FakeCuda::set_counts_waits(false);
    Note(compute_->Synchronize(), "compute");
    Note(reduce_->Synchronize(), "reduce");
    FakeCuda::set_counts_waits(true);
    kept_.clear();
    for (const auto& [unit, used] : used_) CheckWeights(step, unit, *used, "compute");
    used_.clear();
  }
  void CheckWeights(uint64_t step, uint32_t unit, std::span<const std::byte> bytes,
                    const std::string& what) {
    if (!daemon_.AreWeights(step, unit, bytes)) {
      wrong_.push_back(what + " has other weights of unit " + std::to_string(unit));
    }
  }

  // FSDP2's unshard: the copy in, the gather, compute behind it.
  FakeCuda::Memory Prefetch(uint32_t unit) {
    const FakeCuda::Memory shard = Kept(kUnitBytes);
    const std::array<WeightsCopy, 2> copies{
        WeightsCopy{.partition = unit, .first_elem = 0, .to = shard->first(kUnitBytes / 2)},
        WeightsCopy{.partition = unit,
                    .first_elem = kElemsOfUnit / 2,
                    .to = shard->subspan(kUnitBytes / 2)}};
    Note(session_->CopyWeights(copies, *copy_in_, kTimeout), "CopyWeights");
    return shard;
  }
  void Gather(uint32_t unit) {
    const FakeCuda::Memory shard = Prefetch(unit);
    Follow(*copy_in_, *gather_);
    const FakeCuda::Memory whole = Kept(kUnitBytes);
    Note(gather_->Copy(*whole, *shard), "gather");
    Follow(*gather_, *compute_);
    used_.emplace_back(unit, FakeCuda::Allocate(kUnitBytes));
    Note(compute_->Copy(*used_.back().second, *whole), "compute");
  }
  void Forward() {
    for (uint32_t unit = 0; unit < kUnits; ++unit) Gather(unit);
    EndOfPass(session_->committed_step());
  }
  void Backward(uint64_t step) {
    for (uint32_t unit = kUnits; unit-- > 0;) {
      Gather(unit);
      for (uint32_t param = unit * kParamsOfUnit; param < (unit + 1) * kParamsOfUnit; ++param) {
        if (HasGradient(step, param)) Gradient(param, step);
      }
      if (flush_ == Flush::kEachUnit) Note(session_->FlushGradients(unit), "FlushGradients");
    }
    Note(session_->FlushGradients(), "FlushGradients");
  }

  const Flush flush_;
  PoisoningDaemon daemon_;
  Attachment* session_;
  std::unique_ptr<gpu::Stream> copy_in_;
  std::unique_ptr<gpu::Stream> gather_;
  std::unique_ptr<gpu::Stream> compute_;
  std::unique_ptr<gpu::Stream> reduce_;
  std::vector<FakeCuda::Memory> kept_;
  std::vector<std::pair<uint32_t, FakeCuda::Memory>> used_;  // by unit
  std::vector<std::string> wrong_;
};

struct CopiesCase {
  std::string name;
  uint64_t pieces = 0;  // pieces that the grad arena has room for
  Flush flush = Flush::kEachUnit;
};

void PrintTo(const CopiesCase& one, std::ostream* out) { *out << one.name; }

class DeviceCopies : public ::testing::TestWithParam<CopiesCase> {
 protected:
  std::vector<std::string> Train(const std::shared_ptr<gpu::Device>& device) const {
    return Training(device, GetParam().pieces, GetParam().flush).Run();
  }
};

TEST_P(DeviceCopies, AreOfTheRightBytesHoweverLateTheyEnd) {
  const auto device = StartDevice({.is_late_with_pageable = true});
  EXPECT_THAT(Train(device), ::testing::IsEmpty());
  EXPECT_THAT(FakeCuda::mistakes(), ::testing::IsEmpty());
}

TEST_P(DeviceCopies, AreOfTheRightBytesInAnyOrderThatStreamsAllow) {
  constexpr uint64_t kSeeds = 20;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const auto device = StartDevice({.is_late_with_pageable = seed % 2 == 0, .seed = seed});
    EXPECT_THAT(Train(device), ::testing::IsEmpty()) << "seed " << seed;
    EXPECT_THAT(FakeCuda::mistakes(), ::testing::IsEmpty()) << "seed " << seed;
  }
}

// All cases except PrivateSlots. Copies to slots in private memory need no event and no wait.
class CopiesToTheArena : public DeviceCopies {};

TEST_P(CopiesToTheArena, NeedEachEventAndEachWait) {
  ASSERT_THAT(Train(StartDevice()), ::testing::IsEmpty());
  const size_t waits = FakeCuda::waits();
  EXPECT_GT(waits, 30U);
  for (size_t wait = 0; wait < waits; ++wait) {
    const auto device = StartDevice();
    FakeCuda::LeaveOut(wait);
    EXPECT_THAT(Train(device), ::testing::Not(::testing::IsEmpty()))
        << "without wait " << wait << " of " << waits;
  }
}

constexpr auto kNameOf = [](const auto& parameter) { return parameter.param.name; };
const CopiesCase kRoomForAll{"RoomForAll", kUnits + 1, Flush::kAtTheEnd};
const CopiesCase kFlushedUnits{"FlushedUnits", kUnits + 1, Flush::kEachUnit};
const CopiesCase kRoomForTwo{"RoomForTwo", 2, Flush::kEachUnit};
const CopiesCase kPrivateSlots{"PrivateSlots", 2, Flush::kAtTheEnd};
INSTANTIATE_TEST_SUITE_P(Arenas, DeviceCopies,
                         ::testing::Values(kRoomForAll, kFlushedUnits, kRoomForTwo, kPrivateSlots),
                         kNameOf);
INSTANTIATE_TEST_SUITE_P(Arenas, CopiesToTheArena,
                         ::testing::Values(kRoomForAll, kFlushedUnits, kRoomForTwo), kNameOf);

// Returns the first element of parameter 1 in the arena after its gradient was delivered and dropped.
float ElementAfterADrop(std::optional<size_t> left_out) {
  Training training(StartDevice(), 2, Flush::kEachUnit);
  if (left_out.has_value()) FakeCuda::LeaveOut(*left_out);
  training.Gradient(1, 1);
  EXPECT_OK(training.session().DropGradients());
  float element = 0;
  std::memcpy(&element, training.grad().data() + kElemsOfParam * sizeof(float), sizeof(element));
  return element;
}

TEST(DroppedGradients, AreNoLongerOnTheirWayIntoSlotsThatAreFree) {
  EXPECT_EQ(ElementAfterADrop(std::nullopt), GradientOf(1, 1, 0));
  // Number of the wait behind the copy; waits 0 and 1 come before the copy.
  constexpr size_t kAfterTheCopy = 2;
  EXPECT_NE(ElementAfterADrop(kAfterTheCopy), GradientOf(1, 1, 0)) << "its event was not needed";
}

TEST(DeviceCopiesInACall, EndWhileItWaitsForRoomOfTheirs) {
  Training training(StartDevice({.looks_until_done = 100}), 2, Flush::kEachUnit);
  for (uint32_t param = 0; param < kUnits * kParamsOfUnit; ++param) training.Gradient(param, 1);
  EXPECT_EQ(training.session().counters().private_slots, 0U);
  training.daemon().WaitForCommands(kUnits);
}

TEST(DeviceCopiesInACall, EndBeforeTheStepIsSent) {
  Training training(StartDevice(), 2, Flush::kEachUnit);
  FakeCuda::set_looks_until_done(100);
  training.Gradient(0, 1);
  training.Gradient(1, 1);
  const std::array<protocol::HyperParams, 1> hyper{};
  ASSERT_OK(training.session().Step(1, hyper, 0, {}, kTimeout).status());
  const std::vector<Command> seen = training.daemon().WaitForCommands(2);
  EXPECT_EQ(seen[0].op, static_cast<uint16_t>(Op::kGradReady));
  EXPECT_EQ(seen[1].op, static_cast<uint16_t>(Op::kStep));
}

TEST(DeviceCopiesBetweenCalls, EndWithoutAFurtherCall) {
  Training training(StartDevice(), 2, Flush::kEachUnit);
  const auto weights = FakeCuda::Allocate(kUnitBytes);
  const std::array<WeightsCopy, 1> copies{
      WeightsCopy{.partition = 0, .first_elem = 0, .to = *weights}};
  ASSERT_OK(training.session().CopyWeights(copies, training.copy_in(), kTimeout));
  training.Gradient(0, 1);
  training.Gradient(1, 1);
  const std::vector<Command> seen = training.daemon().WaitForCommands(3);
  const auto has = [&](Op op) {
    return std::ranges::any_of(
        seen, [op](const Command& command) { return command.op == static_cast<uint16_t>(op); });
  };
  EXPECT_TRUE(has(Op::kRelease)) << "the lease was not given back";
  EXPECT_TRUE(has(Op::kGradReady)) << "the piece was not sent";
}

}  // namespace
}  // namespace forebay::client::internal
