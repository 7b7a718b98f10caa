// SPDX-License-Identifier: Apache-2.0
// Substitute for arc4random() of glibc 2.36 and later. libstdc++ calls it for a random device that no code of ours uses. With
// this substitute the programs run on systems with older versions too.

#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

extern "C" uint32_t arc4random() noexcept {
  uint32_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) std::abort();
  return number;
}
