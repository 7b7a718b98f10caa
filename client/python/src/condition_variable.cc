// SPDX-License-Identifier: Apache-2.0
// Binds std::condition_variable::wait(lock) to the symbol version that every libstdc++ since GCC 4.4 has (linker option
// --wrap). GCC 12 added another version, which the linker would choose: the wheel would then not load with an older libstdc++.

__asm__(
    ".symver wait_of_every_libstdcxx,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

extern "C" {

void wait_of_every_libstdcxx(void* self, void* lock);

void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void* self, void* lock) {
  wait_of_every_libstdcxx(self, lock);
}
}
