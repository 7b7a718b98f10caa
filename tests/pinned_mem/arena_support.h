// SPDX-License-Identifier: Apache-2.0
// Helpers of the arena tests.
#pragma once

#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "pinned_mem/pinned_arena.h"

namespace forebay::testing {

inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kMib = uint64_t{1} << 20;

inline pinned_mem::ArenaOptions OptionsFor(uint64_t capacity_bytes, pinned_mem::Access access) {
  return {.name = "test",
          .capacity_bytes = capacity_bytes,
          .lock = pinned_mem::LockPolicy::kBestEffort,
          .access = access};
}

inline std::unique_ptr<pinned_mem::PinnedArena> MakeArena(const pinned_mem::ArenaOptions& options) {
  auto arena = pinned_mem::PinnedArena::Create(options);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return arena.ok() ? *std::move(arena) : nullptr;
}

// Checks that a test leaves no descriptor behind.
class DescriptorsAsBefore : public ::testing::Test {
 protected:
  void SetUp() override { before_ = Descriptors(); }
  void TearDown() override { EXPECT_EQ(Descriptors(), before_) << "a descriptor leaked"; }

 private:
  static ptrdiff_t Descriptors() {
    std::filesystem::directory_iterator entries("/proc/self/fd");
    return std::distance(begin(entries), end(entries));
  }
  ptrdiff_t before_ = 0;
};

}  // namespace forebay::testing
