// SPDX-License-Identifier: Apache-2.0
// Compares internal/nvtx_types.h with NVIDIA's header. Compiled by the preset `cuda` alone; no code.

#include <nvtx3/nvToolsExt.h>

#include <cstddef>
#include <type_traits>

#include "gpu/internal/nvtx_types.h"

namespace ours = forebay::gpu::nvtx;

static_assert(ours::kVersion == NVTX_VERSION);
static_assert(ours::kTableCallbacks == NVTX_ETID_CALLBACKS);
static_assert(ours::kTableVersionInfo == NVTX_ETID_VERSIONINFO);
static_assert(ours::kModuleCore == NVTX_CB_MODULE_CORE);
static_assert(ours::kRangePush == NVTX_CBID_CORE_RangePushA);
static_assert(ours::kRangePop == NVTX_CBID_CORE_RangePop);
static_assert(ours::kCoreFunctions == NVTX_CBID_CORE_SIZE);

static_assert(sizeof(ours::FunctionTable) == sizeof(NvtxFunctionTable));
static_assert(sizeof(ours::Callbacks) == sizeof(NvtxExportTableCallbacks));
static_assert(offsetof(ours::Callbacks, get_module_function_table) ==
              offsetof(NvtxExportTableCallbacks, GetModuleFunctionTable));
static_assert(sizeof(ours::VersionInfo) == sizeof(NvtxExportTableVersionInfo));
static_assert(offsetof(ours::VersionInfo, version) ==
              offsetof(NvtxExportTableVersionInfo, version));
static_assert(offsetof(ours::VersionInfo, set_tool_version) ==
              offsetof(NvtxExportTableVersionInfo, SetInjectionNvtxVersion));
static_assert(std::is_same_v<ours::GetExportTable*, NvtxGetExportTableFunc_t>);
static_assert(std::is_same_v<ours::EntryPoint*, NvtxInitializeInjectionNvtxFunc_t>);
static_assert(std::is_same_v<decltype(&nvtxRangePushA), ours::Push*>);
static_assert(std::is_same_v<decltype(&nvtxRangePop), ours::Pop*>);
