// SPDX-License-Identifier: Apache-2.0
// Named stretches of a thread's time, for NVIDIA's tools.
#pragma once

#include <string>
#include <string_view>

namespace forebay::gpu {

// Lets a tool attach through the library at the path in NVTX_INJECTION64_PATH. Empty: no tool attaches. A library that cannot
// be opened, or that refuses to take part, is ignored silently, as in NVIDIA's header. The first call of the process counts.
//
// Threads  Any.
// Source   NVTX 3, nvtxInit.h.
void AttachNvtxTool(const std::string& library);

// Shows the time from its construction to its destruction as a named range. Ranges of a thread nest. Does nothing if no
// tool has attached.
//
// Threads  Any.
class NvtxRange {
 public:
  // "what" or "what name".
  explicit NvtxRange(std::string_view what, std::string_view name = {});
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
  ~NvtxRange();

  struct Tool;

 private:
  const Tool* const tool_;
};

}  // namespace forebay::gpu
