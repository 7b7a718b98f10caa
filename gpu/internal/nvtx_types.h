// SPDX-License-Identifier: Apache-2.0
// The interface between an application and a tool of NVIDIA's (Nsight Systems), declared here so that no build needs NVIDIA's
// header; internal/nvtx_header_check.cc compares the two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::gpu::nvtx {

// Values of nvtxTypes.h, version 3.
inline constexpr const char* kEntryPoint = "InitializeInjectionNvtx2";
inline constexpr uint32_t kTableCallbacks = 1;
inline constexpr uint32_t kTableVersionInfo = 3;
inline constexpr uint32_t kVersion = 3;
inline constexpr int kModuleCore = 1;
inline constexpr unsigned kRangePush = 9;  // index in the core's functions
inline constexpr unsigned kRangePop = 11;
inline constexpr unsigned kCoreFunctions = 16;

using FunctionPointer = void (*)();
using FunctionTable = FunctionPointer**;  // an array of places of functions; ends with null

struct Callbacks {
  size_t struct_size;
  int (*get_module_function_table)(int module, FunctionTable* table, unsigned* size);
};
struct VersionInfo {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved;
  void (*set_tool_version)(uint32_t version);
};

using GetExportTable = const void*(uint32_t id);
using EntryPoint = int(GetExportTable* get_table);  // the tool's; 0: it takes no part

using Push = int(const char* message);
using Pop = int();

}  // namespace forebay::gpu::nvtx
