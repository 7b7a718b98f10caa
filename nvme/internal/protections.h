// Switches for tests that show what each protection is for. Production never changes them.
#pragma once

namespace forebay::nvme::internal {

struct Protections {
  // A write never touches a slot that a durable ledger names.
  bool pins = true;
};

}  // namespace forebay::nvme::internal
