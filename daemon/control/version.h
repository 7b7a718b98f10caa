// SPDX-License-Identifier: Apache-2.0
// The release this program is of.
#pragma once

namespace forebay::daemon {

#ifdef FOREBAY_VERSION
inline constexpr char kVersion[] = FOREBAY_VERSION;
#else
inline constexpr char kVersion[] = "unknown";
#endif

}  // namespace forebay::daemon
