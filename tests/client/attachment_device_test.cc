// SPDX-License-Identifier: Apache-2.0
// Goal    Ranks whose gradients and weights are on a device train to the reference's bits, whatever memory the device takes. If
//         a device fails, its rank returns an error, the other ranks hear of the loss, and the job continues at its committed
//         step when its ranks attach again.
// Method  Daemon and clients are threads of one process. CUDA is a driver that runs work only when it must.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_thread.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using testing::FakeCuda;
using testing::HasError;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Timeout kTimeout = std::chrono::seconds(60);
constexpr uint64_t kSeed = 3;
constexpr uint64_t kSteps = 4;
const std::vector<uint32_t> kAllGroups{0, 1, 2};

std::shared_ptr<gpu::Device> StartDevice(const FakeCuda::Options& options) {
  FakeCuda::Start(options);
  return gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value();
}

// A rank, and the stream that it computes on.
struct Rank {
  std::unique_ptr<Attachment> session;
  std::unique_ptr<gpu::Stream> stream;
  uint32_t number = 0;
};

class AttachmentDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, testing::StartDaemonThread(dir_.path() + "/s"));
  }

  absl::StatusOr<Rank> Attach(uint32_t number, const std::shared_ptr<gpu::Device>& device) {
    Rank rank{.session = {}, .stream = {}, .number = number};
    ASSIGN_OR_RETURN(rank.session, Attachment::Attach({.socket = dir_.path() + "/s",
                                                       .job = "job",
                                                       .rank = number,
                                                       .world_size = 2,
                                                       .run = "run",
                                                       .layout = testing::MakeLayoutSpec({}),
                                                       .memory = {.extra_state_bytes = 4096},
                                                       .timeout = kTimeout,
                                                       .device = device}));
    ASSIGN_OR_RETURN(rank.stream, device->MakeStream());
    Attachment& session = *rank.session;
    if (!session.writes_initial()) return rank;
    for (const uint32_t group : kAllGroups) {
      const auto values = testing::MakeValues(session.layout(), group, kSeed);
      RETURN_IF_ERROR(session.WriteInitial(group, values, kTimeout));
    }
    RETURN_IF_ERROR(session.InitialDone(kTimeout));
    return rank;
  }

  // Delivers the gradient of each parameter from device memory that the caller frees at once.
  static absl::Status Deliver(Rank& rank, uint64_t t) {
    const protocol::Layout& layout = rank.session->layout();
    for (uint32_t param = 0; param < layout.params().size(); ++param) {
      const protocol::ParamPlace& place = layout.params()[param];
      const auto whole = testing::MakeGradient(layout, place.group, rank.number, t);
      const uint64_t size_bytes = place.elems * sizeof(float);
      const FakeCuda::Memory gradient = FakeCuda::Allocate(size_bytes);
      std::memcpy(gradient->data(), whole.data() + place.offset_elems * sizeof(float), size_bytes);
      RETURN_IF_ERROR(
          rank.session->AddGradient(param, *gradient, *rank.stream, gradient, kTimeout));
    }
    return absl::OkStatus();
  }
  static absl::Status Step(Rank& rank, uint64_t t) {
    return rank.session->Step(t, testing::MakeHyperParams(), 0, {}, kTimeout).status();
  }
  static absl::Status DeliverAndStep(Rank& rank, uint64_t t) {
    RETURN_IF_ERROR(Deliver(rank, t));
    return Step(rank, t);
  }
  // Copies the weights of all groups to the device and compares them with the reference.
  static void ExpectWeights(Rank& rank, const testing::ReferenceTrainer& reference) {
    for (const uint32_t group : kAllGroups) {
      const auto want = reference.Weights(group);
      const FakeCuda::Memory to = FakeCuda::Allocate(want.size());
      const std::vector<WeightsCopy> copies{{.partition = group, .first_elem = 0, .to = *to}};
      ASSERT_OK(rank.session->CopyWeights(copies, *rank.stream, kTimeout));
      ASSERT_OK(rank.stream->Synchronize());
      EXPECT_TRUE(std::ranges::equal(*to, want)) << "group " << group;
    }
  }
  // Runs the steps `first` to `last` on both ranks and compares their weights with the reference.
  static void Train(Rank& rank0, Rank& rank1, uint64_t first, uint64_t last,
                    testing::ReferenceTrainer& reference) {
    for (uint64_t t = first; t <= last; ++t) {
      absl::Status other;
      std::thread thread([&] { other = DeliverAndStep(rank1, t); });
      const absl::Status own = DeliverAndStep(rank0, t);
      thread.join();
      ASSERT_OK(own);
      ASSERT_OK(other);
      reference.Step(t, testing::MakeHyperParams(), 0, kAllGroups);
      ExpectWeights(rank0, reference);
      ExpectWeights(rank1, reference);
    }
  }

  const protocol::Layout layout_ = protocol::Layout::Create(testing::MakeLayoutSpec({})).value();
  testing::TempDir dir_;
  std::unique_ptr<daemon::Daemon> daemon_;
};

