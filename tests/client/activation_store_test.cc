// SPDX-License-Identifier: Apache-2.0
// Goal    A backward pass loads the bytes that its forward pass has saved, however late the device works. Each event and each
//         wait is needed for this. The room is never exceeded, and all of it is free again at the end.
// Method  CUDA is a driver that runs work only when it must. The test runs once with all waits, and once without each of the
//         waits. Compute is copies between memory that is poisoned when it is freed. The host is tested with random sizes.

#include "client/activation_store.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_thread.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using testing::FakeCuda;
using testing::HasError;
using ::testing::IsEmpty;

using Bytes = std::vector<std::byte>;

constexpr Timeout kTimeout = std::chrono::seconds(30);
constexpr uint64_t kRoomBytes = 16384;

class ActivationStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, testing::StartDaemonThread(dir_.path() + "/s"));
  }
  absl::StatusOr<std::unique_ptr<Attachment>> Attach(std::shared_ptr<gpu::Device> device,
                                                     uint64_t activation_bytes = kRoomBytes,
                                                     uint32_t rank = 0, uint32_t world_size = 1) {
    return Attachment::Attach({.socket = dir_.path() + "/s",
                               .job = "job",
                               .rank = rank,
                               .world_size = world_size,
                               .run = "run",
                               .layout = testing::MakeLayoutSpec({}),
                               .memory = {.activation_bytes = activation_bytes},
                               .timeout = kTimeout,
                               .device = std::move(device)});
  }

  testing::TempDir dir_;
  std::unique_ptr<daemon::Daemon> daemon_;
};

// ------------------------------------------------------------------------------------------ on a device

constexpr size_t kLayers = 5;
constexpr uint64_t kLayerBytes = kRoomBytes / kLayers / 64 * 64;

Bytes ValuesOf(uint64_t step, size_t layer) {
  Bytes values(kLayerBytes);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::byte>(step * 101 + layer * 31 + i * 7 + 1);
  }
  return values;
}

