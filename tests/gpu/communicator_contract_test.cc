// SPDX-License-Identifier: Apache-2.0
// Goal    Every communicator meets the contract of gpu/communicator.h: the right bytes in the right order, and errors on all
//         ranks instead of endless waits.
// Method  Ranks are threads. NCCL runs over fake drivers that delay all work or run it in random orders; the real NCCL runs if
//         there are GPUs, with one rank per GPU. Elements are small integers, so that every sum is exact in every type and
//         order; results are compared bit by bit.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/communicator.h"
#include "gpu/cuda_device.h"
#include "gpu/host_communicator.h"
#include "gpu/host_device.h"
#include "gpu/nccl_communicator.h"
#include "gtest/gtest.h"
#include "protocol/float16.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"

namespace forebay::gpu {
namespace {

using protocol::DType;
using protocol::ErrorId;
using testing::FakeCuda;
using testing::FakeNccl;
using testing::HasError;
using testing::OnRanks;
using testing::ThreadExchange;

using Bytes = std::vector<std::byte>;

// A rank's communicator, device and stream.
struct Rank {
  std::shared_ptr<Device> device;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Communicator> communicator;
};

struct Options {
  uint32_t rank = 0;
  uint32_t size = 1;
  std::chrono::milliseconds time_limit = std::chrono::seconds(60);
};

struct CommunicatorCase {
  std::string name;
  std::function<void()> start;  // runs before the ranks start
  std::function<absl::StatusOr<Rank>(const Options&, const Exchange&)> make;
  uint32_t ranks_max = UINT32_MAX;
};

// The host's collectives and the fake NCCL always run. The real NCCL needs one GPU per rank.
constexpr const char* kOneGpu = "this machine has one GPU, and NCCL wants one for each rank";

void PrintTo(const CommunicatorCase& one, std::ostream* out) { *out << one.name; }

absl::StatusOr<Rank> MakeHost(const Options& options, const Exchange& exchange) {
  Rank rank{.device = std::make_shared<HostDevice>(), .stream = {}, .communicator = {}};
  ASSIGN_OR_RETURN(rank.stream, rank.device->MakeStream());
  ASSIGN_OR_RETURN(rank.communicator, HostCommunicator::Create({.rank = options.rank,
                                                                .size = options.size,
                                                                .time_limit = options.time_limit},
                                                               exchange));
  return rank;
}

absl::StatusOr<Rank> MakeNccl(const Options& options, const Exchange& exchange,
                              const CudaDevice::Options& device_options,
                              const std::string& soname) {
  ASSIGN_OR_RETURN(const auto device, CudaDevice::Create(device_options));
  Rank rank{.device = device, .stream = {}, .communicator = {}};
  ASSIGN_OR_RETURN(rank.stream, device->MakeStream());
  ASSIGN_OR_RETURN(rank.communicator, NcclCommunicator::Create({.rank = options.rank,
                                                                .size = options.size,
                                                                .time_limit = options.time_limit,
                                                                .soname = soname},
                                                               device, exchange));
  return rank;
}

absl::StatusOr<Rank> MakeFakeNccl(const Options& options, const Exchange& exchange) {
  return MakeNccl(options, exchange, {.soname = FakeCuda::Library()}, FakeNccl::Library());
}

// Makes a rank of the real NCCL on the GPU with the rank's number.
absl::StatusOr<Rank> MakeNcclOnGpus(const Options& options, const Exchange& exchange) {
  return MakeNccl(options, exchange, {.ordinal = static_cast<int>(options.rank)},
                  FakeNccl::RealLibrary());
}

uint32_t GpuCount() {
  uint32_t count = 0;
  while (CudaDevice::Create({.ordinal = static_cast<int>(count)}).ok()) ++count;
  return count;
}

std::vector<CommunicatorCase> Communicators() {
  const auto start = [](const FakeCuda::Options& options) {
    return [options] {
      FakeCuda::Start(options);
      FakeNccl::Start();
    };
  };
  std::vector<CommunicatorCase> all{{"Host", start({}), MakeHost},
                                    {"LateNccl", start({}), MakeFakeNccl}};
  constexpr uint64_t kSeeds = 2;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    all.push_back({"RandomNccl" + std::to_string(seed), start({.seed = seed}), MakeFakeNccl});
  }
  const uint32_t gpus = GpuCount();
  if (gpus > 0) all.push_back({"Nccl", start({}), MakeNcclOnGpus, gpus});
  return all;
}

Bytes Encode(DType dtype, const std::vector<float>& values) {
  Bytes bytes(values.size() * SizeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &values[i], sizeof(bits));
    if (dtype == DType::kFloat16) bits = protocol::RoundToFp16(bits);
    if (dtype == DType::kBFloat16) bits >>= 16;
    std::memcpy(bytes.data() + i * SizeBytes(dtype), &bits, SizeBytes(dtype));
  }
  return bytes;
}

