// SPDX-License-Identifier: Apache-2.0
// Goal    A window begins where 2 MiB pages of its file can stay 2 MiB pages, and no file is
//         mapped that could shrink under it.
// Method  Memfds of several sizes and seals.

#include "client/internal/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gtest/gtest.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal::mapping_test {
namespace {

using protocol::ErrorId;
using testing::HasError;

protocol::UniqueFd Memfd(off_t size, int seals) {
  protocol::UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), size), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(Mapping, BeginsOnAHugePageBorderAndSharesItsBytes) {
  for (const off_t size : {4096, 3 * 4096, (2 << 20) + 4096}) {
    const protocol::UniqueFd fd = Memfd(size, F_SEAL_SHRINK);
    const auto bytes = static_cast<uint64_t>(size);
    ASSERT_OK_AND_ASSIGN(const auto written,
                         Mapping::MapFile(fd.get(), bytes, MapAccess::kReadWrite));
    ASSERT_OK_AND_ASSIGN(const auto read, Mapping::MapFile(fd.get(), bytes, MapAccess::kRead));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(read->bytes().data()) % (2 << 20), 0U);
    EXPECT_EQ(read->bytes().size(), bytes);
    written->bytes().back() = std::byte{42};
    EXPECT_EQ(read->bytes().back(), std::byte{42});
  }
}

TEST(Mapping, RefusesAShorterFile) {
  const protocol::UniqueFd fd = Memfd(4096, F_SEAL_SHRINK);
  EXPECT_THAT(Mapping::MapFile(fd.get(), 4097, MapAccess::kRead), HasError(ErrorId::kProtocol));
  EXPECT_THAT(Mapping::MapFile(fd.get(), 0, MapAccess::kRead), HasError(ErrorId::kProtocol));
  EXPECT_THAT(Mapping::MapFile(-1, 4096, MapAccess::kRead), HasError(ErrorId::kProtocol));
}

TEST(Mapping, RefusesAFileThatCanShrink) {
  const protocol::UniqueFd fd = Memfd(4096, F_SEAL_GROW);
  EXPECT_THAT(Mapping::MapFile(fd.get(), 4096, MapAccess::kRead), HasError(ErrorId::kProtocol));
}

TEST(Mapping, PrivateMemoryIsZero) {
  ASSERT_OK_AND_ASSIGN(const auto mapping, Mapping::MapPrivate(10000));
  for (const std::byte one : mapping->bytes()) ASSERT_EQ(one, std::byte{0});
}

}  // namespace
}  // namespace forebay::client::internal::mapping_test
