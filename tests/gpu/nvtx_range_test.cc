// SPDX-License-Identifier: Apache-2.0
// Goal    An attached NVTX tool sees each range, with its name and in order.
// Method  A tool library that attaches as NVTX specifies and logs the ranges.

#include "gpu/nvtx_range.h"

#include <dlfcn.h>

#include <string>

#include "gtest/gtest.h"

namespace forebay::gpu {
namespace {

TEST(NvtxRangeTest, TheToolHearsOfEachRange) {
  { const NvtxRange before("before there is a tool"); }
  AttachNvtxTool(FAKE_NVTX);
  AttachNvtxTool("another one comes too late");
  {
    const NvtxRange outer("forebay.step");
    const NvtxRange inner("forebay.gather", "layers.0");
  }
  { const NvtxRange last("forebay.reduce", "head"); }
  void* const library = ::dlopen(FAKE_NVTX, RTLD_NOW);
  ASSERT_NE(library, nullptr);
  const auto log = reinterpret_cast<const char* (*)()>(::dlsym(library, "fake_nvtx_log"));
  ASSERT_NE(log, nullptr);
  EXPECT_EQ(std::string(log()), "<forebay.step<forebay.gather layers.0>><forebay.reduce head>");
}

}  // namespace
}  // namespace forebay::gpu
