// SPDX-License-Identifier: Apache-2.0
#include "protocol/units.h"

#include <array>
#include <cctype>
#include <charconv>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace forebay::protocol {

std::string FormatBytes(uint64_t size_bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(size_bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  if (unit == 0) return absl::StrCat(size_bytes, " B");
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", std::string(text), "\" is not a size (examples: 4096, 64MiB, 1.5GiB)"));
  };
  const std::string trimmed(absl::StripAsciiWhitespace({text.data(), text.size()}));
  size_t digits = 0;
  while (
      digits < trimmed.size() &&
      (std::isdigit(static_cast<unsigned char>(trimmed[digits])) != 0 || trimmed[digits] == '.')) {
    ++digits;
  }
  double number = 0;
  if (digits == 0 || !absl::SimpleAtod(trimmed.substr(0, digits), &number)) return bad();
  const std::string unit =
      absl::AsciiStrToLower(absl::StripLeadingAsciiWhitespace(trimmed.substr(digits)));
  double scale = 0;
  if (unit.empty() || unit == "b") scale = 1;
  if (unit == "kib") scale = static_cast<double>(kKiB);
  if (unit == "mib") scale = static_cast<double>(kMiB);
  if (unit == "gib") scale = static_cast<double>(kGiB);
  if (unit == "tib") scale = static_cast<double>(kGiB) * 1024;
  const double size_bytes = number * scale;
  if (scale == 0 || !(size_bytes <= 0x1p62)) return bad();
  return static_cast<uint64_t>(size_bytes);
}

}  // namespace forebay::protocol
