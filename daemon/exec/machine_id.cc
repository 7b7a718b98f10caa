// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/machine_id.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "daemon/exec/sha256.h"
#include "protocol/os/memfd.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {
namespace {

// Application id of Forebay. Hashing it with the private machine-id gives an id that does not disclose the machine-id.
constexpr std::array<uint8_t, 16> kApplication = {0x6f, 0x0b, 0x52, 0xc1, 0x9d, 0x3e, 0x4b, 0x77,
                                                  0xa2, 0x18, 0x5c, 0xe4, 0x93, 0x70, 0xfd, 0x2b};
constexpr size_t kMachineIdDigits = 2 * sizeof(MachineId);

}  // namespace

MachineId ThisMachine() {
  std::array<char, kMachineIdDigits> digits{};
  const protocol::UniqueFd file(::openat(AT_FDCWD, "/etc/machine-id", O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return {};
  const int64_t size =
      protocol::ReadFromStart(file.get(), std::as_writable_bytes(std::span(digits)));
  return MachineOf({digits.data(), static_cast<size_t>(std::max<int64_t>(size, 0))});
}

MachineId MachineOf(std::string_view digits) {
  const bool is_known =
      digits.size() == kMachineIdDigits &&
      std::ranges::all_of(digits, [](unsigned char c) { return absl::ascii_isxdigit(c); }) &&
      digits.find_first_not_of('0') != std::string_view::npos;
  if (!is_known) return {};
  const std::string key = absl::HexStringToBytes(std::string(digits));
  const Sha256Digest digest =
      HmacSha256(std::as_bytes(std::span(key)), std::as_bytes(std::span(kApplication)));
  MachineId machine{};
  std::memcpy(machine.data(), digest.data(), sizeof(machine));
  machine[6] = (machine[6] & std::byte{0x0f}) | std::byte{0x40};  // a UUID of version 4
  machine[8] = (machine[8] & std::byte{0x3f}) | std::byte{0x80};
  return machine;
}

}  // namespace forebay::daemon
