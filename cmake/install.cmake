# What cmake --install writes: libraries, headers, the CMake package halfstep and one pkg-config file per shared library.
# Nothing in it names the prefix, so an installed tree may be moved.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/halfstep)

install(TARGETS ${installed} EXPORT halfstep
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT halfstep NAMESPACE halfstep:: DESTINATION ${package_dir} FILE halfstep-targets.cmake)
configure_package_config_file(cmake/halfstep-config.cmake.in halfstep-config.cmake INSTALL_DESTINATION ${package_dir})
# As docs/compatibility.md promises.
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatibility SameMinorVersion)
else()
  set(compatibility SameMajorVersion)
endif()
write_basic_package_version_file(halfstep-config-version.cmake COMPATIBILITY ${compatibility})
install(FILES ${PROJECT_BINARY_DIR}/halfstep-config.cmake ${PROJECT_BINARY_DIR}/halfstep-config-version.cmake
  DESTINATION ${package_dir})

# prefix is written relative to the .pc file itself.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
function(halfstep_pkg_config name description requires libs_private)
  configure_file(cmake/library.pc.in ${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()

install(FILES include/halfstep.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
halfstep_pkg_config(halfstep "${PROJECT_DESCRIPTION}" "" "-lm -ldl -pthread")
if(with_io)
  install(FILES include/halfstep_io.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  halfstep_pkg_config(halfstep_io "safetensors files, checkpoint directories, optimizers in files" halfstep "-pthread")
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(python_io "")
if(with_io)
  set(python_io $<TARGET_FILE:halfstep_io>)
endif()
halfstep_install_python($<TARGET_FILE:halfstep> "${python_io}")
add_dependencies(halfstep_python halfstep)
if(with_io)
  add_dependencies(halfstep_python halfstep_io)
endif()
