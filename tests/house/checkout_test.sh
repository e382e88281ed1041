#!/bin/bash
# Checks that a checkout builds in a folder whose name has blanks, quotes, brackets, dollar signs and letters beyond ASCII, and that
# Git changes no line ends there, even with core.autocrlf.
# (make check leaves it out.)
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need git cmake cc tar
git -C "$source_dir" rev-parse --git-dir >/dev/null 2>&1 || skip "$source_dir is no checkout"
make_scratch
origin=$scratch/origin folder="$scratch/half step's (1) [R&D] a\$b 50%+é"
mkdir "$origin"
(cd "$source_dir" && git ls-files -co --exclude-standard -z | tar --null -T - --ignore-failed-read -c 2>/dev/null) | tar -x -C "$origin"
(cd "$origin" && git init -q && git add -A && git -c user.name=n -c user.email=e commit -q -m all) || fail "the sources cannot be copied"
git clone -q -c core.autocrlf=true "$origin" "$folder"
diff -rq -x .git "$origin" "$folder" || fail "a clone with core.autocrlf has other bytes; .gitattributes lacks something"
echo "ok   a clone with core.autocrlf has the same bytes"

cd "$folder"
device_code=
! command -v clang >/dev/null || ! clang --print-targets | grep -q nvptx64 || ! command -v python3 >/dev/null || device_code=cuda_arithmetic_ptx
{
    cmake -S . -B build -G "Unix Makefiles" -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS=-O0 -DHALFSTEP_ISAS=scalar -DHALFSTEP_CUDA=OFF -DHALFSTEP_TESTS=ON &&
        cmake --build build --parallel "${HALFSTEP_BUILD_JOBS:-1}" --target halfstep_python halfstep_static test_json \
            $([ ! -x "$build_dir/halfstep" ] || echo halfstep_cli) $device_code
} >"$scratch/log" 2>&1 || { tail -n 20 "$scratch/log"; fail "it does not build in $folder"; }
(cd build && ctest -R '^test_json$' --no-tests=error) >"$scratch/log" || { cat "$scratch/log"; fail "a test does not run in $folder"; }
cmake --install build --component python --prefix "$scratch/package" >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the Python package"; }
[ -e "$scratch/package/halfstep/libhalfstep.so" ] || [ "$(uname)" != Linux ] || fail "the Python package has no library"
[ ! -x build/halfstep ] || build/halfstep verify --every 200 >"$scratch/log" 2>&1 || { tail "$scratch/log"; fail "the program"; }
echo "ok   it builds, and runs, in '${folder##*/}'"

if [ -n "$device_code" ]; then
    ptx=$folder/build/tests/cuda/arithmetic.ptx
    cmake -D "FOLDER=$scratch/images" -D "PACK=0=$ptx" -D "DEPFILE=$ptx.sources" -D MADE_BY=clang -P cmake/images.cmake
    grep -q '^sources [0-9a-f]* .*lab/gpu_arithmetic\.cu .*src/vec/cuda\.h' "$scratch/images/images.txt" ||
        fail "images.txt does not list the sources of device code: $(cat "$scratch/images/images.txt")"
    [ "$(cmake --build build --target cuda_arithmetic_ptx | grep -c Generating)" = 0 ] || fail "device code is made in each build"
    echo "ok   device code is made of the sources there"
fi
