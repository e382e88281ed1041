#!/bin/bash
# Tests the Python package as users get it. This tree becomes an sdist, the sdist becomes a wheel, and the content of
# both is checked. The wheel takes the library that is already built, and is installed into the virtual environment of
# the Python tests. With the argument `sdist`, the library is compiled from the sdist instead, which brings device code,
# and the wheel is installed into a folder of its own.
# (make test-all runs "tests/packages/python_package.sh sdist" too.)
. "$(dirname "$0")/../tools/lib.sh"
need python3 cmake readelf
mode=${1:-prebuilt}
make_scratch
installed=$build_dir/venv/halfstep.installed
[ "$mode" = sdist ] || rm -f "$installed"
status=0
bash "$source_dir/scripts/venv.sh" "$build_dir/venv" || status=$?
[ "$status" = 0 ] || exit "$status"
python=$build_dir/venv/bin/python
unset HALFSTEP_LIBRARY PYTHONPATH
version=$(sed -n 's/^#define HALFSTEP_VERSION_[A-Z]* *//p' "$source_dir/include/halfstep.h" | paste -sd .)

# make_sdist TREE FOLDER
make_sdist() {
    (cd "$1" && "$python" -c 'import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])' "$2") \
        >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the sdist cannot be made"; }
}
make_sdist "$source_dir" "$scratch"
tar xzf "$scratch/halfstep-$version.tar.gz" -C "$scratch" || fail "no sdist of version $version: $(ls "$scratch")"
tree=$scratch/halfstep-$version
for file in docs/python.md examples/finetune.py README.md CHANGELOG.md; do
    [ -s "$tree/$file" ] || fail "the sdist lacks $file"
done
found=$(cd "$tree" && LC_ALL=C && echo *)
[ "$found" = "CHANGELOG.md CMakeLists.txt CONTRIBUTING.md LICENSE PKG-INFO README.md SECURITY.md cmake docs examples include pyproject.toml python scripts src" ] ||
    fail "the sdist holds $found"
echo "ok   sdist"

# expect SENTENCE COMMAND...: the command fails, and the sentence is in what it writes, which CMake breaks into lines.
expect() {
    ! "${@:2}" >"$scratch/log" 2>&1 && tr -s '\n ' ' ' <"$scratch/log" | grep -q "$1" || { cat "$scratch/log"; fail "this does not fail by: $1"; }
}
pip() { "$python" -m pip "$@" --disable-pip-version-check --no-index --no-deps; }
settings=()
if [ "$mode" = sdist ]; then
    CC=$scratch/none expect 'halfstep needs a C compiler, and none that works was found; install' pip wheel --no-build-isolation -w "$scratch/wheel" "$tree"
    echo "ok   without a C compiler it says what to install"
    # A set of images with a text in place of PTX.
    images=$scratch/images
    printf '%s: \\\n %s \\\n /usr/include/none.h\n' "$scratch/text.ptx" "$tree/src/vec/cuda.h" >"$scratch/text.ptx.d"
    cmake -D FOLDER="$images" -D PACK="0=$tree/LICENSE" -D DEPFILE="$scratch/text.ptx.d" -P "$tree/cmake/images.cmake"
    with_images() { cmake -S "$tree" -B "$scratch/with_images" -DHALFSTEP_TOOLS=OFF -DHALFSTEP_CUDA_IMAGES="$images"; }
    with_images >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "images are refused"; }
    echo >>"$tree/src/vec/cuda.h"
    expect 'cannot be used, because they were made from other sources of device code' with_images
    truncate -s -1 "$tree/src/vec/cuda.h"
    truncate -s -1 "$images/LICENSE.xz"
    expect 'cannot be used, because LICENSE.xz is missing or damaged; make them again' with_images
    images=$scratch/none expect 'cannot be used, because it has no images.txt' with_images
    echo "ok   images of other device code, and damaged ones, are refused"

    # Device code as PTX alone, because an assembler takes minutes.
    code="none in this build"
    rm -rf "$tree/src/device/cuda/images"
    if clang --print-targets 2>/dev/null | grep -q nvptx64; then
        code="PTX, of which drivers make code for every GPU of compute capability 8[.]0 or higher$"
        # By Ninja, which pip uses too.
        images=$build_dir/wheel/device
        { PATH=$build_dir/venv/bin:$PATH && cmake -G Ninja -S "$source_dir" -B "$images" -DHALFSTEP_TOOLS=OFF -DHALFSTEP_CUDA=ON -DHALFSTEP_CUDA_IMAGES= -DHALFSTEP_PTXAS= &&
            cmake --build "$images" --target halfstep_device_images; } >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "device images cannot be made"; }
        cp -r "$images/images" "$tree/src/device/cuda/images"
        cp "$source_dir/.gitignore" "$tree" # which names them
        make_sdist "$tree" "$scratch/again"
        rm -rf "$tree"
        tar xzf "$scratch/again/halfstep-$version.tar.gz" -C "$scratch"
        cmp "$images/images/images.txt" "$tree/src/device/cuda/images/images.txt" || fail "an sdist does not bring device images"
    fi
    # Only files that differ are replaced in a folder that stays, so that the next run compiles only what changed.
    kept=$build_dir/wheel/sdist
    mkdir -p "$kept"
    (cd "$kept" && find . -type f) | while read -r file; do
        [ -e "$tree/$file" ] || rm "$kept/$file"
    done
    (cd "$tree" && find . -type f) | while read -r file; do
        cmp -s "$tree/$file" "$kept/$file" && continue
        mkdir -p "$(dirname "$kept/$file")"
        cat "$tree/$file" >"$kept/$file"
    done
    tree=$kept
    settings=("--config-settings=build-dir=$build_dir/wheel/build")
