// SPDX-License-Identifier: Apache-2.0
// Standard output, of programs that say so when it is lost.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace forebay::protocol {

// Writes all of `text` to standard output, unbuffered. From the first call on, a closed reader causes an error and no signal,
// so that the program's children end in order.
//
// Errors  kCancelled  the reader has closed standard output.
//         E_LIMIT     standard output takes no more, as a full disk.
absl::Status WriteOutput(std::string_view text);

}  // namespace forebay::protocol
