// SPDX-License-Identifier: Apache-2.0
// Compares internal/cuda_types.h and internal/cuda_functions.inc with NVIDIA's header. Compiled by the preset `cuda` alone; no code.

#include <cuda.h>

#include <type_traits>

#include "gpu/internal/cuda_types.h"

namespace ours = forebay::gpu::cuda;

#define FOREBAY_CUDA_FUNCTION(name, parameters) \
  static_assert(std::is_same_v<decltype(&::name), CUresult(*) parameters>, #name);
#include "gpu/internal/cuda_functions.inc"
#undef FOREBAY_CUDA_FUNCTION

static_assert(sizeof(ours::CUresult) == sizeof(CUresult));
static_assert(sizeof(ours::CUdevice_attribute) == sizeof(CUdevice_attribute));
static_assert(sizeof(ours::CUpointer_attribute) == sizeof(CUpointer_attribute));
static_assert(std::is_same_v<ours::CUdevice, CUdevice>);
static_assert(std::is_same_v<ours::CUdeviceptr, CUdeviceptr>);
static_assert(std::is_same_v<ours::CUcontext, CUcontext>);
static_assert(std::is_same_v<ours::CUevent, CUevent>);
static_assert(std::is_same_v<ours::CUstream, CUstream>);

static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(ours::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(ours::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(ours::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(ours::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kIllegalAddress == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(ours::kAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(ours::kNotRegistered == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
static_assert(ours::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(ours::kUnknown == CUDA_ERROR_UNKNOWN);

static_assert(ours::kPageableUsesHostPageTables ==
              CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
static_assert(ours::kReadOnlyHostRegisterSupported ==
              CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
static_assert(ours::kMemoryPoolsSupported == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
static_assert(ours::kPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(ours::kPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(sizeof(ours::kMemoryTypeDevice) == sizeof(CUmemorytype));
static_assert(ours::kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ours::kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(ours::kRegisterReadOnly == CU_MEMHOSTREGISTER_READ_ONLY);
