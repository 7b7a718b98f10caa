// SPDX-License-Identifier: Apache-2.0
#include "nvme/verify.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "protocol/error.h"
#include "protocol/units.h"

namespace forebay::nvme {

using protocol::ErrorId;
using protocol::MakeError;

namespace {

constexpr char kDamagedHint[] =
    "the device lost or changed data: forebay scrub says what else; delete the job (forebay jobs "
    "--delete) and begin it again from weights that were saved elsewhere";

}  // namespace

absl::Status Verify(const ExpectedPages& expected, std::span<const std::byte> bytes) {
  PageDigests found(bytes);
  found.Add(0, found.pages());
  const auto [wrong, digest] = std::ranges::mismatch(expected.digests, found.digests());
  if (wrong == expected.digests.end() && digest == found.digests().end()) return absl::OkStatus();
  const auto page = static_cast<uint64_t>(wrong - expected.digests.begin());
  return MakeError(
      ErrorId::kCorrupt,
      absl::StrFormat("swap path %d (%s): the page at offset %d of the slot at offset %d does not "
                      "hold what was written to it",
                      expected.slot.path, expected.path,
                      expected.offset_bytes + page * protocol::kPageBytes,
                      expected.slot.offset_bytes),
      kDamagedHint);
}

namespace {

absl::Status CompareChecksum(const ExpectedContent& expected, uint64_t found, uint64_t bytes) {
  if (found == expected.checksum) return absl::OkStatus();
  const std::string identity = absl::BytesToHexString(
      {reinterpret_cast<const char*>(expected.identity.data()), expected.identity.size()});
  return MakeError(
      ErrorId::kCorrupt,
      absl::StrFormat("swap path %d (%s): the slot at offset %d does not hold what was written to "
                      "it: identity %s, checksum %016x, expected %016x over %d bytes",
                      expected.slot.path, expected.path, expected.slot.offset_bytes, identity,
                      found, expected.checksum, bytes),
      kDamagedHint);
}

}  // namespace

absl::Status Verify(const ExpectedContent& expected, std::span<const std::byte> bytes) {
  return CompareChecksum(expected, Checksum(expected.identity, bytes), bytes.size());
}

absl::Status VerifyDigests(const ExpectedContent& expected, std::span<const uint64_t> digests) {
  return CompareChecksum(expected, ChecksumOfDigests(expected.identity, digests),
                         digests.size() * protocol::kPageBytes);
}

}  // namespace forebay::nvme
