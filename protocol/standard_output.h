// SPDX-License-Identifier: Apache-2.0
// Standard output, of programs that say so when it is lost.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace forebay::protocol {

// Writes all of `text` to standard output, nothing of which stays in a buffer. From the first call on a reader that has gone is
// an error and no signal: what the program has started ends in order.
//
// Errors  kCancelled  its reader has gone: there is nobody to tell.
//         E_LIMIT     it takes no more, as a full disk.
absl::Status WriteOutput(std::string_view text);

}  // namespace forebay::protocol
