// SPDX-License-Identifier: Apache-2.0
// CHECK: a broken invariant is a bug, and the process stops. No byte from a client may reach one.
#pragma once

#include <cstdio>
#include <cstdlib>

// Prints file, line and the condition to stderr, then aborts. Stays on in every build.
#define FOREBAY_CHECK(condition)                                                         \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