else
    prebuilt=$(readlink -f "$build_dir/libhalfstep.so")
    [ -s "$prebuilt" ] || skip "$build_dir/libhalfstep.so is not built"
    settings=("--config-settings=cmake.define.HALFSTEP_PREBUILT=$prebuilt")
fi
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) pip wheel --no-build-isolation "${settings[@]}" -w "$scratch/wheel" -v "$tree" >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the wheel cannot be made from the sdist"; }
if [ "$mode" = sdist ] && [ "$code" != "none in this build" ]; then
    grep -q 'Device code for GPUs: the images of .*/src/device/cuda/images, made by clang' "$scratch/log" ||
        { cat "$scratch/log"; fail "the images of the sdist are not used"; }
fi

wheel=$(echo "$scratch"/wheel/*)
[ "$(basename "$wheel")" = "halfstep-$version-py3-none-linux_$(uname -m).whl" ] || fail "the wheel is called $wheel"
"$python" - "$wheel" "$source_dir/python" "halfstep-$version.dist-info" <<'P' || fail "the wheel does not hold what it should"
import pathlib
import sys
import zipfile

wheel, source, info = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = {n for n in archive.namelist() if not n.startswith(info + "/")}
    links = [i.filename for i in archive.infolist() if i.external_attr >> 28 == 0xA]
    wanted = {p.relative_to(source).as_posix() for p in pathlib.Path(source).rglob("*.py")}
    wanted |= {"halfstep/py.typed", "halfstep/libhalfstep.so", "halfstep/libhalfstep_io.so"}
    assert names == wanted, f"missing {sorted(wanted - names)}, not expected {sorted(names - wanted)}"
    assert not links, links
    assert f"{info}/licenses/LICENSE" in archive.namelist(), "no licence"
P
echo "ok   wheel"

folder=$build_dir/venv
target=()
if [ "$mode" = sdist ]; then
    folder=$scratch/target
    target=(--target "$folder")
fi
pip install --quiet --force-reinstall "${target[@]}" "$wheel" \
    >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the wheel cannot be installed"; }
# -I: Python ignores its environment variables and the working folder.
library=$(cd "$scratch" && "$python" -I -c 'import sys; sys.path[:0] = sys.argv[1:]; import halfstep, halfstep._library.abi as abi; print(abi.version(), abi.path)' \
    "${target[@]:1}") || fail "import halfstep"
case "$library" in
"$version $folder/"*halfstep/libhalfstep.so) library=${library#* } ;;
*) fail "loaded $library" ;;
esac
needed() {
    readelf -d "$1" | sed -nE 's/.*(NEEDED|RPATH|RUNPATH)[^[]*\[(.*)\]/\1 \2/p' |
        grep -vE '^NEEDED (lib(c|m|pthread|dl)\.so|ld-linux)' || true
}
needed=$(needed "$library")
[ -z "$needed" ] || fail "the library in the wheel has $needed"
needed=$(needed "${library/libhalfstep/libhalfstep_io}" | sort | paste -sd ' ')
[[ "$needed" =~ ^'NEEDED libhalfstep.so'(\.[0-9]+)?' RUNPATH $ORIGIN'$ ]] || fail "halfstep_io in the wheel has $needed"
(cd "$scratch" && "$python" -I - "${target[@]:1}" <<'P'
import sys

sys.path[:0] = sys.argv[1:]
import torch

import halfstep

p = torch.nn.Parameter(torch.ones(64, 64))
p.grad = torch.ones(64, 64)
halfstep.AdamW([p], store="wheel.states").step()
assert not (p == 1).any(), "no step with states in a file"
P
) || fail "states in a file"
echo "ok   installed, imported; the library needs the C library alone, and halfstep_io the library; states in a file"
if [ "$mode" = sdist ]; then
    mkdir "$scratch/driver"
    echo "no library" >"$scratch/driver/libcuda.so.1" # in front of one that may be there
    (cd "$scratch" && LD_LIBRARY_PATH=$scratch/driver "$python" -I - "${target[@]:1}" <<'P'
import sys

sys.path[:0] = sys.argv[1:]
import torch

import halfstep
from halfstep import __main__
from halfstep._tensors import devices

p = torch.nn.Parameter(torch.ones(64, 64))
p.grad = torch.ones(64, 64)
halfstep.AdamW([p]).step()
assert not (p == 1).any(), "no step on the processor"
__main__.main(["info"])
devices.of = lambda tensor: torch.device("cuda", 0)
devices.capability = lambda device: (9, 0)
devices.stream = lambda device: None
devices.capturing = lambda device: False
try:
    halfstep.AdamW([p]).step()
except halfstep.HalfstepError as error:
    print("step:", error)
P
    ) >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the package without a driver"; }
    missing="there is no NVIDIA driver: libcuda[.]so[.]1 cannot be loaded; install one"
    for line in "gpu  *none: $missing" "device code  *$code" "step: .*$missing"; do
        grep -q "^$line" "$scratch/log" || { cat "$scratch/log"; fail "the package without a driver does not say: $line"; }
    done
    echo "ok   without a driver the package steps on the processor, and says what a GPU lacks"
fi

# A cross build, which cannot run its library.
cmake -S "$source_dir" -B "$scratch/cross" -DCMAKE_SYSTEM_NAME=Linux -DHALFSTEP_PREBUILT="$library" >"$scratch/log" 2>&1 &&
    cmake --install "$scratch/cross" --component python --prefix "$scratch/package" >>"$scratch/log" 2>&1 ||
    { cat "$scratch/log"; fail "the package cannot be installed from a cross build"; }
cmp "$library" "$scratch/package/halfstep/libhalfstep.so" || fail "another library is installed from a cross build"
echo "ok   a cross build installs its library"
[ "$mode" = sdist ] || touch "$installed"
