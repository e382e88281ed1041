# Finds the C compiler, or fails in one sentence that says what to install.

if(CMAKE_HOST_SYSTEM_NAME STREQUAL Windows)
  set(install "install gcc or clang of MinGW-w64, and set CC=gcc or CC=clang and CMAKE_GENERATOR=Ninja")
elseif(CMAKE_HOST_SYSTEM_NAME STREQUAL Darwin)
  set(install "install clang by: xcode-select --install")
else()
  set(install "install one: apt install gcc libc6-dev (Debian, Ubuntu), dnf install gcc (Fedora), apk add gcc musl-dev (Alpine)")
endif()

if(NOT CMAKE_C_COMPILER)
  include(CheckLanguage)
  check_language(C)
  set(found "${CMAKE_C_COMPILER}")
  # What the check sets is the first word of CC alone, and would outlive a failure.
  unset(CMAKE_C_COMPILER)
  unset(CMAKE_C_COMPILER CACHE)
  if(NOT found)
    message(FATAL_ERROR "halfstep needs a C compiler, and none that works was found; ${install}")
  endif()
endif()
enable_language(C)

if(MSVC)
  message(FATAL_ERROR "halfstep uses extensions of C that gcc and clang share, and ${CMAKE_C_COMPILER} lacks; ${install}")
endif()
if(CMAKE_C_BYTE_ORDER STREQUAL BIG_ENDIAN)
  message(FATAL_ERROR "halfstep needs a little-endian processor, and ${CMAKE_SYSTEM_PROCESSOR} is big-endian")
endif()
