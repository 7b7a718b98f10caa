// SPDX-License-Identifier: Apache-2.0
// What an attach asks the daemon for.
#pragma once

#include <cstddef>
#include <span>

#include "client/client.h"
#include "client/internal/control.h"
#include "protocol/layout.h"

namespace forebay::client::internal {

// Of the options, with the defaults in the place of zeros. `encoded` is the layout's spec, and lives as long.
AttachCall MakeAttachCall(const AttachOptions& options, const protocol::Layout& layout,
                          std::span<const std::byte> encoded);

}  // namespace forebay::client::internal
