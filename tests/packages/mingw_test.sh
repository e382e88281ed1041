#!/bin/bash
# Checks that the core compiles and links for 64-bit Windows: no symbol is missing when every object is in one program.
# (make check leaves it out.)
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need cmake x86_64-w64-mingw32-gcc
make_scratch
folder=$build_dir/mingw
cmake -S "$source_dir" -B "$folder" -DCMAKE_TOOLCHAIN_FILE="$source_dir/cmake/mingw-w64.cmake" -DHALFSTEP_CUDA=OFF -DHALFSTEP_WERROR=ON \
    -DHALFSTEP_TOOLS=OFF -DHALFSTEP_IO=OFF
cmake --build "$folder" --target halfstep_static
cat >"$scratch/main.c" <<'C'
#include "halfstep.h"
int main(void) { return halfstep_abi() != HALFSTEP_ABI; }
C
compiler=$(sed -n 's/^CMAKE_C_COMPILER:[A-Z]*=//p' "$folder/CMakeCache.txt")
"${compiler:-x86_64-w64-mingw32-gcc}" -I"$source_dir/include" "$scratch/main.c" -o "$scratch/main.exe" \
    -Wl,--whole-archive "$folder/libhalfstep.a" -Wl,--no-whole-archive -lm -pthread || fail "linking"
echo "ok   core library for Windows"
# libcuda has another name there. It is loaded on demand and never linked.
grep -qa 'nvcuda\.dll' "$scratch/main.exe" || fail "the loader does not know nvcuda.dll"
! grep -qaE 'lib(cuda|cublas)\.so' "$scratch/main.exe" || fail "the loader has names of other systems"
! x86_64-w64-mingw32-objdump -p "$scratch/main.exe" | grep -qiE 'DLL Name: *(nvcuda|cublas)' || fail "a library of CUDA is linked"
echo "ok   nvcuda.dll is what the loader looks for"
