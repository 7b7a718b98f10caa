// SPDX-License-Identifier: Apache-2.0
#include "nvme/checksum.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "nvme/internal/checksum_kernels.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::nvme {
namespace {

using protocol::kPageBytes;

static_assert(internal::kDigestedBytes == kPageBytes);
static_assert(std::endian::native == std::endian::little, "digests are little-endian");

const internal::ChecksumKernels& Kernels() {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return internal::kAvx2Checksum;
#endif
  return internal::kBaselineChecksum;
}

const unsigned char* Raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}

}  // namespace

uint64_t Checksum(const Identity& identity, std::span<const std::byte> bytes) {
  return Kernels().of_bytes(Raw(identity.data()), Raw(bytes.data()), bytes.size());
}

uint64_t ChecksumOfDigests(const Identity& identity, std::span<const uint64_t> digests) {
  return Kernels().of_digests(Raw(identity.data()), digests.data(), digests.size());
}

PageDigests::PageDigests(std::span<const std::byte> bytes)
    : bytes_(bytes), digests_((bytes.size() + kPageBytes - 1) / kPageBytes) {}

void PageDigests::Add(size_t begin, size_t end) {
  FOREBAY_CHECK(begin <= end && end <= pages());
  if (begin == end) return;
  const size_t begin_byte = begin * kPageBytes;
  const size_t end_byte = std::min(end * kPageBytes, bytes_.size());
  Kernels().digest_pages(Raw(bytes_.data()) + begin_byte, end_byte - begin_byte,
                         digests_.data() + begin);
}

uint64_t PageDigests::Checksum(const Identity& identity) const {
  return ChecksumOfDigests(identity, digests_);
}

}  // namespace forebay::nvme
