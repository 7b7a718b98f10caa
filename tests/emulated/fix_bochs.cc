// SPDX-License-Identifier: Apache-2.0
// Preloaded into Bochs 2.7, whose conversion to binary16 (VCVTPS2PH) rounds every tie up. Replaces it with a jump to the
// conversion of the host's processor.

#include <dlfcn.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

// Replaces Bochs's conversion from float32 to binary16. Rounds to nearest, ties to even: the mode of every call in our kernels.
uint16_t ToNearest(uint32_t float_bits, void* /*status*/) {
  const __m128i halves = _mm_cvtps_ph(_mm_set1_ps(std::bit_cast<float>(float_bits)), 0);
  return static_cast<uint16_t>(_mm_extract_epi16(halves, 0));
}

[[gnu::constructor]] void Fix() {
  void* const wrong = dlsym(RTLD_DEFAULT, "_Z18float32_to_float16jR14float_status_t");
  if (wrong == nullptr) return;  // a shell or another program without the function
  constexpr uintptr_t kPageBytes = 4096;
  const uintptr_t page = reinterpret_cast<uintptr_t>(wrong) / kPageBytes * kPageBytes;
  uint8_t jump[12] = {0x48, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xE0};  // mov rax, to; jmp rax
  auto* const to = &ToNearest;
  std::memcpy(jump + 2, &to, sizeof(to));
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  if (mprotect(reinterpret_cast<void*>(page), 2 * kPageBytes, PROT_READ | PROT_WRITE | PROT_EXEC)) {
    std::perror("fix_bochs");
    std::abort();
  }
  std::memcpy(wrong, jump, sizeof(jump));
}

}  // namespace
