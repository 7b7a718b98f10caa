// SPDX-License-Identifier: Apache-2.0
// True if a sanitizer is compiled in: it uses heap and descriptors of its own. UBSan, which runs with the address sanitizer,
// opens a pipe to check an object's type, and ends a program without free descriptors. Tests that use up descriptors therefore
// run in the other presets.
#pragma once

namespace forebay::testing {

#if defined(__has_feature)
inline constexpr bool kAddressSanitized = __has_feature(address_sanitizer);
inline constexpr bool kSanitized = kAddressSanitized || __has_feature(thread_sanitizer);
#else
inline constexpr bool kAddressSanitized = false;
inline constexpr bool kSanitized = false;
#endif

}  // namespace forebay::testing
