// SPDX-License-Identifier: Apache-2.0
// A tool like Nsight Systems: a library that attaches through NVTX's entry point and logs the ranges that it receives.

#include <string>

#include "gpu/internal/nvtx_types.h"

namespace {

namespace nvtx = forebay::gpu::nvtx;

std::string& Log() {
  static std::string log;
  return log;
}

int Push(const char* message) {
  Log() += std::string("<") + message;
  return 0;
}
int Pop() {
  Log() += ">";
  return 0;
}

}  // namespace

extern "C" {

const char* fake_nvtx_log() { return Log().c_str(); }

int InitializeInjectionNvtx2(nvtx::GetExportTable* get_table) {
  const auto* const version =
      static_cast<const nvtx::VersionInfo*>(get_table(nvtx::kTableVersionInfo));
  const auto* const callbacks =
      static_cast<const nvtx::Callbacks*>(get_table(nvtx::kTableCallbacks));
  if (version == nullptr || version->version != nvtx::kVersion || callbacks == nullptr) return 0;
  version->set_tool_version(nvtx::kVersion);
  nvtx::FunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks->get_module_function_table(nvtx::kModuleCore, &table, &size) == 0) return 0;
  if (size <= nvtx::kRangePop) return 0;
  // Real tools replace every function of the table. The functions that are not logged as a push get Pop.
  for (unsigned i = 1; i < size; ++i) *table[i] = reinterpret_cast<nvtx::FunctionPointer>(&Pop);
  *table[nvtx::kRangePush] = reinterpret_cast<nvtx::FunctionPointer>(&Push);
  *table[nvtx::kRangePop] = reinterpret_cast<nvtx::FunctionPointer>(&Pop);
  return callbacks->get_module_function_table(nvtx::kModuleCore + 1, &table, &size) == 0 ? 1 : 0;
}
}
