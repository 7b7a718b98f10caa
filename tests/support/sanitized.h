// Whether the address sanitizer is compiled in: its heap and its descriptors are not the program's.
#pragma once

namespace forebay::testing {

#if defined(__has_feature)
inline constexpr bool kSanitized = __has_feature(address_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace forebay::testing
