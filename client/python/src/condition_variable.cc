// SPDX-License-Identifier: Apache-2.0
// std::condition_variable::wait(lock), as every libstdc++ since GCC 4.4 has it. That of GCC 12 has a version of its own beside
// it, to which the linker would bind what it links here: the wheel would not load where libstdc++ is older. For the linker's
// option --wrap.

__asm__(
    ".symver wait_of_every_libstdcxx,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

extern "C" {

void wait_of_every_libstdcxx(void* self, void* lock);

void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void* self, void* lock) {
  wait_of_every_libstdcxx(self, lock);
}
}
