// SPDX-License-Identifier: Apache-2.0
// Whether a sanitizer is compiled in: its heap and its descriptors are not the program's. Beside the
// address sanitizer runs UBSan, whose check of an object's type opens a pipe: it ends a program that has
// no descriptor left. Tests that take descriptors away run in the other presets.
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
