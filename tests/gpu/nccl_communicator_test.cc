// SPDX-License-Identifier: Apache-2.0
// Goal    A machine without NCCL, or with too old a version, gets one clear message on every rank. Each failing NCCL call
//         becomes an error with the call's name. No resource is leaked.
// Method  A fake library with the real symbols, over a fake driver that delays all work. Faults are enumerated: call 0 fails,
//         then call 1, ... until no call fails.

#include "gpu/nccl_communicator.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gtest/gtest.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"

namespace forebay::gpu {
namespace {

using protocol::ErrorId;
using testing::FakeCuda;
using testing::FakeNccl;
using testing::HasError;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::OnRanks;
using testing::ThreadExchange;

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  NcclCommunicatorTest() { Start(); }

  static void Start() {
    FakeCuda::Start();
    FakeNccl::Start();
  }
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(
      uint32_t rank, uint32_t size, const Exchange& exchange,
      const std::string& library = FakeNccl::Library()) {
    ASSIGN_OR_RETURN(auto device, CudaDevice::Create({.soname = FakeCuda::Library()}));
    return NcclCommunicator::Create({.rank = rank,
                                     .size = size,
                                     .time_limit = std::chrono::milliseconds(500),
                                     .soname = library},
                                    std::move(device), exchange);
  }
  // Runs every collective with a single rank. Returns the first error.
  static absl::Status UseAll() {
    ASSIGN_OR_RETURN(const auto device, CudaDevice::Create({.soname = FakeCuda::Library()}));
    ASSIGN_OR_RETURN(const auto stream, device->MakeStream());
    const auto alone = [](const std::string& bytes) {
      return absl::StatusOr<std::vector<std::string>>({bytes});
    };
    ASSIGN_OR_RETURN(const auto ranks, Create(0, 1, alone));
    ASSIGN_OR_RETURN(const auto memory, stream->Allocate(64));
    ASSIGN_OR_RETURN(const auto other, stream->Allocate(64));
    RETURN_IF_ERROR(ranks->AllGather(*stream, other.bytes(), memory.bytes()));
    RETURN_IF_ERROR(ranks->Group([&] {
      return ranks->ReduceScatter(*stream, other.bytes(), memory.bytes(), protocol::DType::kFloat32,
                                  Reduction::kMean);
    }));
    RETURN_IF_ERROR(
        ranks->AllReduce(*stream, other.bytes(), protocol::DType::kBFloat16, Reduction::kSum));
    RETURN_IF_ERROR(stream->Synchronize());
    return ranks->Check();
  }
};

TEST_F(NcclCommunicatorTest, WithoutTheLibraryEveryRankSaysSo) {
  ThreadExchange exchange(2);
  const auto results = OnRanks(2, [&](uint32_t rank) {
    const std::string library = rank == 1 ? "libnccl-nowhere.so.2" : FakeNccl::Library();
    return Create(rank, 2, exchange.Of(rank), library).status();
  });
  for (const absl::Status& status : results) EXPECT_THAT(status, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("rank 1 has no NCCL"));
  EXPECT_THAT(std::string(results[1].message()), HasSubstr("libnccl-nowhere.so.2"));
  EXPECT_EQ(FakeNccl::communicators(), 0U);
}

TEST_F(NcclCommunicatorTest, AnOldLibraryIsRefusedWithBothVersions) {
  FakeNccl::set_version(21306);
  ThreadExchange exchange(1);
  const auto made = Create(0, 1, exchange.Of(0));
  ASSERT_THAT(made, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("NCCL 2.13; 2.14 is the least"));
}

TEST_F(NcclCommunicatorTest, ARankThatDoesNotStartIsAnErrorOfTheOthers) {
  ThreadExchange exchange(2);
  const auto results = OnRanks(2, [&](uint32_t rank) -> absl::Status {
    if (rank == 0) return Create(rank, 2, exchange.Of(rank)).status();
    return exchange.Of(1)(std::string(128, 'x')).status();  // and dies
  });
  EXPECT_THAT(results[0], HasError(ErrorId::kRankLost));
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("within 500 ms"));
  EXPECT_EQ(FakeNccl::communicators(), 0U);
}

TEST_F(NcclCommunicatorTest, EveryCallThatFailsIsAnErrorWithItsName) {
  size_t failing = 0;
  for (bool has_failed = true; has_failed; ++failing) {
    ASSERT_LT(failing, 1000U);
    Start();
    FakeNccl::FailCall(failing);
    const absl::Status status = UseAll();
    has_failed = FakeNccl::calls() > failing;
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty()) << failing;
    if (status.ok()) continue;  // failed destructor calls report nothing
    const bool is_version = failing == 0;
    EXPECT_THAT(status, HasError(is_version ? ErrorId::kUnsupported : ErrorId::kDevice)) << failing;
    if (!is_version) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("nccl")) << failing;
    }
    EXPECT_EQ(FakeNccl::communicators(), 0U) << failing;
  }
  EXPECT_GT(failing, 10U);
}

TEST_F(NcclCommunicatorTest, AFailureOnTheDeviceIsAnErrorAndEndsIt) {
  FakeCuda::FailCopy(0);
  const absl::Status status = [] {
    const auto device = CudaDevice::Create({.soname = FakeCuda::Library()}).value();
    const auto stream = device->MakeStream().value();
    ThreadExchange exchange(1);
    const auto ranks = Create(0, 1, exchange.Of(0)).value();
    const auto memory = stream->Allocate(64).value();
    const std::vector<std::byte> bytes(64);
    stream->Copy(memory.bytes(), bytes).IgnoreError();
    return ranks->AllReduce(*stream, memory.bytes(), protocol::DType::kFloat32, Reduction::kSum);
  }();
  EXPECT_THAT(status, HasError(ErrorId::kDevice));
  EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
}

}  // namespace
}  // namespace forebay::gpu