// At most 4 ranks contribute at most 7 each: sums up to 28 and means in quarters are exact in 8 bits.
float ElementOf(uint32_t rank, size_t i) { return static_cast<float>((i * (rank + 1) + rank) % 8); }

class CommunicatorContract : public ::testing::TestWithParam<CommunicatorCase> {
 protected:
  using Run = std::function<absl::Status(Rank&)>;

  void TearDown() override {
    EXPECT_EQ(FakeNccl::communicators(), 0U);
    EXPECT_EQ(FakeCuda::leftovers(), FakeCuda::Leftovers());
    EXPECT_EQ(FakeCuda::mistakes(), std::vector<std::string>());
  }

  std::vector<absl::Status> RunRanks(uint32_t size, const Run& run,
                                     std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    GetParam().start();
    ThreadExchange exchange(size);
    return OnRanks(size, [&](uint32_t number) -> absl::Status {
      ASSIGN_OR_RETURN(Rank rank,
                       GetParam().make({.rank = number, .size = size, .time_limit = limit},
                                       exchange.Of(number)));
      return run(rank);
    });
  }
  void ExpectOk(uint32_t size, const Run& run) {
    if (size > GetParam().ranks_max) return;
    for (const absl::Status& status : RunRanks(size, run)) EXPECT_OK(status);
  }

  // Copies `bytes` into new device memory.
  static absl::StatusOr<DeviceMemory> ToDevice(Rank& rank, const Bytes& bytes) {
    ASSIGN_OR_RETURN(auto memory, rank.stream->Allocate(bytes.size()));
    RETURN_IF_ERROR(rank.stream->Copy(memory.bytes(), bytes));
    return memory;
  }
  static absl::StatusOr<Bytes> FromDevice(Rank& rank, std::span<const std::byte> memory) {
    Bytes bytes(memory.size());
    RETURN_IF_ERROR(rank.stream->Copy(bytes, memory));
    RETURN_IF_ERROR(rank.stream->Synchronize());
    RETURN_IF_ERROR(rank.communicator->Check());
    return bytes;
  }
  static Bytes OwnBytes(uint32_t rank, size_t size_bytes) {
    Bytes bytes(size_bytes);
    for (size_t i = 0; i < size_bytes; ++i) {
      bytes[i] = static_cast<std::byte>((i * 7 + rank * 101 + i / 256) % 251);
    }
    return bytes;
  }
  static std::vector<float> Sum(uint32_t size, size_t first, size_t elems, Reduction reduction) {
    std::vector<float> sum(elems);
    for (size_t i = 0; i < elems; ++i) {
      for (uint32_t rank = 0; rank < size; ++rank) sum[i] += ElementOf(rank, first + i);
      if (reduction == Reduction::kMean) sum[i] /= static_cast<float>(size);
    }
    return sum;
  }
  static std::vector<float> Own(uint32_t rank, size_t elems) {
    std::vector<float> values(elems);
    for (size_t i = 0; i < elems; ++i) values[i] = ElementOf(rank, i);
    return values;
  }
};

