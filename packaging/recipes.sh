#!/bin/bash
# recipes.sh BUILD [REPOSITORY]: makes the source archive of the last commit, BUILD/dist/halfstep-VERSION-source.tar.gz, and fills in the
# recipes of Homebrew and conda-forge for it, in BUILD/packaging/recipes. Then runs both recipes from that archive without network, as far
# as a machine without Homebrew and conda can, and compiles the program for macOS. The recipes name the release in REPOSITORY, an address;
# without one they name the archive here.
set -eu
export LC_ALL=C # ranges such as [A-Z] and the order of sort follow the language otherwise
cd "$(dirname "$0")/.."
bash scripts/setup.sh packages
build=$(mkdir -p "$1/packaging" "$1/dist" && cd "$1" && pwd)
bash scripts/venv.sh "$build/packaging/venv" packaging/requirements.txt
bash scripts/venv.sh "$build/packaging/conda" packaging/conda/requirements.txt
export PATH=$build/packaging/venv/bin:$PATH
results=$build/packaging/results
work=$build/packaging/recipes
prefix=$work/prefix
note() { python3 packaging/results.py set "$results" "$@"; }
# Runs a command without network, where the system lets us.
offline() { if unshare -n true 2>/dev/null; then unshare -n "$@"; else unshare -rn "$@"; fi; }
# Runs a command with its output in a log, which is shown if it fails.
logged() {
    "${@:2}" >"$work/$1.log" 2>&1 || {
        tail -n 40 "$work/$1.log"
        echo "FAIL $1: ${*:2}"
        exit 1
    }
}
rm -rf "$work"
mkdir -p "$prefix/include" "$prefix/lib"

# ---- The archive -----------------------------------------------------------------------------------------------------

