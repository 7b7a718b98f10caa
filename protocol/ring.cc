// SPDX-License-Identifier: Apache-2.0
#include "protocol/ring.h"

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::protocol {

absl::Status BadRingIndex(const char* which, uint64_t own, uint64_t peer) {
  return MakeError(
      ErrorId::kRing,
      absl::StrCat("the memory shared by client and daemon was overwritten: the index of "
                   "the ring's ",
                   which, " is ", peer, ", this side is at ", own, " (", kRingEntries, " entries)"),
      "the session has ended: look for stray writes of the process, then attach again");
}

void FormatRing(RingMemory& ring, uint32_t version) {
  ring.header.magic = kRingMagic;
  ring.header.version = version;
  ring.header.entries = kRingEntries;
}

absl::Status CheckRingHeader(const RingMemory& ring) {
  const RingHeader header = internal::LoadEntry(ring.header);
  if (header.magic == kRingMagic && header.version == kProtocolVersion &&
      header.entries == kRingEntries) {
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kRing,
                   absl::StrCat("ring header with magic ", absl::Hex(header.magic), ", version ",
                                header.version, ", ", header.entries, " entries; expected ",
                                absl::Hex(kRingMagic), ", ", kProtocolVersion, ", ", kRingEntries),
                   "use the client library of the daemon's version");
}

}  // namespace forebay::protocol
