// SPDX-License-Identifier: Apache-2.0
// Goal    A machine without CUDA, or with too old a driver, gets one clear message. Memory is registered as the device allows.
//         Every failing driver call becomes an error with the call's name, without leaks or misuse.
// Method  A fake driver with the real symbols. Faults are enumerated: call 0 fails, then call 1, ... until no call fails;
//         copies on the device fail likewise.

#include "gpu/cuda_device.h"

#include <dlfcn.h>

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/internal/cuda_driver.h"
#include "gtest/gtest.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/host_pages.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::gpu {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::FakeCuda;
using ::forebay::testing::HasError;
using ::forebay::testing::HostPages;
using protocol::ErrorId;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kPieceBytes = 8192;

absl::StatusOr<std::shared_ptr<CudaDevice>> Create(int ordinal = 0) {
  return CudaDevice::Create(
      {.ordinal = ordinal, .soname = FakeCuda::Library(), .piece_bytes = kPieceBytes});
}

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

TEST(CudaDeviceTest, WithoutADriverSaysSo) {
  const auto device = CudaDevice::Create({.soname = "libcuda-that-is-nowhere.so.1"});
  ASSERT_THAT(device, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(MessageOf(device.status()), HasSubstr("no CUDA on this machine"));
  EXPECT_THAT(MessageOf(device.status()), HasSubstr("libcuda-that-is-nowhere.so.1"));
}

TEST(CudaDeviceTest, ALibraryThatIsNoDriverIsRefused) {
  const auto device = CudaDevice::Create({.soname = "libc.so.6"});
  ASSERT_THAT(device, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(MessageOf(device.status()), HasSubstr("is no CUDA driver"));
}

TEST(CudaDeviceTest, WithoutAGpuSaysSo) {
  FakeCuda::Start({.devices = 0});
  const auto device = Create();
  ASSERT_THAT(device, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(MessageOf(device.status()), HasSubstr("the driver finds no GPU"));
}

TEST(CudaDeviceTest, AnOldDriverIsRefusedWithBothVersions) {
  FakeCuda::Start({.version = 11080});
  const auto device = Create();
  ASSERT_THAT(device, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(MessageOf(device.status()), HasSubstr("CUDA 11.8; CUDA 12.0 is the least"));
}

TEST(CudaDeviceTest, ADeviceThatIsNotThereIsRefusedWithTheirNumber) {
  FakeCuda::Start({.devices = 2});
  EXPECT_OK(Create(1));
  for (const int ordinal : {2, -1}) {
    const auto device = Create(ordinal);
    ASSERT_THAT(device, HasError(ErrorId::kUnsupported));
    EXPECT_THAT(MessageOf(device.status()), HasSubstr("the driver shows 2"));
  }
}

TEST(CudaDeviceTest, WithoutMemoryPoolsIsRefused) {
  FakeCuda::Start({.has_memory_pools = false});
  EXPECT_THAT(Create(), HasError(ErrorId::kUnsupported));
}

TEST(CudaDeviceTest, SaysWhatItIs) {
  FakeCuda::Start({.version = 13020});
  ASSERT_OK_AND_ASSIGN(const auto device, Create());
  EXPECT_EQ(device->name(), "cuda:0");
  EXPECT_EQ(device->model(), "Fake GPU");
  EXPECT_EQ(device->memory_bytes(), uint64_t{1} << 30);
  EXPECT_EQ(device->driver_version(), 13020);
}

TEST(CudaDeviceTest, MemoryThatIsNotThereIsRefusedWithBothNumbers) {
  FakeCuda::Start({.memory_bytes = 1000});
  ASSERT_OK_AND_ASSIGN(const auto device, Create());
  ASSERT_OK_AND_ASSIGN(const auto stream, device->MakeStream());
  ASSERT_OK_AND_ASSIGN(auto first, stream->Allocate(600));
  ASSERT_OK_AND_ASSIGN(const auto free_bytes, device->FreeBytes());
  EXPECT_EQ(free_bytes, 400U);
  const auto second = stream->Allocate(401);
  ASSERT_THAT(second, HasError(ErrorId::kDeviceMemory));
  EXPECT_THAT(MessageOf(second.status()), HasSubstr("400 of its 1000 bytes free; 401 are needed"));
  first = DeviceMemory();
  ASSERT_OK(stream->Synchronize());
  EXPECT_OK(stream->Allocate(1000)) << "the refusal broke nothing";
}

TEST(CudaDeviceTest, ReachesItsOwnMemoryAndTheHosts) {
  FakeCuda::Start({.devices = 2});
  ASSERT_OK_AND_ASSIGN(const auto device, Create(1));
  EXPECT_OK(device->CheckReach(*FakeCuda::Allocate(8, 1)));
  EXPECT_OK(device->CheckReach(Bytes(8)));
  EXPECT_OK(device->CheckReach({}));
  const absl::Status other = device->CheckReach(*FakeCuda::Allocate(8, 0));
  ASSERT_THAT(other, HasError(ErrorId::kRange));
  EXPECT_THAT(MessageOf(other), HasSubstr("memory of cuda:0 in a session of cuda:1"));
}

TEST(CudaDeviceTest, LeavesTheThreadsCurrentContextAsItWas) {
  FakeCuda::Start();
  void* const library = ::dlopen(FakeCuda::Library().c_str(), RTLD_NOW);
  const auto pop =
      reinterpret_cast<int (*)(cuda::CUcontext*)>(::dlsym(library, "cuCtxPopCurrent_v2"));
  ASSERT_OK_AND_ASSIGN(const auto device, Create());
  ASSERT_OK_AND_ASSIGN(const auto stream, device->MakeStream());
  ASSERT_OK(stream->Record());
  cuda::CUcontext context = nullptr;
  EXPECT_EQ(pop(&context), cuda::kInvalidContext) << "one was left";
}

TEST(CudaRegistration, IsMadeInPieces) {
  FakeCuda::Start();
  ASSERT_OK_AND_ASSIGN(const auto device, Create());
  const HostPages pages(2 * kPieceBytes + 100);
  ASSERT_OK_AND_ASSIGN(auto registration, device->Register(pages.bytes(), HostAccess::kRead));
  const auto made = FakeCuda::registrations();
  ASSERT_EQ(made.size(), 3U);
  EXPECT_EQ(made[0].begin, pages.bytes().data());
  EXPECT_EQ(made[1].begin, pages.bytes().data() + kPieceBytes);
  EXPECT_EQ(made[2].size_bytes, 4096U) << "whole pages";
  EXPECT_TRUE(made[2].is_read_only);
  registration.reset();
  EXPECT_THAT(FakeCuda::registrations(), IsEmpty());
}

TEST(CudaRegistration, ThatFailsInTheMiddleLeavesNothing) {
  FakeCuda::Start();
  ASSERT_OK_AND_ASSIGN(const auto device, Create());
  HostPages pages(3 * kPieceBytes);
  // The second piece is registered already.
  ASSERT_OK_AND_ASSIGN(
      const auto first,
      device->Register(pages.bytes().subspan(kPieceBytes, kPieceBytes), HostAccess::kReadWrite));
  const auto whole = device->Register(pages.bytes(), HostAccess::kReadWrite);
  ASSERT_THAT(whole, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(MessageOf(whole.status()), HasSubstr("at byte 8192"));
  EXPECT_EQ(FakeCuda::registrations().size(), 1U);
}

TEST(CudaRegistration, OfReadOnlyMemoryNeedsTheDevicesHelp) {
  FakeCuda::Start({.registers_read_only = false});
  ASSERT_OK_AND_ASSIGN(const auto device, Create());
  EXPECT_FALSE(device->registers_read_only());
  HostPages pages(kPieceBytes);
  pages.Protect(PROT_READ);
  const auto registration = device->Register(pages.bytes(), HostAccess::kRead);
  ASSERT_THAT(registration, HasError(ErrorId::kUnsupported));
  EXPECT_THAT(MessageOf(registration.status()), HasSubstr("mapped read-only"));
  EXPECT_THAT(device->Register(pages.bytes(), HostAccess::kReadWrite),
              HasError(ErrorId::kUnsupported))
      << "the fake takes what CUDA does not";
}

// Uses a device in every way that a session does. Returns the first error.
absl::Status UseAll(Bytes& result) {
  ASSIGN_OR_RETURN(const auto device, Create());
  const HostPages from(3 * kPieceBytes);
  const HostPages to(3 * kPieceBytes);
  std::ranges::copy(::forebay::testing::Pattern(from.bytes().size(), 1), from.bytes().begin());
  ASSIGN_OR_RETURN(const auto readable, device->Register(from.bytes(), HostAccess::kRead));
  ASSIGN_OR_RETURN(const auto writable, device->Register(to.bytes(), HostAccess::kReadWrite));
  ASSIGN_OR_RETURN(const auto borrowed, device->BorrowStream(0));
  ASSIGN_OR_RETURN(const auto stream, device->MakeStream());
  ASSIGN_OR_RETURN(const auto memory, stream->Allocate(from.bytes().size()));
  RETURN_IF_ERROR(stream->Copy(memory.bytes(), from.bytes()));
  ASSIGN_OR_RETURN(const auto copied, stream->Record());
  RETURN_IF_ERROR(borrowed->WaitFor(*copied));
  absl::Status status = borrowed->Copy(to.bytes(), memory.bytes());
  const auto done = copied->Done();
  status.Update(done.status());
  // Device memory is freed after its copies have ended, as in a session.
  status.Update(stream->Synchronize());
  status.Update(borrowed->Synchronize());
  result.assign(to.bytes().begin(), to.bytes().end());
  return status;
}

TEST(CudaFault, EveryCallThatFailsIsAnErrorWithItsName) {
  size_t failing = 0;
  for (bool has_failed = true; has_failed; ++failing) {
    FakeCuda::Start();
    FakeCuda::FailCall(failing);
    Bytes result;
    const absl::Status status = UseAll(result);
    has_failed = FakeCuda::calls() > failing;
    ASSERT_LT(failing, 1000U);
    if (status.ok()) {
      // A failed call that frees or unregisters memory reports no error.
      EXPECT_EQ(result, ::forebay::testing::Pattern(3 * kPieceBytes, 1));
      continue;
    }
    const ErrorId id = protocol::IdOf(status);
    EXPECT_TRUE(id == ErrorId::kDevice || id == ErrorId::kUnsupported) << status;
    if (failing == 0) continue;  // the version call: its failure means unsupported
    EXPECT_THAT(MessageOf(status), HasSubstr("CUDA_ERROR_UNKNOWN")) << failing;
  }
  EXPECT_GT(failing, 60U);
}

TEST(CudaFault, WhatFailsOnTheDeviceIsSaidByEachLaterCall) {
  for (size_t copy = 0; copy < 6; ++copy) {
    FakeCuda::Start();
    FakeCuda::FailCopy(copy);
    Bytes result;
    const absl::Status status = UseAll(result);
    ASSERT_THAT(status, HasError(ErrorId::kDevice)) << copy;
    EXPECT_THAT(MessageOf(status), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
  }
}

TEST(CudaFault, NothingIsLeftOfAWholeUse) {
  FakeCuda::Start();
  Bytes result;
  ASSERT_OK(UseAll(result));
  EXPECT_EQ(FakeCuda::leftovers(), FakeCuda::Leftovers());
  EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
}

}  // namespace
}  // namespace forebay::gpu