// Trains with one layer loaded ahead. Forward and backward run on two streams, which wait for each other only through the
// store.
class Loop {
 public:
  Loop(const Attachment& attachment, const std::shared_ptr<gpu::Device>& device)
      : forward_(device->MakeStream().value()),
        backward_(device->MakeStream().value()),
        store_(ActivationStore::Create(attachment, device).value()) {
    for (FakeCuda::Memory& buffer : buffers_) buffer = Values(Bytes(kLayerBytes));
  }
  ~Loop() {
    FakeCuda::set_counts_waits(false);
    store_.reset();
    forward_.reset();
    backward_.reset();
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Trains two steps. Returns the errors; empty if there are none.
  std::vector<std::string> Run() {
    Read(0);
    for (uint64_t step = 1; step <= 2; ++step) {
      for (size_t layer = 0; layer < kLayers; ++layer) Forward(step, layer);
      StartLoad(step, kLayers - 1);
      for (size_t layer = kLayers; layer-- > 0;) Backward(step, layer);
    }
    Compare();
    if (store_->used_bytes() != 0) wrong_.push_back("room that is not given back");
    return wrong_;
  }

 private:
  struct Pending {
    uint64_t number = 0;
    FakeCuda::Memory memory;
  };
  using Place = std::pair<uint64_t, size_t>;  // step and layer; step 0: zeros

  void Note(const absl::Status& status) {
    if (!status.ok()) wrong_.push_back(std::string(status.message()));
  }
  FakeCuda::Memory Values(const Bytes& values) {
    const FakeCuda::Memory& made = kept_.emplace_back(FakeCuda::Allocate(values.size()));
    std::ranges::copy(values, made->begin());
    return made;
  }
  void Forward(uint64_t step, size_t layer) {
    const FakeCuda::Memory memory = FakeCuda::Allocate(kLayerBytes);
    Note(forward_->Copy(*memory, *Values(ValuesOf(step, layer))));
    const auto number = store_->Save(*memory, *forward_);
    Note(number.status());
    if (!number.ok() || !number->has_value()) return wrong_.push_back("no room");
    numbers_[layer] = **number;
    pending_.push_back({.number = **number, .memory = memory});
    if (pending_.size() < 2) return;
    const Pending oldest = std::move(pending_.front());
    pending_.pop_front();
    if (layer % 2 == 0) {  // even layers: the oldest's memory is overwritten behind its copy
      Note(store_->LeaveBehind(oldest.number, *forward_));
      Note(forward_->Copy(*oldest.memory, *Values(Bytes(kLayerBytes))));
      kept_.push_back(oldest.memory);
      return;
    }
    while (true) {  // odd layers: the oldest's memory is freed once its copy has ended
      const absl::StatusOr<bool> has_left = store_->HasLeft(oldest.number);
      Note(has_left.status());
      if (!has_left.ok() || *has_left) return;
    }
  }
  // Starts to load a layer into one of two buffers. The backward stream has read this buffer before.
  void StartLoad(uint64_t step, size_t layer) {
    Note(store_->Load(numbers_[layer], *buffers_[layer % 2], *backward_));
    holds_[layer % 2] = {step, layer};
  }
  void Backward(uint64_t step, size_t layer) {
    if (layer == kLayers - 1) Read((layer - 1) % 2);
    if (layer > 0) StartLoad(step, layer - 1);
    Note(store_->LoadedFor(numbers_[layer], *backward_));
    Read(layer % 2);
    Note(store_->Drop(numbers_[layer]));
    std::erase_if(pending_, [&](Pending& one) {
      if (one.number != numbers_[layer]) return false;
      kept_.push_back(one.memory);  // lives until the end: its copy may be under way
      return true;
    });
  }
  void Read(size_t buffer) {
    saw_.emplace_back(holds_[buffer], FakeCuda::Allocate(kLayerBytes));
    Note(backward_->Copy(*saw_.back().second, *buffers_[buffer]));
  }
  void Compare() {
    FakeCuda::set_counts_waits(false);
    Note(forward_->Synchronize());
    Note(backward_->Synchronize());
    FakeCuda::set_counts_waits(true);
    for (const auto& [of, memory] : saw_) {
      const auto [step, layer] = of;
      const Bytes want = step == 0 ? Bytes(kLayerBytes) : ValuesOf(step, layer);
      if (std::ranges::equal(*memory, want)) continue;
      wrong_.push_back("other values of layer " + std::to_string(layer));
    }
  }

  std::unique_ptr<gpu::Stream> forward_;
  std::unique_ptr<gpu::Stream> backward_;
  std::unique_ptr<ActivationStore> store_;
  std::array<FakeCuda::Memory, 2> buffers_;
  std::array<Place, 2> holds_{};  // step and layer whose values each buffer holds
  std::vector<std::pair<Place, FakeCuda::Memory>> saw_;
  std::array<uint64_t, kLayers> numbers_{};
  std::deque<Pending> pending_;
  std::vector<FakeCuda::Memory> kept_;
  std::vector<std::string> wrong_;
};

class ActivationStoreOnADevice : public ActivationStoreTest {
 protected:
  std::vector<std::string> Train(const FakeCuda::Options& options,
                                 std::optional<size_t> left_out = std::nullopt) {
    FakeCuda::Start(options);
    FakeCuda::set_counts_waits(false);
    const std::shared_ptr<gpu::Device> device =
        gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
    const std::unique_ptr<Attachment> attachment = Attach(device).value();
    FakeCuda::set_counts_waits(true);
    if (left_out.has_value()) FakeCuda::LeaveOut(*left_out);
    return Loop(*attachment, device).Run();
  }
  // Options of a device on which all work is as late as possible, and of devices with every choice of late streams.
  static std::vector<FakeCuda::Options> Devices() {
    constexpr uint64_t kStreams = 4;  // two streams of the loop, and two of the store
    std::vector<FakeCuda::Options> devices{{}};
    for (uint64_t streams = 0; streams < uint64_t{1} << kStreams; ++streams) {
      devices.push_back({.late_streams = streams << 1});  // the session's stream is the first
    }
    return devices;
  }
  bool IsNoticed(size_t wait) {
    return std::ranges::any_of(Devices(), [&](const FakeCuda::Options& options) {
      return !Train(options, wait).empty() || !FakeCuda::mistakes().empty();
    });
  }
};

TEST_F(ActivationStoreOnADevice, EachWaitIsNeeded) {
  size_t waits = 0;
  for (const FakeCuda::Options& options : Devices()) {
    ASSERT_THAT(Train(options), IsEmpty());
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
    waits = std::max(waits, FakeCuda::waits());
  }
  EXPECT_GT(waits, 40U);
  for (size_t wait = 0; wait < waits; ++wait) {
    EXPECT_TRUE(IsNoticed(wait)) << "without wait " << wait << " of " << waits;
  }
}

TEST_F(ActivationStoreOnADevice, WaitsAreEnoughInAnyOrderThatStreamsAllow) {
  constexpr uint64_t kSeeds = 20;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EXPECT_THAT(Train({.seed = seed}), IsEmpty()) << "seed " << seed;
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty()) << "seed " << seed;
    EXPECT_EQ(FakeCuda::leftovers(), FakeCuda::Leftovers());
  }
}

