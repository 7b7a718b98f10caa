# SPDX-License-Identifier: Apache-2.0
# Installs a client: the static C++ libraries with their headers, the shared C library, and how
# CMake and pkg-config find both.

include(CMakePackageConfigHelpers)

install(TARGETS forebay_compile_options forebay_schema EXPORT forebayTargets COMPONENT client)
# The headers need it of whoever includes them.
target_compile_features(forebay_protocol PUBLIC cxx_std_20)
target_compile_features(forebay_client PUBLIC cxx_std_20)
foreach(library protocol rpc gpu client)
  install(TARGETS forebay_${library} EXPORT forebayTargets
    ARCHIVE COMPONENT client
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/forebay COMPONENT client)
endforeach()
install(TARGETS forebay_c EXPORT forebayTargets
  LIBRARY COMPONENT client NAMELINK_COMPONENT client)
install(FILES ${PROJECT_BINARY_DIR}/protocol/forebay.capnp.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/forebay/protocol COMPONENT client)
install(FILES forebay.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT client)

# The same targets in the build tree, for the wheel (FOREBAY_BUILD).
export(EXPORT forebayTargets NAMESPACE built:: FILE ${PROJECT_BINARY_DIR}/forebayTargets.cmake)

set(forebay_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/forebay)
install(EXPORT forebayTargets NAMESPACE forebay:: DESTINATION ${forebay_cmake_dir}
  COMPONENT client)
configure_package_config_file(forebayConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/forebayConfig.cmake
  INSTALL_DESTINATION ${forebay_cmake_dir} NO_SET_AND_CHECK_MACRO
  NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/forebayConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/forebayConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/forebayConfigVersion.cmake
  DESTINATION ${forebay_cmake_dir} COMPONENT client)

# The prefix of `cmake --install --prefix` is known only then.
install(CODE "set(CMAKE_INSTALL_LIBDIR \"${CMAKE_INSTALL_LIBDIR}\")
set(CMAKE_INSTALL_INCLUDEDIR \"${CMAKE_INSTALL_INCLUDEDIR}\")
set(PROJECT_VERSION \"${PROJECT_VERSION}\")
configure_file(\"${CMAKE_CURRENT_SOURCE_DIR}/forebay.pc.in\"
  \"${CMAKE_CURRENT_BINARY_DIR}/forebay.pc\" @ONLY)" COMPONENT client)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/forebay.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT client)
