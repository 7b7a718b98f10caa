// SPDX-License-Identifier: Apache-2.0
// Switches with which tests show the effect of each protection. Production does not change them.
#pragma once

namespace forebay::nvme::internal {

struct Protections {
  // True if writes to a slot that a durable ledger names are refused.
  bool pins = true;
  // True if a slot is not written again until an earlier write of it, which was given up, has ended.
  bool given_up_slots = true;
};

}  // namespace forebay::nvme::internal
