// SPDX-License-Identifier: Apache-2.0
// Types and numbers of the CUDA driver API, declared here so that every build has them and none needs the
// toolkit; internal/cuda_header_check.cc compares them with NVIDIA's header.
#pragma once

// Structs with the names of cuda.h.
struct CUctx_st;
struct CUevent_st;
struct CUstream_st;

namespace forebay::gpu::cuda {

using CUresult = int;
using CUdevice = int;
using CUdevice_attribute = int;
using CUpointer_attribute = int;
using CUdeviceptr = unsigned long long;  // NOLINT(google-runtime-int): as cuda.h
using CUcontext = ::CUctx_st*;
using CUevent = ::CUevent_st*;
using CUstream = ::CUstream_st*;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kInvalidValue = 1;
inline constexpr CUresult kOutOfMemory = 2;
inline constexpr CUresult kNotInitialized = 3;
inline constexpr CUresult kNoDevice = 100;
inline constexpr CUresult kInvalidDevice = 101;
inline constexpr CUresult kInvalidContext = 201;
inline constexpr CUresult kInvalidHandle = 400;
inline constexpr CUresult kNotReady = 600;
inline constexpr CUresult kIllegalAddress = 700;
inline constexpr CUresult kAlreadyRegistered = 712;
inline constexpr CUresult kNotRegistered = 713;
inline constexpr CUresult kNotSupported = 801;
inline constexpr CUresult kUnknown = 999;

inline constexpr CUdevice_attribute kPageableUsesHostPageTables = 100;
inline constexpr CUdevice_attribute kReadOnlyHostRegisterSupported = 113;
inline constexpr CUdevice_attribute kMemoryPoolsSupported = 115;

inline constexpr CUpointer_attribute kPointerMemoryType = 2;
inline constexpr CUpointer_attribute kPointerDeviceOrdinal = 9;
inline constexpr unsigned kMemoryTypeDevice = 2;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kRegisterPortable = 1;
inline constexpr unsigned kRegisterReadOnly = 8;

}  // namespace forebay::gpu::cuda
