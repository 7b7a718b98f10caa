#define XXH_INLINE_ALL
#include <xxhash.h>

#include "nvme/internal/checksum_kernels.h"

namespace forebay::nvme::internal {

uint64_t ChecksumBaseline(const unsigned char* identity, const unsigned char* data, size_t size) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, identity, 32);
  if (size > 0) XXH3_64bits_update(&state, data, size);
  return XXH3_64bits_digest(&state);
}

}  // namespace forebay::nvme::internal
