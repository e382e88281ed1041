#!/bin/bash
# setup.sh build|test|all|machines|packages|fuzz|stats: makes sure that what the build, `make test`, `make test-all`, `make test-machines`,
# wheels and packages, fuzzing or the long statistics need is installed. Installs what is missing if apt may be used (by root, or by sudo that asks for no password); otherwise names the
# packages in one line and exits 1.
set -eu

missing=
# want PACKAGE PROBE...: the package is missing when the probe fails.
want() {
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
program() { command -v "$1"; }

compiler=$(command -v cc || command -v gcc || true)
want gcc program gcc
want libc6-dev test -e /usr/include/stdio.h
want make program make
want cmake program cmake
want pkg-config program pkg-config
# One run of the preprocessor answers for all headers, wherever the compiler looks for them.
headers=
if [ -n "$compiler" ]; then
    headers=$("$compiler" -E -P -x c - 2>/dev/null <<'C' || true
#if __has_include(<oneapi/dnnl/dnnl.h>)
have_dnnl
#endif
#if __has_include(<jansson.h>)
have_jansson
#endif
#if __has_include(<zlib.h>)
have_zlib
#endif
C
)
fi
header() { case "$headers" in *"$1"*) ;; *) return 1 ;; esac; }
# What the program needs; the libraries of this project need none of them.
want libdnnl-dev header have_dnnl
want libjansson-dev header have_jansson
want zlib1g-dev header have_zlib

# Beside the driver of a GPU a build without device code would refuse that GPU.
[ ! -e /dev/nvidiactl ] || want clang program clang

case ${1:-build} in
test | all | machines | packages | fuzz)
    # The sanitizer builds are clang's, whose runtimes have its version in their packages' names.
    want clang program clang
    version=$(clang -dumpversion 2>/dev/null | cut -d. -f1)
    version=${version:-14}
    want "libclang-rt-$version-dev" sh -c 'test -e "$(clang -print-file-name=libclang_rt.asan-$(uname -m).a)"'
    want "libomp-$version-dev" sh -c 'echo "int main(void) { return 0; }" | clang -fopenmp -x c - -o /dev/null'
    want python3 program python3
    ;;
esac

case ${1:-build} in
test | all | machines | packages)
    want g++ program g++
    want binutils program readelf
    want util-linux program setarch
    # The program is built without MPI too; the tests of many processes need it.
    want libopenmpi-dev program mpicc
    want openmpi-bin program mpirun
    # Debian keeps pip's part of venv in a package of its own.
    want python3-venv python3 -c 'import ensurepip, venv'
    # DeepSpeed and torch.compile make extensions of their own.
    want python3-dev python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
    ;;
esac

if [ "${1:-build}" = all ]; then
    if [ "$(uname -m)" = x86_64 ]; then
        want gcc-aarch64-linux-gnu program aarch64-linux-gnu-gcc
        want libc6-dev-arm64-cross test -e /usr/aarch64-linux-gnu/include/stdio.h
        want qemu-user program qemu-aarch64
        want gcc-mingw-w64-x86-64 program x86_64-w64-mingw32-gcc
    fi
fi

if [ "${1:-build}" = machines ]; then
    want locales test -e /usr/share/i18n/locales/tr_TR
fi

if [ "${1:-build}" = packages ]; then
    # Other systems, as far as they run here.
    want wine64 test -e /usr/lib/wine/wine64
    want musl test -e /lib/ld-musl-x86_64.so.1
    want qemu-user program qemu-aarch64
    want libc6-arm64-cross test -e /usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1
    want debhelper program dh
    want fakeroot program fakeroot
    want lintian program lintian
    want mmdebstrap program mmdebstrap
    want abigail-tools program abidiff
fi

if [ "${1:-build}" = stats ]; then
    want dieharder program dieharder
fi

[ -n "$missing" ] || exit 0
missing=${missing# }

if ! command -v apt-get >/dev/null; then
    echo "halfstep needs these Debian packages, or their like on this system: $missing" >&2
    exit 1
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        echo "halfstep needs packages that only root can install: apt-get install $missing" >&2
        exit 1
    fi
fi

echo "==> Installing $missing" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() { $as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -q "$@" >>"$log" 2>&1 </dev/null; }
# shellcheck disable=SC2086
if ! { apt update && apt install --no-install-recommends $missing; }; then
    tail -n 20 "$log" >&2
    echo "halfstep: apt-get could not install: $missing" >&2
    exit 1
fi
