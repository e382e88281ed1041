#!/bin/bash
# Checks an installed tree that was moved: it serves find_package and pkg-config, shared and static, and its program
# runs. all: checks in its place another project of CMake that takes this one in.
# (make check leaves it out.)
# (make test-all runs "tests/packages/install_test.sh all" too.)
. "$(dirname "$0")/../tools/lib.sh"
need cmake cc make pkg-config
make_scratch

if [ "${1:-}" = all ]; then
    need c++
    mkdir "$scratch/parent"
    cd "$scratch/parent"
    cat >main.cpp <<'C'
#define HALFSTEP_ADVANCED
#ifdef WITH_IO
#include <halfstep_io.h>
#endif
#include <halfstep.h>
int main() { return halfstep_abi() == HALFSTEP_ABI ? 0 : 1; }
C
    cat >CMakeLists.txt <<C
cmake_minimum_required(VERSION 3.18)
project(parent LANGUAGES CXX)
include(FetchContent)
FetchContent_Declare(halfstep SOURCE_DIR [==[$source_dir]==])
set(HALFSTEP_ISAS scalar)
get_cmake_property(names VARIABLES)
get_cmake_property(cached CACHE_VARIABLES)
foreach(name IN LISTS names)
  set(before_\${name} "\${\${name}}")
endforeach()
FetchContent_MakeAvailable(halfstep)
foreach(name IN LISTS names)
  if(NOT name MATCHES "^(name|CMAKE_MATCH_.*)$" AND NOT "\${\${name}}" STREQUAL "\${before_\${name}}")
    message("CHANGED \${name}: '\${before_\${name}}' became '\${\${name}}'")
  endif()
endforeach()
get_cmake_property(now CACHE_VARIABLES)
list(REMOVE_ITEM now \${cached})
list(FILTER now EXCLUDE REGEX "^(HALFSTEP|halfstep|CMAKE|FETCHCONTENT|FIND_PACKAGE_MESSAGE|_GNUInstallDirs)_")
if(now)
  message("CHANGED the cache, by \${now}")
endif()
if(POLICY CMP0126 AND TARGET hstep_kernels_avx2)
  message("CHANGED HALFSTEP_ISAS is ignored")
endif()
add_executable(static main.cpp)
target_link_libraries(static PRIVATE halfstep::static)
add_executable(shared main.cpp)
target_compile_definitions(shared PRIVATE WITH_IO)
target_link_libraries(shared PRIVATE halfstep::io)
set_target_properties(shared PROPERTIES INSTALL_RPATH "\$ORIGIN/../lib")
install(TARGETS static shared halfstep halfstep_io RUNTIME DESTINATION bin LIBRARY DESTINATION lib)
C
    configure() {
        cmake -S . -B build -G "Unix Makefiles" -DCMAKE_UNITY_BUILD=ON -DHALFSTEP_CUDA=OFF "$@" >"$scratch/log" 2>&1 ||
            { cat "$scratch/log"; fail "a project that takes this one in cannot be configured"; }
        ! grep CHANGED "$scratch/log" || fail "a project that takes this one in is changed"
    }
    build() {
        cmake --build build --parallel "${HALFSTEP_BUILD_JOBS:-1}" "$@" >"$scratch/log" 2>&1 ||
            { tail -n 20 "$scratch/log"; fail "a project that takes this one in cannot be built"; }
    }
    configure
    grep -q -- '-O3.*kernels\.c' build/compile_commands.json || fail "a project without a build type gets a slow library"
    echo "ok   a project that takes this one in keeps its settings"
    configure -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS=-O0
    ! grep -q -- '-O3' build/compile_commands.json || fail "a project's build type does not count"
    build --target static
    made=$(find build/_deps -name '*.so*' -o -name halfstep -type f)
    [ -z "$made" ] || fail "more was built than the static library: $made"
    build
    [ ! -e build/_deps/halfstep-build/halfstep ] || fail "the program was built, and nothing names it"
    cmake --install build --prefix "$scratch/there" >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "its install"; }
    installed=$(cd "$scratch/there" && find . -type f | sed 's/\.so.*/.so/' | sort | xargs)
    [ "$installed" = "./bin/shared ./bin/static ./lib/libhalfstep.so ./lib/libhalfstep_io.so" ] || fail "its install has $installed"
    rm -r build
    "$scratch/there/bin/static" && "$scratch/there/bin/shared" || fail "its programs do not run"
    echo "ok   it builds and installs what it names, and CMAKE_UNITY_BUILD does no harm"
    exit 0
fi

