// Switches for tests that show what each protection is for. Production never changes them.
#pragma once

namespace forebay::nvme::internal {

struct Protections {
  bool checksum = true;   // Verify() compares
  bool two_slots = true;  // a write never touches a slot that is needed
};

}  // namespace forebay::nvme::internal
