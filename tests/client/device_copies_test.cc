// Goal    Weights that are copied to a device, and gradients that are copied from it, are the right
//         bytes however late the device does its work; each event and each wait on the way is needed.
// Method  A scripted daemon serves slots of its own for leases and poisons what is given back; the
//         device runs work only where somebody waits for it. The calls come in FSDP2's order, on its
//         streams: copies for a gather, the gather, compute, the reduction. Once as it is, and once
//         without each of the waits.

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
#include "tests/client/scripted_daemon.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal {
namespace {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using protocol::Op;
using testing::FakeCuda;

constexpr uint32_t kUnits = 3;
constexpr uint32_t kParamsOfUnit = 2;
constexpr uint64_t kElemsOfParam = kGradUnitElems + 128;  // units of cache lines: nothing is padded
constexpr uint64_t kElemsOfUnit = kParamsOfUnit * kElemsOfParam;
constexpr uint64_t kUnitBytes = kElemsOfUnit * sizeof(float);
constexpr uint32_t kSlots = 2 * kUnits;  // leases at once
constexpr uint64_t kStepBytes = 8192;
constexpr Timeout kTimeout = kTestDeadline;

// One value for each purpose: an element that is another one's, of another step or poison is seen.
float WeightOf(uint64_t step, uint32_t partition, uint64_t elem) {
  return static_cast<float>(step * 1000003 + partition * 100003 + elem);
}
float GradientOf(uint64_t step, uint32_t param, uint64_t elem) {
  return -static_cast<float>(step * 1000003 + param * 100003 + elem);
}

// Parameter 3 has a gradient in odd steps alone.
bool HasGradient(uint64_t step, uint32_t param) { return param != 3 || step % 2 == 1; }

std::shared_ptr<gpu::Device> StartDevice(const FakeCuda::Options& options = {}) {
  FakeCuda::Start(options);
  return gpu::CudaDevice::Create({.library = FakeCuda::Library()}).value();
}

enum class Flush : uint8_t { kEachUnit, kAtTheEnd };

// A rank that trains, and the daemon's end of its ring.
class Training {
 public:
  Training(std::shared_ptr<gpu::Device> device, uint64_t grad_bytes, Flush flush)
      : device_(std::move(device)), flush_(flush) {
    protocol::LayoutSpec spec{.dtype = protocol::DType::kFloat32,
                              .optimizer = protocol::Optimizer::kAdamW,
                              .format = protocol::Format::kFp32,
                              .params = {},
                              .group_names = {},
                              .partitions = {}};
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      spec.group_names.push_back("g" + std::to_string(unit));
      protocol::PartitionSpec partition{.group = unit, .boxes = {}};
      for (uint32_t i = 0; i < kParamsOfUnit; ++i) {
        const auto param = static_cast<uint32_t>(spec.params.size());
        spec.params.push_back(
            {.name = "p" + std::to_string(param), .shape = {kElemsOfParam}, .group = unit});
        partition.boxes.push_back({.param = param,
                                   .first_elem = 0,
                                   .run_elems = kElemsOfParam,
                                   .stride_elems = kElemsOfParam});
      }
      spec.partitions.push_back(partition);
    }
    const auto layout =
        std::make_shared<const protocol::Layout>(protocol::Layout::Create(std::move(spec)).value());
    weights_ = Mapping::MapPrivate(std::max(layout->weights_bytes(), kSlots * kUnitBytes)).value();
    Poison(weights_->bytes());
    grad_ = Mapping::MapPrivate(grad_bytes + kStepBytes).value();
    Poison(grad_->bytes());
    gauge_ = std::make_shared<SessionGauge>();
    SessionParts parts{.layout = layout,
                       .port = {.channel = protocol::MakeRingClientChannel(daemon_.Ends()).value(),
                                .daemon_pidfd = -1,
                                .gone_fd = daemon_.gone_fd(),
                                .explain =
                                    [](const Completion& completion) {
                                      return protocol::MakeError(
                                          static_cast<ErrorId>(completion.error),
                                          "as the script says");
                                    }},
                       .weights = weights_,
                       .grad = grad_,
                       .step_region_offset = grad_bytes,
                       .step_region_bytes = kStepBytes,
                       .gauge = gauge_,
                       .timeout = kTimeout,
                       .interrupt_check = {},
                       .device = device_};
    FakeCuda::set_before_work([this] { WaitForDaemon(); });
    daemon_.Start([this](const Command& command) { return std::optional(Serve(command)); });
    session_ = Attachment::Assemble(std::move(parts)).value();
    for (std::unique_ptr<gpu::Stream>* stream : {&copy_in_, &gather_, &compute_, &reduce_}) {
      *stream = device_->MakeStream().value();
    }
  }
  ~Training() {
    session_.reset();
    FakeCuda::set_counts_waits(false);
    for (std::unique_ptr<gpu::Stream>* stream : {&copy_in_, &gather_, &compute_, &reduce_}) {
      stream->reset();
    }
    FakeCuda::set_before_work({});
    daemon_.Stop();
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // Two steps, then masters are written. What went wrong; empty: nothing.
  std::vector<std::string> Run() {
    for (uint64_t step = 1; step <= 2; ++step) {
      Forward();
      Backward(step);
      // FSDP2 may prefetch what it does not use.
      const FakeCuda::Memory dropped = step == 1 ? Prefetch(0) : nullptr;
      const std::array<protocol::HyperParams, 1> hyper{};
      Note(session_->Step(step, hyper, 0, {}, kTimeout).status(), "Step");
      CheckGradients(step);
      if (dropped != nullptr) CheckWeights(step - 1, 0, *dropped, "a prefetch that was dropped");
      EndOfPass(step - 1);
    }
    Forward();
    const std::vector<float> masters(kElemsOfUnit, 1.0F);
    Note(session_->WriteMasters(kUnits - 1, 0, masters, kTimeout), "WriteMasters");
    Note(session_->Detach(), "Detach");
    return std::move(wrong_);
  }

  Attachment& session() { return *session_; }
  ScriptedDaemon& daemon() { return daemon_; }
  gpu::Stream& copy_in() { return *copy_in_; }
  std::shared_ptr<Mapping> grad() { return grad_; }

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
  static void Poison(std::span<std::byte> bytes) { std::ranges::fill(bytes, FakeCuda::kPoison); }
  void Note(const absl::Status& status, const std::string& what) {
    if (!status.ok()) wrong_.push_back(what + ": " + std::string(status.message()));
  }
  // FSDP2's own events and waits are not left out.
  void Follow(gpu::Stream& before, gpu::Stream& after) {
    FakeCuda::set_counts_waits(false);
    const auto event = before.Record().value();
    EXPECT_OK(after.WaitFor(*event));
    FakeCuda::set_counts_waits(true);
  }
  // Until the caller's streams have been synchronised.
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
    const std::span<const float> values(reinterpret_cast<const float*>(bytes.data()), kElemsOfUnit);
    for (uint64_t i = 0; i < values.size(); ++i) {
      if (values[i] == WeightOf(step, unit, i)) continue;
      wrong_.push_back(what + " has other weights of unit " + std::to_string(unit));
      return;
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

  // ------------------------------------------------------------------ the daemon, on its own thread

  Completion Serve(const Command& command) {
    Completion completion = ScriptedDaemon::Success(command);
    const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
    switch (static_cast<Op>(command.op)) {
      case Op::kFetch: {
        if (leases_.size() == kSlots) return ScriptedDaemon::Failure(command, ErrorId::kLimit);
        // A slot that was given back is not the next one's: its poison is seen.
        uint32_t slot = last_slot_;
        do {
          slot = (slot + 1) % kSlots;
        } while (leases_.contains(slot));
        last_slot_ = slot;
        leases_[slot] = command.partition;
        const auto to = SlotBytes(slot);
        for (uint64_t i = 0; i < kElemsOfUnit; ++i) {
          const float value = WeightOf(step_, command.partition, i);
          std::memcpy(to.data() + i * sizeof(float), &value, sizeof(value));
        }
        completion.lease_id = slot;
        completion.offset_bytes = slot * kUnitBytes;
        completion.length_bytes = kUnitBytes;
        return completion;
      }
      case Op::kRelease:
        leases_.erase(static_cast<uint32_t>(command.lease_id));
        Poison(SlotBytes(static_cast<uint32_t>(command.lease_id)));
        return completion;
      case Op::kGradReady: {
        std::vector<float> values(bytes.size() / sizeof(float));
        std::memcpy(values.data(), bytes.data(), bytes.size());
        if (command.attempt >= attempt_) {
          if (command.attempt > attempt_) delivered_.clear();
          attempt_ = command.attempt;
          delivered_[{command.partition, command.element_offset}] = std::move(values);
        }
        Poison(bytes);
        return completion;
      }
      case Op::kStep:
        if (!leases_.empty()) return ScriptedDaemon::Failure(command, ErrorId::kLease);
        completion.committed_step = step_ = command.step;
        attempt_ = 0;
        committed_.swap(delivered_);
        delivered_.clear();
        return completion;
      case Op::kWriteMasters:
        for (const auto& [slot, partition] : leases_) {
          if (partition == command.partition) {
            return ScriptedDaemon::Failure(command, ErrorId::kLease);
          }
        }
        return completion;
      default:
        return completion;
    }
  }
  std::span<std::byte> SlotBytes(uint32_t slot) {
    return weights_->bytes().subspan(slot * kUnitBytes, kUnitBytes);
  }
  // What was sent is what the daemon has looked at: nothing that happens later excuses it.
  void WaitForDaemon() {
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    while (daemon_.SeenCount() < gauge_->commands && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  }
  void CheckGradients(uint64_t step) {
    uint64_t elems = 0;
    for (const auto& [place, values] : committed_) {
      elems += values.size();
      for (uint64_t i = 0; i < values.size(); ++i) {
        const uint64_t elem = place.second + i;
        const auto param =
            static_cast<uint32_t>(place.first * kParamsOfUnit + elem / kElemsOfParam);
        const float want =
            HasGradient(step, param) ? GradientOf(step, param, elem % kElemsOfParam) : 0.0F;
        if (values[i] == want) continue;
        wrong_.push_back("another gradient of parameter " + std::to_string(param));
        break;
      }
    }
    // Of parameter 3 whole units are not delivered where it has none.
    const uint64_t least = kUnits * kElemsOfUnit - (HasGradient(step, 3) ? 0 : kElemsOfParam);
    if (elems < least) wrong_.emplace_back("a gradient did not arrive");
  }

  std::shared_ptr<gpu::Device> device_;
  const Flush flush_;
  std::shared_ptr<Mapping> weights_;
  std::shared_ptr<Mapping> grad_;
  std::shared_ptr<SessionGauge> gauge_;
  ScriptedDaemon daemon_;
  std::unique_ptr<Attachment> session_;
  std::unique_ptr<gpu::Stream> copy_in_;
  std::unique_ptr<gpu::Stream> gather_;
  std::unique_ptr<gpu::Stream> compute_;
  std::unique_ptr<gpu::Stream> reduce_;
  std::vector<FakeCuda::Memory> kept_;
  std::vector<std::pair<uint32_t, FakeCuda::Memory>> used_;  // by unit
  std::vector<std::string> wrong_;
  // Of the daemon's thread until Step has returned.
  std::map<uint32_t, uint32_t> leases_;  // slots, to their partitions
  uint32_t last_slot_ = 0;
  uint64_t step_ = 0;
  uint64_t attempt_ = 0;
  using Delivered = std::map<std::pair<uint32_t, uint64_t>, std::vector<float>>;
  Delivered delivered_;
  Delivered committed_;
};

struct CopiesCase {
  std::string name;
  uint64_t pieces = 0;  // that the grad arena has room for
  Flush flush = Flush::kEachUnit;
};

void PrintTo(const CopiesCase& one, std::ostream* out) { *out << one.name; }

class DeviceCopies : public ::testing::TestWithParam<CopiesCase> {
 protected:
  std::vector<std::string> Train(const std::shared_ptr<gpu::Device>& device) const {
    return Training(device, GetParam().pieces * kUnitBytes, GetParam().flush).Run();
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

// A slot that is private memory needs none: the device is done with it when the copy has begun.
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

// What the arena holds where the first piece lies, after a gradient that was dropped.
float ElementAfterADrop(std::optional<size_t> left_out) {
  Training training(StartDevice(), 2 * kUnitBytes, Flush::kEachUnit);
  if (left_out.has_value()) FakeCuda::LeaveOut(*left_out);
  training.Gradient(1, 1);
  EXPECT_OK(training.session().DropGradients());
  float element = 0;
  std::memcpy(&element, training.grad()->bytes().data() + kElemsOfParam * sizeof(float),
              sizeof(element));
  return element;
}

TEST(DroppedGradients, AreNoLongerOnTheirWayIntoSlotsThatAreFree) {
  EXPECT_EQ(ElementAfterADrop(std::nullopt), GradientOf(1, 1, 0));
  constexpr size_t kAfterTheCopy = 2;  // after what it waits for, which are two
  EXPECT_NE(ElementAfterADrop(kAfterTheCopy), GradientOf(1, 1, 0)) << "its event was not needed";
}

TEST(DeviceCopiesInACall, EndWhileItWaitsForRoomOfTheirs) {
  Training training(StartDevice({.looks_until_done = 100}), 2 * kUnitBytes, Flush::kEachUnit);
  for (uint32_t param = 0; param < kUnits * kParamsOfUnit; ++param) training.Gradient(param, 1);
  EXPECT_EQ(training.session().counters().private_slots, 0U);
  training.daemon().WaitForCommands(kUnits);
}

TEST(DeviceCopiesInACall, EndBeforeTheStepIsSent) {
  Training training(StartDevice(), 2 * kUnitBytes, Flush::kEachUnit);
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
  Training training(StartDevice(), 2 * kUnitBytes, Flush::kEachUnit);
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
