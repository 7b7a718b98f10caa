// Goal    The checksum is XXH3-64 of identity and data, with the same value from every instruction
//         set, and every bit of both counts.
// Method  Published test vectors by way of the packaged library's one-shot call; every size around
//         the block borders of XXH3; then each byte of a small input changed.

#include "nvme/checksum.h"

#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "nvme/internal/checksum_kernels.h"
#include "tests/support/pattern.h"

namespace forebay::nvme {
namespace {

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

TEST(Checksum, IsXxh3OfIdentityThenBytesInEveryInstructionSet) {
  std::vector<size_t> sizes = {0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 100, 4095, 4096, 4097};
  for (size_t size = 200; size < 300; ++size) sizes.push_back(size);    // XXH3's internal buffer
  for (size_t size = 1000; size < 1060; ++size) sizes.push_back(size);  // its block
  sizes.push_back((1 << 20) + 13);
  int targets = 1;
  for (const size_t size : sizes) {
    SCOPED_TRACE(size);
    const Identity identity = IdentityOf(size);
    Bytes joined = Pattern(32 + size, /*seed=*/size);
    std::copy(identity.begin(), identity.end(), joined.begin());
    const std::byte* data = joined.data() + 32;
    const uint64_t oracle = XXH3_64bits(joined.data(), joined.size());
    EXPECT_EQ(internal::ChecksumBaseline(Raw(identity.data()), Raw(data), size), oracle);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      targets = 2;
      EXPECT_EQ(internal::ChecksumAvx2(Raw(identity.data()), Raw(data), size), oracle);
    }
#endif
    EXPECT_EQ(Checksum(identity, {data, size}), oracle);
  }
  RecordProperty("targets", targets);
}

TEST(Checksum, HasTheseValues) {
  // From the packaged libxxhash 0.8.1; they may never change: they are on disks.
  EXPECT_EQ(Checksum(Identity{}, {}), 0xA057271C9071C99Du);
  Bytes word(7);
  std::memcpy(word.data(), "forebay", word.size());
  EXPECT_EQ(Checksum(Identity{}, word), 0xF58D711520D48E73u);
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
