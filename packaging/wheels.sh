#!/bin/bash
# wheels.sh BUILD [TAG...]: makes in BUILD/dist the sdist and a wheel for each row of platforms.csv, or only those whose tags are given,
# and checks them. All of it is made of a copy of the tracked files, so that nothing else in the checkout gets in.
# Device images are compiled once, to BUILD/packaging/images. HALFSTEP_CUDA_IMAGES=FOLDER gives a folder of them instead.
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1/packaging" "$1/dist"
build=$(cd "$1" && pwd)
shift
work=$build/packaging
tree=$work/tree
fail() {
    echo "FAIL $*" >&2
    exit 1
}
# quietly COMMAND...: shows what it writes only if it fails.
quietly() { "$@" >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; fail "$1 $2 ... (all of its output is in $work/log)"; }; }

git -C "$source" rev-parse HEAD >/dev/null 2>&1 || fail "wheels are made of a checkout by git, which tells their date and which files count"
bash "$source/scripts/venv.sh" "$work/venv" packaging/requirements.txt
PATH=$work/venv/bin:$PATH
python=$work/venv/bin/python
# The date in all archives, that of the last commit, and the place of what zig keeps.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct)}
export SOURCE_DATE_EPOCH ZIG_GLOBAL_CACHE_DIR="${ZIG_GLOBAL_CACHE_DIR:-$work/zig}"
zig=$("$python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')

rm -rf "$tree"
mkdir -p "$tree"
git -C "$source" ls-files -z | tar -C "$source" --null -T - -c | tar -x -C "$tree"

rm -f "$work/images"
if [ -n "${HALFSTEP_CUDA_IMAGES:-}" ]; then
    ln -s "$(cd "$HALFSTEP_CUDA_IMAGES" && pwd)" "$work/images"
else
    quietly cmake -G Ninja -S "$tree" -B "$work/device" -DHALFSTEP_TOOLS=OFF -DHALFSTEP_CUDA=ON -DHALFSTEP_CUDA_IMAGES=
    quietly cmake --build "$work/device" --target halfstep_device_images
    ln -s device/images "$work/images"
fi
mkdir "$tree/src/device/cuda/images"
cp -p "$work"/images/* "$tree/src/device/cuda/images/"
echo "ok   device images, $(sed -n 's/^made by //p' "$work/images/images.txt")"

(cd "$tree" && quietly "$python" -c 'import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))' "$build/dist")
sdist=$(tail -n 1 "$work/log")
"$python" "$tree/packaging/results.py" set "$work/results" sdist package=sdist built="scikit-build-core" bytes="$(stat -c %s "$build/dist/$sdist")"
echo "ok   $sdist"

# What `pip install` passes to CMake.
mapfile -t defines < <("$python" - "$tree/pyproject.toml" <<'P'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    define = tomllib.load(file)["tool"]["scikit-build"]["cmake"]["define"]
print(*(f"-D{name}={value}" for name, value in define.items()), sep="\n")
P
)
# compile TAG TARGET DEVICE_CODE: compiles the libraries and installs them, as Python gets them, in a folder of the tag.
compile() {
    local folder=$work/wheels/$1 device=OFF
    [ "$3" = no ] || device=ON
    quietly cmake -G Ninja -S "$tree" -B "$folder/build" -DCMAKE_TOOLCHAIN_FILE="$tree/cmake/zig.cmake" \
        -DHALFSTEP_ZIG="$zig" -DHALFSTEP_ZIG_TARGET="$2" -DHALFSTEP_CUDA=$device -DHALFSTEP_WERROR=ON \
        "${defines[@]}"
    quietly cmake --build "$folder/build" --target halfstep_python
}
rows() { tail -n +2 "$tree/packaging/platforms.csv" | tr , ' '; }

# The modules are those of `pip install`, with the library of this machine.
here=$(rows | awk -v target="$(uname -m)-linux-gnu" 'index($2, target) == 1')
[ -n "$here" ] || fail "platforms.csv has no row that this machine ($(uname -m)) could run"
# shellcheck disable=SC2086
compile $here
library=$work/wheels/${here%% *}/build/libhalfstep.so
rm -rf "$work/base"
mkdir "$work/base"
quietly "$python" -m pip wheel --disable-pip-version-check --no-index --no-deps --no-build-isolation -w "$work/base" \
    --config-settings=cmake.define.HALFSTEP_PREBUILT="$library" "$tree"

wheels=()
while read -r tag target device; do
    [ $# = 0 ] || [[ " $* " == *" $tag "* ]] || continue
    compile "$tag" "$target" "$device"
    rm -rf "$work/wheels/$tag/install"
    quietly cmake --install "$work/wheels/$tag/build" --component python --prefix "$work/wheels/$tag/install"
    rm -f "$build"/dist/halfstep-*-py3-none-"$tag".whl
    "$python" "$tree/packaging/wheels.py" "$work" "$tag" "$build/dist"
    wheels+=("$build"/dist/halfstep-*-py3-none-"$tag".whl)
done < <(rows)
[ "${#wheels[@]}" != 0 ] || fail "no such tag: $*; platforms.csv lists them"
"$python" "$tree/packaging/check.py" --results "$work/results" "${wheels[@]}"
"$python" "$tree/tests/packages/broken_wheels.py" "${wheels[@]}"
