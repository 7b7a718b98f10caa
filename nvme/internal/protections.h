// SPDX-License-Identifier: Apache-2.0
// Switches for tests that show what each protection is for. Production never changes them.
#pragma once

namespace forebay::nvme::internal {

struct Protections {
  // A write never touches a slot that a durable ledger names.
  bool pins = true;
  // A write that was given up keeps its slot until it has ended.
  bool given_up_slots = true;
};

}  // namespace forebay::nvme::internal