class AttachmentOnDevices : public AttachmentDeviceTest,
                            public ::testing::WithParamInterface<bool> {};

TEST_P(AttachmentOnDevices, TrainsToTheReferencesBits) {
  const bool takes_read_only = GetParam();
  const auto device = StartDevice({.registers_read_only = takes_read_only});
  ASSERT_OK_AND_ASSIGN(Rank rank0, Attach(0, device));
  ASSERT_OK_AND_ASSIGN(Rank rank1, Attach(1, device));
  EXPECT_EQ(FakeCuda::registrations().size(), 4U);
  EXPECT_THAT(rank0.session->device_access(),
              HasSubstr(takes_read_only ? "in place" : "mapped writable once"));
  testing::ReferenceTrainer reference(layout_, 2, kSeed);
  Train(rank0, rank1, 1, kSteps, reference);
  ASSERT_OK(rank0.session->Detach());
  ASSERT_OK(rank1.session->Detach());
  EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(ReadOnlyMemory, AttachmentOnDevices, ::testing::Bool());

TEST_F(AttachmentDeviceTest, MemoryOfAnotherDeviceOrMisalignedIsRefusedAndTheJobGoesOn) {
  const auto device = StartDevice({.devices = 2});
  ASSERT_OK_AND_ASSIGN(Rank rank0, Attach(0, device));
  ASSERT_OK_AND_ASSIGN(Rank rank1, Attach(1, device));
  const uint64_t size_bytes = layout_.params()[0].elems * sizeof(float);
  const FakeCuda::Memory other = FakeCuda::Allocate(size_bytes, 1);
  const FakeCuda::Memory own = FakeCuda::Allocate(size_bytes + 1);
  for (const std::span<std::byte> bytes : {*other, own->subspan(1)}) {
    EXPECT_THAT(rank0.session->AddGradient(0, bytes, *rank0.stream, nullptr, kTimeout),
                HasError(ErrorId::kRange));
    const std::vector<WeightsCopy> copies{{.partition = 0, .first_elem = 0, .to = bytes}};
    EXPECT_THAT(rank0.session->CopyWeights(copies, *rank0.stream, kTimeout),
                HasError(ErrorId::kRange));
  }
  testing::ReferenceTrainer reference(layout_, 2, kSeed);
  Train(rank0, rank1, 1, 2, reference);
}

TEST_F(AttachmentDeviceTest, WhenADeviceFailsTheOtherRanksSayRankLostAndTheJobGoesOn) {
  const auto host = std::make_shared<gpu::HostDevice>();
  ASSERT_OK_AND_ASSIGN(Rank rank0, Attach(0, host));
  ASSERT_OK_AND_ASSIGN(Rank rank1, Attach(1, StartDevice({})));
  testing::ReferenceTrainer reference(layout_, 2, kSeed);
  Train(rank0, rank1, 1, 2, reference);

  FakeCuda::FailCopy(0);
  absl::Status other;
  std::thread waits([&] { other = DeliverAndStep(rank0, 3); });
  const absl::Status failed = DeliverAndStep(rank1, 3);
  waits.join();
  ASSERT_THAT(failed, HasError(ErrorId::kDevice));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
  EXPECT_THAT(other, HasError(ErrorId::kRankLost));
  EXPECT_THAT(Step(rank1, 3), HasError(ErrorId::kDevice));

  rank1 = {};
  rank0 = {};
  ASSERT_OK_AND_ASSIGN(rank0, Attach(0, host));
  ASSERT_OK_AND_ASSIGN(rank1, Attach(1, StartDevice({})));
  EXPECT_EQ(rank0.session->committed_step(), 2U);
  Train(rank0, rank1, 3, kSteps, reference);
}

}  // namespace
}  // namespace forebay::client
