// SPDX-License-Identifier: Apache-2.0
// Goal    The checksum is XXH3-64 of the identity and the pages' digests. Every instruction set and every order of the pages
//         gives the same value. Every bit of identity and pages changes it.
// Method  The packaged library's one-shot calls as they are documented; every size around the block
//         borders of XXH3, pages and batches of pages; then each byte of a small input changed.

#include "nvme/checksum.h"

#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "nvme/internal/checksum_kernels.h"
#include "protocol/units.h"
#include "tests/support/pattern.h"

namespace forebay::nvme {
namespace {

using ::forebay::protocol::kPageBytes;
using ::forebay::testing::Bytes;
using ::forebay::testing::Pattern;

Identity IdentityOf(uint64_t seed) {
  Identity identity{};
  const Bytes bytes = Pattern(identity.size(), seed);
  std::copy(bytes.begin(), bytes.end(), identity.begin());
  return identity;
}

const unsigned char* Raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}

// The definition, computed with the packaged library.
uint64_t Oracle(const Identity& identity, const Bytes& bytes) {
  Bytes joined(identity.begin(), identity.end());
  for (size_t begin = 0; begin < bytes.size(); begin += kPageBytes) {
    const uint64_t digest =
        XXH3_64bits(bytes.data() + begin, std::min(kPageBytes, bytes.size() - begin));
    const auto* const raw = reinterpret_cast<const std::byte*>(&digest);
    joined.insert(joined.end(), raw, raw + sizeof(digest));
  }
  return XXH3_64bits(joined.data(), joined.size());
}

std::vector<size_t> Sizes() {
  std::vector<size_t> sizes = {0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 100, 8192, 20'000};
  for (size_t size = 200; size < 300; ++size) sizes.push_back(size);    // XXH3's internal buffer
  for (size_t size = 1000; size < 1060; ++size) sizes.push_back(size);  // its block
  for (const size_t pages : {1u, 63u, 64u, 65u, 128u, 300u}) {
    for (const size_t size : {pages * kPageBytes - 1, pages * kPageBytes, pages * kPageBytes + 1}) {
      sizes.push_back(size);
    }
  }
  return sizes;
}

TEST(Checksum, IsXxh3OfIdentityThenDigestsInEveryInstructionSet) {
  int targets = 1;
  for (const size_t size : Sizes()) {
    SCOPED_TRACE(size);
    const Identity identity = IdentityOf(size);
    const Bytes bytes = Pattern(size, /*seed=*/size);
    const uint64_t oracle = Oracle(identity, bytes);
    EXPECT_EQ(internal::kBaselineChecksum.of_bytes(Raw(identity.data()), Raw(bytes.data()), size),
              oracle);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      targets = 2;
      EXPECT_EQ(internal::kAvx2Checksum.of_bytes(Raw(identity.data()), Raw(bytes.data()), size),
                oracle);
    }
#endif
    EXPECT_EQ(Checksum(identity, bytes), oracle);
  }
  RecordProperty("targets", targets);
}

TEST(Checksum, HasTheseValues) {
  // These values are on disks: they may change only with the version of the disk format.
  EXPECT_EQ(Checksum(Identity{}, {}), 0xA057271C9071C99Du);
  Bytes word(7);
  std::memcpy(word.data(), "forebay", word.size());
  EXPECT_EQ(Checksum(Identity{}, word), 0x6CFCB4B3ACEA34E5u);
}

TEST(PageDigests, GiveTheChecksumWhateverTheOrderOfThePages) {
  for (const size_t size : Sizes()) {
    SCOPED_TRACE(size);
    const Identity identity = IdentityOf(size);
    const Bytes bytes = Pattern(size, /*seed=*/size);
    PageDigests digests(bytes);
    const size_t pages = (size + kPageBytes - 1) / kPageBytes;
    ASSERT_EQ(digests.pages(), pages);
    digests.Add(pages / 2, pages);
    digests.Add(0, 0);
    for (size_t page = pages / 2; page > 0; --page) digests.Add(page - 1, page);
    EXPECT_EQ(digests.Checksum(identity), Checksum(identity, bytes));
  }
}

TEST(PageDigests, HoldWhatAPageWasWhenItWasAdded) {
  const Identity identity = IdentityOf(1);
  Bytes bytes = Pattern(3 * kPageBytes, /*seed=*/1);
  const uint64_t before = Checksum(identity, bytes);
  PageDigests digests(bytes);
  digests.Add(0, 3);
  bytes[kPageBytes] ^= std::byte{1};
  EXPECT_EQ(digests.Checksum(identity), before);
  EXPECT_NE(Checksum(identity, bytes), before);
}

TEST(Checksum, TellsPagesThatHaveChangedPlaces) {
  Bytes bytes = Pattern(4 * kPageBytes, /*seed=*/3);
  const uint64_t before = Checksum(Identity{}, bytes);
  std::swap_ranges(bytes.begin(), bytes.begin() + kPageBytes, bytes.begin() + 2 * kPageBytes);
  EXPECT_NE(Checksum(Identity{}, bytes), before);
}

TEST(Checksum, ChangesWithEveryByteOfIdentityAndData) {
  const Identity identity = IdentityOf(1);
  Bytes bytes = Pattern(777, /*seed=*/2);
  const uint64_t before = Checksum(identity, bytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] ^= std::byte{1};
    EXPECT_NE(Checksum(identity, bytes), before) << i;
    bytes[i] ^= std::byte{1};
  }
  for (size_t i = 0; i < identity.size(); ++i) {
    Identity other = identity;
    other[i] ^= std::byte{0x80};
    EXPECT_NE(Checksum(other, bytes), before) << i;
  }
  EXPECT_EQ(Checksum(identity, bytes), before);
}

}  // namespace
}  // namespace forebay::nvme
