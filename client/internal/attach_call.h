// SPDX-License-Identifier: Apache-2.0
// Makes the attach request from the caller's options.
#pragma once

#include <cstddef>
#include <span>

#include "client/client.h"
#include "client/internal/control.h"
#include "protocol/layout.h"

namespace forebay::client::internal {

// Makes the attach request from the options, with the defaults in place of zeros. `encoded` is the encoded spec of the layout,
// and must outlive the result.
AttachCall MakeAttachCall(const AttachOptions& options, const protocol::Layout& layout,
                          std::span<const std::byte> encoded);

}  // namespace forebay::client::internal
