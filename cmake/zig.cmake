# Compiles for another system by zig, whose package `ziglang` of the Python index has C libraries for all of them:
#
#   cmake -DCMAKE_TOOLCHAIN_FILE=cmake/zig.cmake -DHALFSTEP_ZIG=.../ziglang/zig -DHALFSTEP_ZIG_TARGET=aarch64-linux-gnu.2.17 ...
#
# A target is processor-system-C library, with the least version of the library or system that it must run on.
set(HALFSTEP_ZIG "zig" CACHE STRING "The program zig")
set(HALFSTEP_ZIG_TARGET "" CACHE STRING "Processor, system and C library, as zig names them")

list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HALFSTEP_ZIG HALFSTEP_ZIG_TARGET HALFSTEP_ZIG_TOOLS)

if(NOT HALFSTEP_ZIG_TARGET MATCHES "^(x86_64|aarch64)-(linux|macos|windows)[-.]")
  message(FATAL_ERROR "HALFSTEP_ZIG_TARGET is '${HALFSTEP_ZIG_TARGET}'; packaging/platforms.csv lists targets")
endif()
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
set(systems_linux Linux)
set(systems_macos Darwin)
set(systems_windows Windows)
set(CMAKE_SYSTEM_NAME ${systems_${CMAKE_MATCH_2}})

# CMake takes a compiler of one word in all places, so each of zig's tools gets a script. Trial builds use the same ones.
if(NOT HALFSTEP_ZIG_TOOLS)
  set(HALFSTEP_ZIG_TOOLS ${CMAKE_BINARY_DIR}/zig)
  string(REPLACE "'" "'\\''" quoted "${HALFSTEP_ZIG}")
  foreach(tool cc c++ ar ranlib)
    file(WRITE ${HALFSTEP_ZIG_TOOLS}/${tool} "#!/bin/sh\nexec '${quoted}' ${tool} \"$@\"\n")
    execute_process(COMMAND chmod +x ${HALFSTEP_ZIG_TOOLS}/${tool})
  endforeach()
endif()
set(CMAKE_C_COMPILER ${HALFSTEP_ZIG_TOOLS}/cc)
set(CMAKE_CXX_COMPILER ${HALFSTEP_ZIG_TOOLS}/c++)
set(CMAKE_C_COMPILER_TARGET ${HALFSTEP_ZIG_TARGET})
set(CMAKE_CXX_COMPILER_TARGET ${HALFSTEP_ZIG_TARGET})
set(CMAKE_AR ${HALFSTEP_ZIG_TOOLS}/ar)
set(CMAKE_RANLIB ${HALFSTEP_ZIG_TOOLS}/ranlib)
# CMake wants a program that changes names in libraries for macOS. Those here are linked with the names that they keep.
set(CMAKE_INSTALL_NAME_TOOL /nothing CACHE FILEPATH "No such program is needed")
# zig adds debug information and checks of undefined behaviour by itself, and would compile for this machine's processor.
set(CMAKE_C_FLAGS_INIT "-g0 -fno-sanitize=undefined")
set(CMAKE_CXX_FLAGS_INIT "-g0 -fno-sanitize=undefined")
# Without symbols nobody asks for. zig would write a file of them beside each DLL.
foreach(kind SHARED MODULE EXE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-s")
endforeach()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH /nothing)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