version=$(sed -n 's/^#define HALFSTEP_VERSION_[A-Z]* *//p' include/halfstep.h | paste -sd .)
name=halfstep-$version
archive=$build/dist/$name-source.tar.gz
# The last commit, and the packed images of device code that wheels.sh has left, which no repository holds.
pack() {
    local images=()
    for file in "${HALFSTEP_CUDA_IMAGES:-$build/packaging/images}"/*; do
        [ ! -e "$file" ] || images+=(--add-file="$file")
    done
    git archive --format=tar --prefix="$name/src/device/cuda/images/" "${images[@]}" --prefix="$name/" HEAD | gzip -n9
}
note archive package="source archive" built="git archive" ran= result=
git diff --quiet HEAD || echo "The archive is that of the last commit; changes since then are not in it."
pack >"$archive"
pack | cmp "$archive" - || { echo "FAIL the archive is not the same bytes twice"; exit 1; }
for file in tools/cli/main.c tests/golden/hashes.txt docs/packaging.md; do
    tar -tzf "$archive" "$name/$file" >"$work/list" || { echo "FAIL the archive has no $file"; exit 1; }
done
note archive ran="packed twice, the same bytes" bytes="$(stat -c %s "$archive")"
echo "ok   $archive"

# ---- The recipes -----------------------------------------------------------------------------------------------------

# fill FOLDER URL HOMEPAGE: writes both recipes for a release.
fill() {
    mkdir -p "$1"
    local file
    for file in homebrew/halfstep.rb conda/recipe.yaml; do
        sed -e "s|@VERSION@|$version|; s|@URL@|$2|; s|@HOMEPAGE@|$3|; s|@MAINTAINER@|$(basename "$(dirname "$3")")|" \
            -e "s|@SHA256@|$(sha256sum "$archive" | cut -d ' ' -f 1)|" "packaging/$file" >"$1/$(basename "$file")"
    done
}
fill "$work/local" "file://$archive" "file://$build/dist"
[ $# = 1 ] || fill "$work" "$2/releases/download/v$version/$(basename "$archive")" "$2"

# Homebrew and conda-forge have oneDNN 3, and libraries in a prefix of their own.
ln -s "$build/packaging/conda/include/oneapi" /usr/include/jansson*.h /usr/include/zlib.h /usr/include/zconf.h "$prefix/include/"
libraries=$(dirname "$(cc -print-file-name=libjansson.so)")
ln -s "$build"/packaging/conda/lib/libdnnl.so* "$libraries"/libjansson.so* "$libraries"/libz.so* "$prefix/lib/"

note homebrew package="Homebrew formula" built="a stand-in of Homebrew's language, cmake, gcc" ran= result=
ruby -c packaging/homebrew/halfstep.rb >"$work/syntax.log"
logged homebrew offline ruby packaging/homebrew/stand_in.rb "$work/local/halfstep.rb" "$archive" "$work/cellar" "$prefix"
ldd "$work/cellar/halfstep/$version/bin/halfstep" | grep -q "$prefix/lib/libdnnl.so.3" || {
    echo "FAIL the program does not use oneDNN of the prefix"
    exit 1
}
note homebrew ran="its blocks install and test on Linux, oneDNN 3.2 in a prefix"
tail -n 1 "$work/homebrew.log"

note conda package="conda-forge recipe, three packages" built="rattler-build, gcc" ran= result=
logged conda offline "$build/packaging/conda/bin/python" packaging/conda/build.py "$work/local/recipe.yaml" "$work/channel" "$prefix" \
    "$("$build/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
grep '^ok ' "$work/conda.log"
note conda ran="its scripts and tests on Linux, oneDNN 3.2, torch; dependencies are stand-ins" result=✓
note archive ran="both recipes build from it without network" result=✓

# ---- macOS -----------------------------------------------------------------------------------------------------------

# Compiles and links everything that the formula does there. Libraries of macOS are lists of names to a linker, so those of this machine
# stand in for them.
resources=$(clang -print-resource-dir)
openmp=$(cd "$resources/../.." && pwd)/libomp.so
mkdir -p "$work/macos/lib"
cp -R "$prefix/include" "$work/macos/"
ln -s "$resources/include/omp.h" "$work/macos/include/"
for library in "$prefix/lib/libdnnl.so" "$prefix/lib/libjansson.so" "$prefix/lib/libz.so" "$openmp"; do
    [ -e "$library" ] || { echo "FAIL there is no $library"; exit 1; }
    {
        printf -- "--- !tapi-tbd\ntbd-version: 4\ntargets: [x86_64-macos, arm64-macos]\n"
        printf "install-name: '@rpath/%s'\nexports:\n  - targets: [x86_64-macos, arm64-macos]\n    symbols: [" "$(basename "$library" .so).dylib"
        nm -D --defined-only "$library" | awk '{ sub(/@.*/, "", $3) } $2 ~ /[TWDBR]/ && $3 ~ /^[A-Za-z0-9_]+$/ { print "_" $3 }' | sort -u | paste -sd ,
        echo "]"
    } >"$work/macos/lib/$(basename "$library" .so).tbd"
done
for target in $(sed -n 's/^macosx[^,]*,\([^,]*\),.*/\1/p' packaging/platforms.csv); do
    logged "$target" cmake -G Ninja -S . -B "$work/$target" -DCMAKE_TOOLCHAIN_FILE=cmake/zig.cmake -DHALFSTEP_ZIG_TARGET="$target" \
        -DHALFSTEP_ZIG="$(python3 -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')/zig" -DHALFSTEP_WERROR=ON \
        -DHALFSTEP_TOOLS=ON -DHALFSTEP_MPI=OFF -DCMAKE_STAGING_PREFIX="$work/macos" -DCMAKE_PREFIX_PATH="$work/macos"
    logged "$target" cmake --build "$work/$target" --target halfstep_cli
    echo "ok   the program compiles for $target"
done
note homebrew ran="compiled and linked for macOS by zig" result="not run on macOS"
