// Loaded into a program before its own libraries (LD_PRELOAD): it runs on the machine that FOREBAY_TEST_MACHINE names;
// an empty name: on one without a machine-id.

#include <systemd/sd-id128.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

extern "C" __attribute__((visibility("default"))) int sd_id128_get_machine_app_specific(
    sd_id128_t application, sd_id128_t* machine) {
  const char* const name = std::getenv("FOREBAY_TEST_MACHINE");
  if (name == nullptr || *name == '\0') return -ENOENT;
  *machine = application;
  for (size_t i = 0; i < std::strlen(name); ++i) {
    machine->bytes[i % sizeof(machine->bytes)] ^= static_cast<unsigned char>(name[i]);
  }
  return 0;
}
