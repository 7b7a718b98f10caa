// SPDX-License-Identifier: Apache-2.0
#include "gpu/nvtx_range.h"

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "gpu/internal/nvtx_types.h"
#include "gpu/internal/shared_library.h"

namespace forebay::gpu {

// The functions that a tool gives; null: none.
struct NvtxRange::Tool {
  nvtx::FunctionPointer push = nullptr;
  nvtx::FunctionPointer pop = nullptr;

  bool is_there() const { return push != nullptr && pop != nullptr; }
};

namespace {

using Tool = NvtxRange::Tool;

// Filled by the tool while it attaches.
Tool& Attaching() {
  static Tool tool;
  return tool;
}

int GetModuleFunctionTable(int module, nvtx::FunctionTable* table, unsigned* size) {
  if (module != nvtx::kModuleCore) return 0;
  // functions that the tool sets and Forebay does not call
  static nvtx::FunctionPointer ignored = nullptr;
  static std::array<nvtx::FunctionPointer*, nvtx::kCoreFunctions + 1> places;
  places.fill(&ignored);
  places[0] = nullptr;
  places[nvtx::kRangePush] = &Attaching().push;
  places[nvtx::kRangePop] = &Attaching().pop;
  places.back() = nullptr;
  if (table != nullptr) *table = places.data();
  if (size != nullptr) *size = nvtx::kCoreFunctions;
  return 1;
}

const void* GetExportTable(uint32_t id) {
  static const nvtx::Callbacks callbacks{sizeof(nvtx::Callbacks), &GetModuleFunctionTable};
  static const nvtx::VersionInfo version{sizeof(nvtx::VersionInfo), nvtx::kVersion, 0,
                                         [](uint32_t /*of the tool*/) {}};
  if (id == nvtx::kTableCallbacks) return &callbacks;
  if (id == nvtx::kTableVersionInfo) return &version;
  return nullptr;
}

// Once it has attached; it stays for the life of the process.
std::atomic<const Tool*>& Attached() {
  static std::atomic<const Tool*> tool = nullptr;
  return tool;
}

}  // namespace

void AttachNvtxTool(const std::string& library) {
  static std::once_flag once;
  std::call_once(once, [&] {
    if (library.empty()) return;
    const auto opened = internal::SharedLibrary::Open(library);
    nvtx::EntryPoint* enter = nullptr;
    if (!opened.ok() || !opened->Find(nvtx::kEntryPoint, enter)) return;
    if (enter(&GetExportTable) == 0 || !Attaching().is_there()) return;
    Attached() = &Attaching();
  });
}

NvtxRange::NvtxRange(std::string_view what, std::string_view name) : tool_(Attached()) {
  if (tool_ == nullptr) return;
  std::string message(what);
  if (!name.empty()) absl::StrAppend(&message, " ", std::string(name));
  reinterpret_cast<nvtx::Push*>(tool_->push)(message.c_str());
}

NvtxRange::~NvtxRange() {
  if (tool_ != nullptr) reinterpret_cast<nvtx::Pop*>(tool_->pop)();
}

}  // namespace forebay::gpu
