// SPDX-License-Identifier: Apache-2.0
// glibc has it since 2.36. libstdc++ asks for it, for a random device that nothing of ours uses: with this the programs run
// with older ones too.

#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

extern "C" uint32_t arc4random() noexcept {
  uint32_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) std::abort();
  return number;
}