TEST_F(ActivationStoreOnADevice, OutlivesItsAttachment) {
  FakeCuda::Start();
  const std::shared_ptr<gpu::Device> device =
      gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
  ASSERT_OK_AND_ASSIGN(auto attachment, Attach(device));
  ASSERT_OK_AND_ASSIGN(auto store, ActivationStore::Create(*attachment, device));
  ASSERT_OK_AND_ASSIGN(const auto compute, device->MakeStream());
  const FakeCuda::Memory memory = FakeCuda::Allocate(100);
  ASSERT_OK(store->Save(*memory, *compute));
  ASSERT_OK(attachment->Detach());
  EXPECT_TRUE(attachment->activation_room().empty());
  attachment.reset();
  store.reset();
  EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
}

TEST_F(ActivationStoreOnADevice, ThatFailsSaysSoAndKeepsNothing) {
  FakeCuda::Start();
  const std::shared_ptr<gpu::Device> device =
      gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
  ASSERT_OK_AND_ASSIGN(const auto attachment, Attach(device));
  ASSERT_OK_AND_ASSIGN(const auto store, ActivationStore::Create(*attachment, device));
  ASSERT_OK_AND_ASSIGN(const auto compute, device->MakeStream());
  const FakeCuda::Memory memory = FakeCuda::Allocate(100);
  const size_t before = FakeCuda::calls();
  ASSERT_OK_AND_ASSIGN(const auto number, store->Save(*memory, *compute));
  const size_t calls = FakeCuda::calls() - before;
  ASSERT_OK(store->Drop(*number));
  size_t failures = 0;
  for (size_t call = 0; call < calls; ++call) {
    FakeCuda::FailCall(FakeCuda::calls() + call);
    const auto saved = store->Save(*memory, *compute);
    if (saved.ok()) {  // the call that failed was not needed
      ASSERT_OK(store->Drop(**saved));
      continue;
    }
    EXPECT_THAT(saved, HasError(ErrorId::kDevice));
    EXPECT_EQ(store->used_bytes(), 0U);
    ++failures;
  }
  EXPECT_GT(failures, 3U);
}

// ------------------------------------------------------------------------------------------ on the host

TEST_F(ActivationStoreTest, HoldsRandomSizesWithinItsRoom) {
  const auto device = std::make_shared<gpu::HostDevice>();
  ASSERT_OK_AND_ASSIGN(const auto attachment, Attach(device));
  ASSERT_OK_AND_ASSIGN(const auto store, ActivationStore::Create(*attachment, device));
  ASSERT_OK_AND_ASSIGN(const auto compute, device->MakeStream());
  std::mt19937_64 random(11);
  std::map<uint64_t, Bytes> saved;
  size_t refused = 0;
  for (int turn = 0; turn < 4000; ++turn) {
    if (random() % 2 == 0) {
      Bytes bytes(random() % 3000);
      std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
      ASSERT_OK_AND_ASSIGN(const auto number, store->Save(bytes, *compute));
      if (!number.has_value()) {
        ++refused;
        continue;
      }
      EXPECT_TRUE(store->HasLeft(*number).value());
      saved[*number] = std::move(bytes);
    } else if (!saved.empty()) {
      const auto one = std::next(saved.begin(), static_cast<ptrdiff_t>(random() % saved.size()));
      if (random() % 2 == 0) {
        ASSERT_OK(store->Drop(one->first));
      } else {
        Bytes got(one->second.size());
        ASSERT_OK(store->Load(one->first, got, *compute));
        ASSERT_OK(store->LoadedFor(one->first, *compute));
        ASSERT_EQ(got, one->second);
        continue;
      }
      saved.erase(one);
    }
    EXPECT_LE(store->used_bytes(), kRoomBytes);
  }
  EXPECT_GT(refused, 10U);
  for (const auto& [number, bytes] : saved) ASSERT_OK(store->Drop(number));
  ASSERT_OK_AND_ASSIGN(const auto whole, store->Save(Bytes(kRoomBytes), *compute));
  EXPECT_TRUE(whole.has_value()) << "the room is in pieces";
  EXPECT_EQ(store->used_bytes_max(), kRoomBytes);
}

