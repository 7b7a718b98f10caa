// SPDX-License-Identifier: Apache-2.0
// Types and numbers of NCCL, declared here so that every build has them and none needs its package;
// internal/nccl_header_check.cc compares them with NVIDIA's header.
#pragma once

#include <array>
#include <cstddef>

// Structs with the names of nccl.h and of CUDA's runtime.
struct ncclComm;
struct CUstream_st;

namespace forebay::gpu::nccl {

using ncclResult_t = int;
using ncclDataType_t = int;
using ncclRedOp_t = int;
using ncclComm_t = ::ncclComm*;
using cudaStream_t = ::CUstream_st*;

struct ncclUniqueId {
  std::array<char, 128> internal;
};

// The begin of NCCL's, as version 2.14 has it: newer libraries take the rest's defaults.
struct ncclConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

inline constexpr ncclResult_t kSuccess = 0;
inline constexpr ncclResult_t kInternalError = 3;
inline constexpr ncclResult_t kInvalidArgument = 4;
inline constexpr ncclResult_t kInvalidUsage = 5;
inline constexpr ncclResult_t kRemoteError = 6;
inline constexpr ncclResult_t kInProgress = 7;

inline constexpr ncclDataType_t kInt8 = 0;
inline constexpr ncclDataType_t kFloat16 = 6;
inline constexpr ncclDataType_t kFloat32 = 7;
inline constexpr ncclDataType_t kBFloat16 = 9;

inline constexpr ncclRedOp_t kSum = 0;
inline constexpr ncclRedOp_t kAverage = 4;

inline constexpr unsigned kConfigMagic = 0xcafebeef;
inline constexpr unsigned kConfigVersion = 21400;  // 2.14.0
inline constexpr int kVersionMin = 21400;

}  // namespace forebay::gpu::nccl
