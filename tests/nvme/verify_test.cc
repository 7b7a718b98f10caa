// SPDX-License-Identifier: Apache-2.0
// Goal    Bytes that were read are accepted only if their checksum and identity are the expected ones. The error names path,
//         offset and identity.
// Method  The checksum's own values are checked in checksum_test.cc.

#include "nvme/verify.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/status_test.h"

namespace forebay::nvme {
namespace {

using ::forebay::testing::HasError;
using protocol::ErrorId;
using ::testing::HasSubstr;

TEST(Verify, NamesPathOffsetAndIdentity) {
  const std::vector<std::byte> bytes(8192, std::byte{7});
  ExpectedContent expected;
  expected.slot = {.path = 1, .offset_bytes = 40960, .size_bytes = 8192};
  expected.path = "/mnt/b/forebay.swap";
  expected.identity.fill(std::byte{0xAB});
  expected.checksum = Checksum(expected.identity, bytes);
  EXPECT_OK(Verify(expected, bytes));
  expected.identity[0] = std::byte{0xAC};
  const absl::Status status = Verify(expected, bytes);
  EXPECT_THAT(status, HasError(ErrorId::kCorrupt));
  EXPECT_THAT(status.message(),
              HasSubstr("swap path 1 (/mnt/b/forebay.swap): the slot at offset 40960 "));
  EXPECT_THAT(status.message(), HasSubstr("acabababab"));
}

TEST(Verify, NamesThePageThatIsNotTheExpectedOne) {
  std::vector<std::byte> bytes(3 * 4096, std::byte{7});
  bytes[4096] = std::byte{8};
  PageDigests digests(bytes);
  digests.Add(0, 3);
  const ExpectedPages expected{.slot = {.path = 1, .offset_bytes = 40960, .size_bytes = 65536},
                               .path = "/mnt/b/forebay.swap",
                               .offset_bytes = 16384,
                               .digests = digests.digests()};
  EXPECT_OK(Verify(expected, bytes));
  bytes[2 * 4096 - 1] = std::byte{9};
  const absl::Status status = Verify(expected, bytes);
  EXPECT_THAT(status, HasError(ErrorId::kCorrupt));
  EXPECT_THAT(status.message(), HasSubstr("swap path 1 (/mnt/b/forebay.swap): the page at offset "
                                          "20480 of the slot at offset 40960 "));
  EXPECT_THAT(Verify(expected, std::span(bytes).first(4096)), HasError(ErrorId::kCorrupt))
      << "too few pages";
}

TEST(Verify, BytesThatWereReadInPiecesAreVerifiedByTheirDigests) {
  std::vector<std::byte> bytes(3 * 4096 + 100, std::byte{7});
  ExpectedContent expected;
  expected.slot = {.path = 1, .offset_bytes = 40960, .size_bytes = 65536};
  expected.path = "/mnt/b/forebay.swap";
  expected.checksum = Checksum(expected.identity, bytes);
  const auto digests = [&bytes] {
    std::vector<uint64_t> of_pieces;
    for (size_t at = 0; at < bytes.size(); at += 8192) {
      PageDigests piece{std::span(bytes).subspan(at, std::min<size_t>(8192, bytes.size() - at))};
      piece.Add(0, piece.pages());
      of_pieces.insert(of_pieces.end(), piece.digests().begin(), piece.digests().end());
    }
    return of_pieces;
  };
  EXPECT_OK(VerifyDigests(expected, digests()));
  bytes.back() = std::byte{8};
  const absl::Status status = VerifyDigests(expected, digests());
  EXPECT_THAT(status, HasError(ErrorId::kCorrupt));
  EXPECT_THAT(status.message(), HasSubstr("the slot at offset 40960 "));
}

}  // namespace
}  // namespace forebay::nvme