TEST_F(ActivationStoreTest, BytesThatTheDaemonTookBackAreAnErrorAndNotZeros) {
  const auto device = std::make_shared<gpu::HostDevice>();
  ASSERT_OK_AND_ASSIGN(const auto attachment, Attach(device));
  ASSERT_OK_AND_ASSIGN(const auto store, ActivationStore::Create(*attachment, device));
  ASSERT_OK_AND_ASSIGN(const auto compute, device->MakeStream());
  const Bytes bytes(1000, std::byte{7});
  ASSERT_OK_AND_ASSIGN(const auto number, store->Save(bytes, *compute));
  Bytes got(bytes.size());
  ASSERT_OK(store->Load(number.value(), got, *compute));
  ASSERT_OK(attachment->Detach());
  // The daemon frees the memory some time after the session ends. Until then Load() reads the saved bytes.
  EXPECT_TRUE(testing::Eventually([&] {
    const absl::Status loaded = store->Load(*number, got, *compute);
    EXPECT_TRUE(!loaded.ok() || got == bytes);
    if (!loaded.ok()) {
      EXPECT_THAT(loaded, HasError(ErrorId::kFenced));
    }
    return !loaded.ok();
  }));
  EXPECT_THAT(store->LoadedFor(*number, *compute), HasError(ErrorId::kFenced));
}

TEST_F(ActivationStoreTest, AnotherDeviceThanTheSessionsIsRefused) {
  const auto device = std::make_shared<gpu::HostDevice>();
  ASSERT_OK_AND_ASSIGN(const auto attachment, Attach(device));
  FakeCuda::Start();
  const std::shared_ptr<gpu::Device> other =
      gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
  EXPECT_THAT(ActivationStore::Create(*attachment, other), HasError(ErrorId::kOption));
  EXPECT_THAT(ActivationStore::Create(*attachment, nullptr), HasError(ErrorId::kOption));
}

TEST_F(ActivationStoreTest, WrongCallsAreRefusedAndTheNextWork) {
  const auto device = std::make_shared<gpu::HostDevice>();
  ASSERT_OK_AND_ASSIGN(const auto attachment, Attach(device));
  ASSERT_OK_AND_ASSIGN(const auto store, ActivationStore::Create(*attachment, device));
  ASSERT_OK_AND_ASSIGN(const auto compute, device->MakeStream());
  const Bytes bytes(100, std::byte{7});
  Bytes to(100);
  Bytes other(99);
  ASSERT_OK_AND_ASSIGN(const auto number, store->Save(bytes, *compute));
  EXPECT_THAT(store->Load(*number + 1, to, *compute), HasError(ErrorId::kRange));
  EXPECT_THAT(store->LoadedFor(*number, *compute), HasError(ErrorId::kNotReady));
  EXPECT_THAT(store->Load(*number, other, *compute), HasError(ErrorId::kRange));
  ASSERT_OK(store->Load(*number, to, *compute));
  ASSERT_OK(store->LoadedFor(*number, *compute));
  EXPECT_EQ(to, bytes);
  ASSERT_OK(store->Drop(*number));
  EXPECT_THAT(store->HasLeft(*number), HasError(ErrorId::kRange));
  EXPECT_THAT(store->LeaveBehind(*number, *compute), HasError(ErrorId::kRange));
  EXPECT_THAT(store->Drop(*number), HasError(ErrorId::kRange));
}

TEST_F(ActivationStoreTest, WithoutRoomNothingIsSaved) {
  const auto device = std::make_shared<gpu::HostDevice>();
  ASSERT_OK_AND_ASSIGN(const auto attachment, Attach(device, 0));
  ASSERT_OK_AND_ASSIGN(const auto store, ActivationStore::Create(*attachment, device));
  ASSERT_OK_AND_ASSIGN(const auto compute, device->MakeStream());
  EXPECT_EQ(store->room_bytes(), 0U);
  ASSERT_OK_AND_ASSIGN(const auto number, store->Save(Bytes(1), *compute));
  EXPECT_FALSE(number.has_value());
}

TEST_F(ActivationStoreTest, RoomThatTheLimitDoesNotHaveIsRefusedWithTheSum) {
  const auto device = std::make_shared<gpu::HostDevice>();
  for (const uint64_t bytes : {uint64_t{1} << 40, UINT64_MAX}) {
    const auto attachment = Attach(device, bytes);
    ASSERT_THAT(attachment, HasError(ErrorId::kDramLimit));
    EXPECT_THAT(std::string(attachment.status().message()), ::testing::HasSubstr("activations"));
  }
  EXPECT_OK(Attach(device));
}

TEST_F(ActivationStoreTest, LaterSessionsHaveTheRoomOfTheFirst) {
  const auto device = std::make_shared<gpu::HostDevice>();
  ASSERT_OK_AND_ASSIGN(const auto first, Attach(device, kRoomBytes, 0, 2));
  const auto more = Attach(device, kRoomBytes + 1, 1, 2);
  ASSERT_THAT(more, HasError(ErrorId::kRange));
  EXPECT_THAT(std::string(more.status().message()), ::testing::HasSubstr("activations"));
}

}  // namespace
}  // namespace forebay::client
