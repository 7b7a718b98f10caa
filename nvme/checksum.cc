#include "nvme/checksum.h"

#include <cstddef>
#include <cstdint>
#include <span>

#include "nvme/internal/checksum_kernels.h"

namespace forebay::nvme {
namespace {

internal::ChecksumFn* Best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return &internal::ChecksumAvx2;
#endif
  return &internal::ChecksumBaseline;
}

}  // namespace

uint64_t Checksum(const Identity& identity, std::span<const std::byte> bytes) {
  static internal::ChecksumFn* const best = Best();
  return best(reinterpret_cast<const unsigned char*>(identity.data()),
              reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

}  // namespace forebay::nvme
