// SPDX-License-Identifier: Apache-2.0
// toml++, of which Debian has no archive.

#define TOML_HEADER_ONLY 0
#define TOML_SHARED_LIB 1
#define TOML_IMPLEMENTATION
#include <toml++/toml.h>