# The list of files by which a user removes an earlier install stays.
manifest=$build_dir/install_manifest.txt
[ ! -e "$manifest" ] || mv "$manifest" "$scratch/manifest"
(umask 077 && make -C "$source_dir" -o build install BUILD="${build_dir//\$/\$\$}" PREFIX="${scratch//\$/\$\$}/first") \
    >"$scratch/log" || { cat "$scratch/log"; fail "make install"; }
mv "$manifest" "$scratch/installed"
[ ! -e "$scratch/manifest" ] || mv "$scratch/manifest" "$manifest"
closed=$(find "$scratch/first" -mindepth 1 \( -type d ! -perm -055 -o ! -type l ! -perm -044 \))
[ -z "$closed" ] || fail "after make install under umask 077 others cannot read $closed"
mkdir "$scratch/removed"
cp -R "$scratch/first/." "$scratch/removed"
sed "s|^$scratch/first/|$scratch/removed/|" "$scratch/installed" | tr '\n' '\0' | xargs -0 rm -f
left=$(find "$scratch/removed" ! -type d)
[ -z "$left" ] || fail "install_manifest.txt lacks $left"
echo "ok   others can read what is installed, and install_manifest.txt names it all"
mv "$scratch/first" "$scratch/moved prefix"
prefix="$scratch/moved prefix"
# CMake 3.25 and later can be told to ignore its registry of build folders. Naming the path is enough for all versions.
if grep -rlF "$scratch/first" "$prefix" || grep -rlIF "$source_dir" "$prefix"; then
    fail "an installed file names the prefix or the source folder"
fi

mkdir "$scratch/consumer"
cat >"$scratch/consumer/main.c" <<'C'
#define HALFSTEP_ADVANCED
#include <halfstep.h>
#include <stdio.h>
int main(void)
{
    halfstep_optimizer *optimizer;
    int32_t group;
    int error = halfstep_create(NULL, &optimizer);
    if (!error) error = halfstep_add_group(optimizer, "adamw/bf16-sr/int8", &group);
    if (!error && halfstep_abi() != HALFSTEP_ABI) error = 1;
    halfstep_destroy(optimizer);
    printf("%d %d\n", (int)halfstep_version(), error);
    return error != 0;
}
C
expected=$(sed -n 's/^#define HALFSTEP_VERSION_[A-Z]* *//p' "$source_dir/include/halfstep.h" |
    awk '{ v = v * 100 + $1 } END { print v " 0" }')
check() {
    out=$("${@:2}") || fail "$1: exit status $?, $out"
    [ "$out" = "$expected" ] || fail "$1: printed '$out', not '$expected'"
    echo "ok   $1"
}

io=
[ -e "$prefix/include/halfstep_io.h" ] && io=io
cat >"$scratch/consumer/CMakeLists.txt" <<C
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
find_package(halfstep $(echo "$expected" | awk '{ print int($1 / 10000) "." int($1 / 100) % 100 }') REQUIRED COMPONENTS halfstep $io)
add_executable(shared main.c)
target_link_libraries(shared PRIVATE halfstep::halfstep ${io:+halfstep::io})
add_executable(static main.c)
target_link_libraries(static PRIVATE halfstep::static)
add_library(plugin MODULE main.c)
target_link_libraries(plugin PRIVATE halfstep::static)
C
{
    cmake -S "$scratch/consumer" -B "$scratch/consumer/build" -DCMAKE_PREFIX_PATH="$prefix" &&
    cmake --build "$scratch/consumer/build"
} >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "find_package(halfstep)"; }
check "find_package, shared" "$scratch/consumer/build/shared"
check "find_package, static" "$scratch/consumer/build/static"
plugin=$(find "$scratch/consumer/build" -name 'libplugin.*')
nm -D --defined-only "$plugin" >"$scratch/exported"
grep -q ' T main$' "$scratch/exported" && ! grep halfstep "$scratch/exported" || fail "a plugin exports the library inside it"
echo "ok   a plugin does not export the library inside it"

package=$(dirname "$(find "$prefix" -name halfstep.pc)")
library=$(dirname "$package")
export PKG_CONFIG_PATH=$package
flags() { pkg-config "$@" halfstep | xargs -n1 | sed 's/.*/"&"/' | tr '\n' ' '; }
eval "cc $(flags --cflags) '$scratch/consumer/main.c' -o '$scratch/by_pc' $(flags --libs)" || fail "pkg-config"
check "pkg-config, shared" env LD_LIBRARY_PATH="$library" "$scratch/by_pc"
eval "cc $(flags --cflags) '$scratch/consumer/main.c' -o '$scratch/by_pc_static' '$library/libhalfstep.a' -lm -pthread" ||
    fail "static by hand"