TEST_P(CommunicatorContract, AllGatherBringsEachRanksPart) {
  for (const uint32_t size : {1U, 2U, 3U}) {
    ExpectOk(size, [&](Rank& rank) -> absl::Status {
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{1100001}}) {
        ASSIGN_OR_RETURN(const auto own,
                         ToDevice(rank, OwnBytes(rank.communicator->rank(), bytes)));
        ASSIGN_OR_RETURN(const auto all, rank.stream->Allocate(bytes * size));
        RETURN_IF_ERROR(rank.communicator->AllGather(*rank.stream, all.bytes(), own.bytes()));
        ASSIGN_OR_RETURN(const Bytes got, FromDevice(rank, all.bytes()));
        for (uint32_t other = 0; other < size; ++other) {
          const Bytes want = OwnBytes(other, bytes);
          const auto part = std::span(got).subspan(other * bytes, bytes);
          EXPECT_TRUE(std::ranges::equal(part, want)) << other << " of " << bytes;
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(CommunicatorContract, AllGatherTakesARanksOwnPartInPlace) {
  constexpr size_t kBytes = 5000;
  ExpectOk(2, [&](Rank& rank) -> absl::Status {
    const uint32_t own = rank.communicator->rank();
    ASSIGN_OR_RETURN(const auto all, rank.stream->Allocate(2 * kBytes));
    const auto part = all.bytes().subspan(own * kBytes, kBytes);
    RETURN_IF_ERROR(rank.stream->Copy(part, OwnBytes(own, kBytes)));
    RETURN_IF_ERROR(rank.communicator->AllGather(*rank.stream, all.bytes(), part));
    ASSIGN_OR_RETURN(const Bytes got, FromDevice(rank, all.bytes()));
    for (uint32_t other = 0; other < 2; ++other) {
      EXPECT_TRUE(std::ranges::equal(std::span(got).subspan(other * kBytes, kBytes),
                                     OwnBytes(other, kBytes)));
    }
    return absl::OkStatus();
  });
}

TEST_P(CommunicatorContract, ReductionsAreExactInEveryType) {
  for (const uint32_t size : {1U, 2U, 4U}) {
    ExpectOk(size, [&](Rank& rank) -> absl::Status {
      const uint32_t own = rank.communicator->rank();
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
          for (const size_t elems : {size_t{0}, size_t{1}, size_t{65}, size_t{140001}}) {
            const Bytes input = Encode(dtype, Own(own, elems * size));
            ASSIGN_OR_RETURN(const auto from, ToDevice(rank, input));
            ASSIGN_OR_RETURN(const auto to, rank.stream->Allocate(elems * SizeBytes(dtype)));
            RETURN_IF_ERROR(rank.communicator->ReduceScatter(*rank.stream, to.bytes(), from.bytes(),
                                                             dtype, reduction));
            ASSIGN_OR_RETURN(const Bytes part, FromDevice(rank, to.bytes()));
            EXPECT_EQ(part, Encode(dtype, Sum(size, own * elems, elems, reduction)))
                << Name(dtype) << " " << elems;
            RETURN_IF_ERROR(
                rank.communicator->AllReduce(*rank.stream, from.bytes(), dtype, reduction));
            ASSIGN_OR_RETURN(const Bytes whole, FromDevice(rank, from.bytes()));
            EXPECT_EQ(whole, Encode(dtype, Sum(size, 0, elems * size, reduction)));
          }
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(CommunicatorContract, ManyCollectivesOfAllKindsFollowEachOther) {
  ExpectOk(3, [&](Rank& rank) -> absl::Status {
    const uint32_t own = rank.communicator->rank();
    for (size_t round = 0; round < 200; ++round) {
      const size_t elems = 1 + round * 37 % 500;
      ASSIGN_OR_RETURN(const auto values,
                       ToDevice(rank, Encode(DType::kFloat32, Own(own, 3 * elems))));
      ASSIGN_OR_RETURN(const auto part, rank.stream->Allocate(elems * 4));
      ASSIGN_OR_RETURN(const auto all, rank.stream->Allocate(3 * elems * 4));
      RETURN_IF_ERROR(rank.communicator->Group([&] {
        absl::Status status = rank.communicator->ReduceScatter(
            *rank.stream, part.bytes(), values.bytes(), DType::kFloat32, Reduction::kSum);
        if (round % 2 == 0) return status;
        status.Update(rank.communicator->AllReduce(*rank.stream, values.bytes(), DType::kFloat32,
                                                   Reduction::kSum));
        return status;
      }));
      RETURN_IF_ERROR(rank.communicator->AllGather(*rank.stream, all.bytes(), part.bytes()));
      ASSIGN_OR_RETURN(const Bytes got, FromDevice(rank, all.bytes()));
      EXPECT_EQ(got, Encode(DType::kFloat32, Sum(3, 0, 3 * elems, Reduction::kSum)));
    }
    return absl::OkStatus();
  });
}

TEST_P(CommunicatorContract, WrongLengthsAndTypesAreRefusedAndTheNextCallWorks) {
  ExpectOk(2, [&](Rank& rank) -> absl::Status {
    Communicator& communicator = *rank.communicator;
    ASSIGN_OR_RETURN(const auto memory, rank.stream->Allocate(64));
    const std::span<std::byte> bytes = memory.bytes();
    EXPECT_THAT(communicator.AllGather(*rank.stream, bytes.first(15), bytes.first(8)),
                HasError(ErrorId::kRange));
    EXPECT_THAT(communicator.ReduceScatter(*rank.stream, bytes.first(8), bytes.first(8),
                                           DType::kFloat32, Reduction::kSum),
                HasError(ErrorId::kRange));
    EXPECT_THAT(
        communicator.AllReduce(*rank.stream, bytes.first(6), DType::kFloat32, Reduction::kSum),
        HasError(ErrorId::kRange));
    EXPECT_THAT(communicator.AllReduce(*rank.stream, bytes.first(8), DType::kInt8, Reduction::kSum),
                HasError(ErrorId::kRange));
    RETURN_IF_ERROR(communicator.AllGather(*rank.stream, bytes.first(16), bytes.subspan(16, 8)));
    return rank.stream->Synchronize();
  });
}

TEST_P(CommunicatorContract, ARankThatDoesNotComeIsAnErrorOfTheOthers) {
  if (GetParam().ranks_max < 3) GTEST_SKIP() << "fewer than three GPUs";
  constexpr std::chrono::milliseconds kLimit{300};
  const auto results = RunRanks(
      3,
      [&](Rank& rank) -> absl::Status {
        if (rank.communicator->rank() == 1) return absl::OkStatus();  // it dies
        ASSIGN_OR_RETURN(const auto memory, ToDevice(rank, Bytes(96)));
        RETURN_IF_ERROR(rank.communicator->AllReduce(*rank.stream, memory.bytes(), DType::kFloat32,
                                                     Reduction::kSum));
        const absl::Status first = FromDevice(rank, memory.bytes()).status();
        EXPECT_THAT(first, HasError(ErrorId::kRankLost));
        EXPECT_EQ(rank.communicator->Check(), first);
        return rank.communicator->AllReduce(*rank.stream, memory.bytes(), DType::kFloat32,
                                            Reduction::kSum);
      },
      kLimit);
  EXPECT_OK(results[1]);
  EXPECT_THAT(results[0], HasError(ErrorId::kRankLost));
  EXPECT_THAT(results[2], HasError(ErrorId::kRankLost));
}

TEST_P(CommunicatorContract, WhatItIsWatchedWithEndsACollectiveThatWaits) {
  if (GetParam().ranks_max < 2) GTEST_SKIP() << kOneGpu;
  const auto began = std::chrono::steady_clock::now();
  const auto results = RunRanks(
      2,
      [&](Rank& rank) -> absl::Status {
        if (rank.communicator->rank() == 1) return absl::OkStatus();  // it dies
        std::atomic<int> asked = 0;
        rank.communicator->WatchWith([&asked] {
          return ++asked < 2 ? absl::OkStatus()
                             : protocol::MakeError(ErrorId::kRankLost, "the watch knows");
        });
        ASSIGN_OR_RETURN(const auto memory, ToDevice(rank, Bytes(96)));
        absl::Status status = rank.communicator->AllReduce(*rank.stream, memory.bytes(),
                                                           DType::kFloat32, Reduction::kSum);
        if (status.ok()) status = FromDevice(rank, memory.bytes()).status();
        rank.communicator->WatchWith({});
        EXPECT_EQ(asked, 2);
        return status;
      },
      std::chrono::minutes(5));
  EXPECT_THAT(results[0], HasError(ErrorId::kRankLost));
  EXPECT_THAT(std::string(results[0].message()), ::testing::HasSubstr("the watch knows"));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::minutes(1));
}

TEST_P(CommunicatorContract, AnAbortEndsTheOthersToo) {
  if (GetParam().ranks_max < 2) GTEST_SKIP() << kOneGpu;
  const auto results = RunRanks(
      2,
      [&](Rank& rank) -> absl::Status {
        if (rank.communicator->rank() == 1) {
          rank.communicator->Abort();
          return rank.communicator->Check();
        }
        ASSIGN_OR_RETURN(const auto memory, ToDevice(rank, Bytes(96)));
        RETURN_IF_ERROR(rank.communicator->AllReduce(*rank.stream, memory.bytes(), DType::kFloat32,
                                                     Reduction::kSum));
        return FromDevice(rank, memory.bytes()).status();
      },
      std::chrono::milliseconds(1000));
  EXPECT_THAT(results[0], HasError(ErrorId::kRankLost));
  EXPECT_FALSE(results[1].ok());
}

INSTANTIATE_TEST_SUITE_P(Communicators, CommunicatorContract, ::testing::ValuesIn(Communicators()),
                         [](const auto& parameter) { return parameter.param.name; });

// Tests of behaviour that only HostCommunicator has.

TEST(HostCommunicatorTest, RanksAtDifferentCollectivesAreAnErrorThatNamesThem) {
  ThreadExchange exchange(2);
  const auto results = OnRanks(2, [&](uint32_t number) -> absl::Status {
    ASSIGN_OR_RETURN(Rank rank, MakeHost({.rank = number, .size = 2}, exchange.Of(number)));
    Bytes bytes(64);
    const std::span<std::byte> all(bytes);
    if (number == 0) return rank.communicator->AllGather(*rank.stream, all, all.first(32));
    return rank.communicator->AllGather(*rank.stream, all.first(32), all.first(16));
  });
  int named = 0;
  for (const absl::Status& status : results) {
    EXPECT_FALSE(status.ok());
    named += protocol::IdOf(status) == ErrorId::kRange;
  }
  EXPECT_GE(named, 1);
}

TEST(HostCommunicatorTest, SumsAreTakenInFloat32InTheOrderOfRanks) {
  ThreadExchange exchange(3);
  const float large = 0x1p24F;
  for (const absl::Status& status : OnRanks(3, [&](uint32_t number) -> absl::Status {
         ASSIGN_OR_RETURN(Rank rank, MakeHost({.rank = number, .size = 3}, exchange.Of(number)));
         // (2^24 + 1) - 2^24 is 0 in the order of ranks, and 1 in other orders.
         float value = std::array<float, 3>{large, 1.0F, -large}[number];
         RETURN_IF_ERROR(rank.communicator->AllReduce(*rank.stream,
                                                      std::as_writable_bytes(std::span(&value, 1)),
                                                      DType::kFloat32, Reduction::kSum));
         EXPECT_EQ(value, 0.0F);
         return absl::OkStatus();
       })) {
    EXPECT_OK(status);
  }
}

TEST(HostCommunicatorTest, TooManyRanksAndAFailingExchangeAreRefused) {
  const auto alone = [](const std::string& bytes) {
    return absl::StatusOr<std::vector<std::string>>({bytes});
  };
  EXPECT_THAT(HostCommunicator::Create({.rank = 0, .size = 65}, alone), HasError(ErrorId::kLimit));
  EXPECT_THAT(HostCommunicator::Create({.rank = 2, .size = 2}, alone), HasError(ErrorId::kRank));
  EXPECT_THAT(NcclCommunicator::Create({.rank = 0, .size = 1}, nullptr, alone),
              HasError(ErrorId::kRank));
  EXPECT_OK(HostCommunicator::Create({.rank = 0, .size = 1}, alone));
  const auto fails = [](const std::string&) -> absl::StatusOr<std::vector<std::string>> {
    return protocol::MakeError(ErrorId::kRankLost, "rank 1 has ended");
  };
  EXPECT_THAT(HostCommunicator::Create({.rank = 0, .size = 2}, fails),
              HasError(ErrorId::kRankLost));
}

}  // namespace
}  // namespace forebay::gpu
