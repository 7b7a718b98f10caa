// SPDX-License-Identifier: Apache-2.0
// Compares internal/nccl_types.h and internal/nccl_functions.inc with NVIDIA's header. Compiled by the
// preset `cuda` alone; no code.

#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "gpu/internal/nccl_types.h"

namespace ours = forebay::gpu::nccl;

#define FOREBAY_NCCL_FUNCTION(name, parameters) \
  static_assert(std::is_same_v<decltype(&::name), ncclResult_t(*) parameters>, #name);
#include "gpu/internal/nccl_functions.inc"
#undef FOREBAY_NCCL_FUNCTION

static_assert(sizeof(ours::ncclResult_t) == sizeof(ncclResult_t));
static_assert(sizeof(ours::ncclDataType_t) == sizeof(ncclDataType_t));
static_assert(sizeof(ours::ncclRedOp_t) == sizeof(ncclRedOp_t));
static_assert(sizeof(ours::ncclUniqueId) == sizeof(ncclUniqueId));
static_assert(alignof(ours::ncclUniqueId) == alignof(ncclUniqueId));
static_assert(std::is_same_v<ours::ncclComm_t, ncclComm_t>);
static_assert(std::is_same_v<ours::cudaStream_t, cudaStream_t>);

static_assert(offsetof(ours::ncclConfig_t, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(ours::ncclConfig_t, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(ours::ncclConfig_t, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(ours::ncclConfig_t, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(ours::kConfigMagic == NCCL_API_MAGIC);
static_assert(ours::kConfigVersion == NCCL_VERSION(2, 14, 0));

static_assert(ours::kSuccess == ncclSuccess);
static_assert(ours::kInternalError == ncclInternalError);
static_assert(ours::kInvalidArgument == ncclInvalidArgument);
static_assert(ours::kInvalidUsage == ncclInvalidUsage);
static_assert(ours::kRemoteError == ncclRemoteError);
static_assert(ours::kInProgress == ncclInProgress);
static_assert(ours::kInt8 == ncclInt8);
static_assert(ours::kFloat16 == ncclFloat16);
static_assert(ours::kFloat32 == ncclFloat32);
static_assert(ours::kBFloat16 == ncclBfloat16);
static_assert(ours::kSum == ncclSum);
static_assert(ours::kAverage == ncclAvg);