check "pkg-config, static" "$scratch/by_pc_static"
if [ -n "$io" ]; then
    # Uses our own .pc files only, so that all that they require must be here.
    cat >"$scratch/consumer/io.c" <<'C'
#define HALFSTEP_ADVANCED
#include <halfstep_io.h>
#include <stdio.h>
int main(int argc, char **argv)
{
    char error[256] = "";
    (void)argc;
    int code = halfstep_write_file_atomic(argv[1], "x", 1, error, sizeof error);
    printf("%d%s\n", code, error);
    return code != 0;
}
C
    io_flags=$(PKG_CONFIG_PATH= PKG_CONFIG_LIBDIR=$package pkg-config --cflags --libs halfstep_io | xargs -n1 | sed 's/.*/"&"/' |
        tr '\n' ' ')
    [ -n "$io_flags" ] || fail "halfstep_io.pc asks for something that is not installed with it"
    eval "cc '$scratch/consumer/io.c' -o '$scratch/io_by_pc' $io_flags" || fail "halfstep_io by pkg-config"
    out=$(LD_LIBRARY_PATH="$library" "$scratch/io_by_pc" "$scratch/file") || fail "halfstep_io: $out"
    [ "$out" = 0 ] && [ -s "$scratch/file" ] || fail "halfstep_io wrote no file: $out"
    others=$(readelf -d "$library/libhalfstep_io.so" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' |
        grep -vE '^(libc|libm|libpthread|libhalfstep|lib[atu][a-z]*san|libgcc_s|ld-linux.*)\.so|^ld-' || true)
    [ -z "$others" ] || fail "halfstep_io needs $others"
    echo "ok   halfstep_io needs nothing but the C library"
    # Sets the variables to nothing, so that CMake does not look for these packages. The flags are those of a careless packager.
    CFLAGS="-ffast-math -funsafe-math-optimizations" LDFLAGS=-ffast-math \
        cmake -S "$source_dir" -B "$scratch/no_jansson" -G "Unix Makefiles" -DCMAKE_C_FLAGS_RELEASE=-Ofast -DHALFSTEP_CUDA=OFF -DJANSSON_INCLUDE_DIR= -DJANSSON_LIBRARY= -DHALFSTEP_IO=ON \
        -DHALFSTEP_TOOLS=AUTO >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "configuring halfstep_io without jansson"; }
    [ -e "$scratch/no_jansson/halfstep_io.pc" ] || fail "no halfstep_io without jansson"
    grep -q 'HALFSTEP_TOOLS: not built, .*JANSSON' "$scratch/log" || fail "the program was not left out without jansson"
    echo "ok   halfstep_io is configured without jansson"
    # What such flags would do shows in the compiler's macros, and in code that a link adds.
    compile=$(sed -n 's/^ *"command": "\(.*\) -o [^ ]*decide\.c\.o -c .*",$/\1/p' "$scratch/no_jansson/compile_commands.json" | tr -d '\\')
    link=$(tr ' ' '\n' <"$scratch/no_jansson/CMakeFiles/halfstep.dir/link.txt" | grep -E '^-(O|f)' | xargs)
    [[ $compile == *-Ofast* && $link == *-Ofast* ]] || fail "the flags did not arrive: $compile; $link"
    eval "$compile -dM -E '$source_dir/src/decide/decide.c'" >"$scratch/macros" || fail "the flags do not compile"
    ! grep -E 'FAST_MATH__|ASSOCIATIVE_MATH__|FINITE_MATH_ONLY__ 1' "$scratch/macros" || fail "fast math is not undone: $compile"
    echo 'int here;' >"$scratch/empty.c"
    cc -shared -fPIC "$scratch/empty.c" $link -o "$scratch/empty.so" || fail "the flags do not link: $link"
    ! nm "$scratch/empty.so" | grep fast_math || fail "a link sets the host's floating-point mode: $link"
    echo "ok   -ffast-math and -Ofast are undone"
fi

soname=$(readelf -d "$library/libhalfstep.so" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
abi=$(sed -n 's/^#define HALFSTEP_ABI *//p' "$source_dir/include/halfstep.h")
[ "$soname" = "libhalfstep.so.$abi" ] || fail "soname $soname, ABI $abi"
echo "ok   soname"

if [ -x "$prefix/bin/halfstep" ]; then
    env -u LD_LIBRARY_PATH "$prefix/bin/halfstep" info >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "installed program"; }
    echo "ok   installed program"
fi
