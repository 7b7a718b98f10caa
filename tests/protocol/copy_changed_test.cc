// SPDX-License-Identifier: Apache-2.0
// Goal    CopyChanged() copies like memcpy for every size, and writes only the pages that differ.
// Method  Change random bytes of buffers whose sizes are not whole pages; compare the bytes that CopyChanged() reports as
//         written with a count of the changed pages.

#include "protocol/copy_changed.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "protocol/units.h"

namespace forebay::protocol {
namespace {

TEST(CopyChanged, CopiesAsMemcpyDoesAndWritesThePagesThatDifferAlone) {
  std::mt19937_64 random(1);
  for (const size_t bytes : {0UL, 1UL, kPageBytes - 1, kPageBytes, 9 * kPageBytes + 5}) {
    std::vector<std::byte> from(bytes, std::byte{7});
    // The page past the copied bytes must keep its contents.
    std::vector<std::byte> to(bytes + kPageBytes, std::byte{9});
    EXPECT_EQ(CopyChanged(from, to), bytes);
    for (int round = 0; round < 20 && bytes > 0; ++round) {
      std::set<size_t> pages;
      for (uint64_t changes = random() % 4; changes > 0; --changes) {
        const size_t at = random() % bytes;
        from[at] ^= std::byte{0x80};
        pages.insert(at / kPageBytes);
      }
      uint64_t written = CopyChanged(from, to);
      EXPECT_LE(written, pages.size() * kPageBytes) << "a byte that was changed twice is as it was";
      EXPECT_TRUE(std::equal(from.begin(), from.end(), to.begin()));
      written = CopyChanged(from, to);
      EXPECT_EQ(written, 0U);
    }
    EXPECT_EQ(std::vector<std::byte>(to.begin() + static_cast<int64_t>(bytes), to.end()),
              std::vector<std::byte>(kPageBytes, std::byte{9}));
  }
}

}  // namespace
}  // namespace forebay::protocol
