# Every test comes from the files in tests/: test_*.c are programs, *_test.sh are scripts, python/test_*.py run in a virtual
# environment, and the builds at the end repeat the programs with other compilers. Other programs in tests/ serve the
# scripts. What a program links follows from what it includes. A test that needs something absent is skipped with the reason, or fails where CI=true.

set(tests ${PROJECT_SOURCE_DIR}/tests)

# die_after_fork: the child of a fork is tested too. A program whose groups were all filtered away must not pass.
set(environment "HALFSTEP_SOURCE=${PROJECT_SOURCE_DIR}" "HALFSTEP_BUILD=${PROJECT_BINARY_DIR}"
  ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
  TSAN_OPTIONS=halt_on_error=1:die_after_fork=0)
function(halfstep_test_properties name)
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 FAIL_REGULAR_EXPRESSION "(^|\n)0 passed, 0 failed"
    ENVIRONMENT "${environment}" ${ARGN})
endfunction()

function(halfstep_test_program name source)
  file(STRINGS ${source} includes REGEX "^#include +\"")
  set(libraries halfstep_static Threads::Threads)
  if(includes MATCHES "halfstep_io\\.h|io/")
    if(NOT with_io)
      return()
    endif()
    list(PREPEND libraries halfstep_io)
  endif()
  if(includes MATCHES "tools/|models/|ui/|\"data\\.h")
    if(NOT with_tools)
      return()
    endif()
    list(PREPEND libraries hstep_tools)
  endif()
  add_executable(${name} ${source} ${ARGN})
  target_include_directories(${name} PRIVATE include src tests .)
  target_compile_definitions(${name} PRIVATE ${halfstep_have_isas} $<$<BOOL:${CMAKE_CROSSCOMPILING}>:HSTEP_TEST_EMULATED=1>)
  target_link_libraries(${name} PRIVATE ${libraries} m)
  # gcc 12's vectorizer fails on some of them (an internal error, for aarch64), and they have no use for it.
  target_compile_options(${name} PRIVATE -fno-tree-vectorize)
  # The programs include internal headers but define no interface: keep them out of the way of build/halfstep.
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(NOT name MATCHES "^test_")
    return()
  endif()
  file(STRINGS ${source} short REGEX "\"--short\"")
  set(arguments "")
  if(HALFSTEP_SHORT_TESTS AND short)
    set(arguments --short)
  endif()
  add_test(NAME ${name} COMMAND ${name} ${arguments} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  halfstep_test_properties(${name} TIMEOUT 900 COST 50)
endfunction()

halfstep_compile_per_isa(test_vec_unit tests/test_vec_unit.c vec_unit_objects)
file(GLOB programs CONFIGURE_DEPENDS tests/*.c)
list(FILTER programs EXCLUDE REGEX "/(test_vec_unit|header_test_c)\\.c$")
foreach(source IN LISTS programs)
  get_filename_component(name ${source} NAME_WE)
  set(extra "")
  if(name STREQUAL test_vec)
    set(extra ${vec_unit_objects})
  endif()
  halfstep_test_program(${name} ${source} ${extra})
endforeach()

if(NOT HALFSTEP_TESTS STREQUAL UNIT)
  # The public headers compile alone, as C and as C++: these have no main, compiling them is the test.
  add_library(header_test_c OBJECT tests/header_test_c.c)
  target_include_directories(header_test_c PRIVATE include)
  target_compile_options(header_test_c PRIVATE -Wpedantic)
  include(CheckLanguage)
  check_language(CXX)
  if(CMAKE_CXX_COMPILER)
    enable_language(CXX)
    add_library(header_test_cpp OBJECT tests/header_test_cpp.cpp)
    target_include_directories(header_test_cpp PRIVATE include)
    target_compile_options(header_test_cpp PRIVATE -Wpedantic)
    set_target_properties(header_test_cpp PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF)
  endif()

  file(GLOB examples CONFIGURE_DEPENDS examples/*.c)
  foreach(source IN LISTS examples)
    get_filename_component(name ${source} NAME_WE)
    file(STRINGS ${source} io REGEX "^#include <halfstep_io\\.h>")
    if(io AND NOT with_io)
      continue()
    endif()
    add_executable(example_${name} ${source})
    if(io)
      target_link_libraries(example_${name} PRIVATE halfstep_io)
    endif()
    target_link_libraries(example_${name} PRIVATE halfstep m)
    set_target_properties(example_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/examples)
    add_test(NAME example_${name} COMMAND example_${name} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
    halfstep_test_properties(example_${name} TIMEOUT 300)
  endforeach()

  file(GLOB scripts CONFIGURE_DEPENDS tests/*_test.sh)
  foreach(script IN LISTS scripts)
    get_filename_component(name ${script} NAME_WE)
    add_test(NAME ${name} COMMAND bash ${script} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    halfstep_test_properties(${name} TIMEOUT 900 COST 100)
  endforeach()

  # One environment and one installed wheel serve them all, so these are made first of everything.
  add_test(NAME python_package COMMAND bash ${tests}/python_package.sh WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  halfstep_test_properties(python_package TIMEOUT 1200 COST 3000 FIXTURES_SETUP python)
  file(GLOB python_tests CONFIGURE_DEPENDS tests/python/test_*.py)
  foreach(script IN LISTS python_tests)
    get_filename_component(name ${script} NAME_WE)
    add_test(NAME python_${name} COMMAND bash ${tests}/run_python.sh ${script} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    halfstep_test_properties(python_${name} TIMEOUT 900 COST 300 FIXTURES_REQUIRED python)
  endforeach()

  # The same programs from other compilers, with sanitizers, and for the other processor: each a build of its own inside
  # this one, configured, built and run by one test. They are the longest tests, so they start first.
  function(halfstep_other_build name needs)
    add_test(NAME build_${name}
      COMMAND bash ${tests}/other_build.sh ${PROJECT_BINARY_DIR}/${name} "${needs}" -DHALFSTEP_TESTS=UNIT
              -DHALFSTEP_SHORT_TESTS=ON -DHALFSTEP_WERROR=${HALFSTEP_WERROR} ${ARGN})
    halfstep_test_properties(build_${name} TIMEOUT 1200 COST 1000)
  endfunction()
  halfstep_other_build(asan gcc --preset asan -DCMAKE_C_COMPILER=gcc)
  halfstep_other_build(tsan gcc --preset tsan -DCMAKE_C_COMPILER=gcc)
  halfstep_other_build(clang clang -DCMAKE_C_COMPILER=clang -DHALFSTEP_TOOLS=OFF)
  if(NOT halfstep_processor STREQUAL aarch64)
    halfstep_other_build(aarch64 "aarch64-linux-gnu-gcc qemu-aarch64" -DHALFSTEP_TOOLS=OFF -DHALFSTEP_IO=OFF
      -DCMAKE_TOOLCHAIN_FILE=${PROJECT_SOURCE_DIR}/cmake/aarch64-linux-gnu.cmake)
  endif()
endif()
