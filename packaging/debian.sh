#!/bin/bash
# debian.sh BUILD [--twice]: makes the Debian packages of packaging/debian in BUILD/dist, by the tools of this machine and for its
# release of Debian. Holds them to lintian, and installs them in a root of their own, where packaging/debian/tests/installed uses them.
# --twice builds them again elsewhere, which must give the same bytes. Device code is from the packed images in the folder
# HALFSTEP_CUDA_IMAGES, BUILD/packaging/images if not set. If there is no such folder, it is PTX by clang.
set -eu
export LC_ALL=C # ranges such as [A-Z] and the order of sort follow the language otherwise
cd "$(dirname "$0")/.."
build=$(mkdir -p "$1/packaging" "$1/dist" && cd "$1" && pwd)
twice=${2:-}
unset MAKEFLAGS MFLAGS MAKELEVEL
bash scripts/setup.sh packages
version=$(sed -n 's/^#define HALFSTEP_VERSION_[A-Z]* *//p' include/halfstep.h | paste -sd .)
abi=$(sed -n 's/^#define HALFSTEP_ABI *//p' include/halfstep.h)
maintainer="${DEBFULLNAME:-$(git log -1 --format=%an)} <${DEBEMAIL:-$(git log -1 --format=%ae)}>"
release=$(. /etc/os-release && echo "${NAME%% *} ${VERSION_ID:-testing}")
images=${HALFSTEP_CUDA_IMAGES:-$build/packaging/images}
compiler="gcc $(gcc -dumpfullversion), debhelper $(dpkg-query -W -f '${Version}' debhelper)"
date=$(git log -1 --format=%cD)

# make_packages FOLDER: makes FOLDER/*.deb from the files of this tree.
make_packages() {
    local source=$1/halfstep-$version file
    rm -rf "$1"
    mkdir -p "$source/debian"
    git ls-files -z | tar --null --files-from=- -c | tar -x -C "$source"
    [ ! -e "$images" ] || cp -RL "$images" "$source/src/device/cuda/images"
    cp -R packaging/debian/. "$source/debian"
    find "$source/debian" -type f -exec sed -i "s|@VERSION@|$version|;s|@ABI@|$abi|;s|@MAINTAINER@|$maintainer|;s|@DATE@|$date|" {} +
    for file in "$source"/debian/*ABI*; do
        mv "$file" "${file/ABI/$abi}"
    done
    if ! (cd "$source" && DEB_BUILD_OPTIONS="noautodbgsym parallel=$(nproc)" dpkg-buildpackage -b -us -uc) >"$1/log" 2>&1; then
        tail -n 30 "$1/log" >&2
        echo "FAIL dpkg-buildpackage; the log is $1/log" >&2
        exit 1
    fi
}

# in_root COMMAND...: runs a command in $root, with processes and mounts of its own.
in_root() {
    # shellcheck disable=SC2016
    unshare --mount --pid --fork sh -c 'mount -t proc proc "$0/proc" && mount --rbind /sys "$0/sys" && mount --rbind /dev "$0/dev" &&
        exec chroot "$0" env -i ${http_proxy:+"http_proxy=$http_proxy"} PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
        DEBIAN_FRONTEND=noninteractive "$@"' "$root" "$@"
}

# make_root: unpacks into $root a fresh Debian that has what the test of the packages needs. It is made once, from the sources of this
# machine's apt.
make_root() {
    local archive=$build/packaging/root.tar needs
    needs=$(sed -n 's/^Depends: @, //p' packaging/debian/tests/control | tr -d ' ')
    if [ "$(cat "$archive.has" 2>/dev/null)" != "$needs" ]; then
        apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' | sort -u |
            mmdebstrap --variant=apt --include="$needs" --skip=cleanup/apt --dpkgopt='path-include=/usr/share/man/*' --format=tar '' "$archive" - \
                >"$archive.log" 2>&1 || {
            tail -n 20 "$archive.log" >&2
            echo "FAIL mmdebstrap; the log is $archive.log" >&2
            exit 1
        }
        echo "$needs" >"$archive.has"
    fi
    mkdir "$root"
    tar -xpf "$archive" -C "$root"
    cp /etc/resolv.conf "$root/etc/"
    in_root apt-get -qq update
}

# all_files: prints each file of the root that is not a log, a cache, or a note of apt or dpkg.
all_files() {
    (cd "$root" && find . -xdev \( -path ./proc -o -path ./tmp -o -path ./var/cache -o -path ./var/log -o -path ./var/lib/apt -o -path ./var/lib/dpkg \) \
        -prune -o -print | sort)
}

# older FOLDER: makes FOLDER/*.deb, the same packages with a lower version and one file that the newer ones lack.
older() {
    local package
    for package in "$made"/*.deb; do
        rm -rf "$scratch/old"
        dpkg-deb -R "$package" "$scratch/old"
        sed -i "s/$version-[^ ,)]*/0.0.1-1/" "$scratch/old/DEBIAN/control"
        touch "$scratch/old/usr/share/doc/$(dpkg-deb -f "$package" Package)/older"
        dpkg-deb --root-owner-group -Znone -b "$scratch/old" "$1/$(basename "$package")" >/dev/null
    done
}

# show NAME KEY=VALUE...: notes something of the package NAME.
show() { python3 packaging/results.py set "$build/packaging/results" "debian-$1" "${@:2}"; }

made=$build/packaging/debian
make_packages "$made"
lintian --allow-root --fail-on error,warning "$made"/*.changes
echo "ok   lintian"
if [ "$twice" = --twice ]; then
    make_packages "$build/packaging/debian_again"
    for package in "$made"/*.deb; do
        cmp "$package" "$build/packaging/debian_again/$(basename "$package")"
    done
    echo "ok   built twice, the same bytes"
fi
rm -f "$build"/dist/*.deb "$build"/packaging/results/debian-*.json
cp "$made"/*.deb "$build/dist/"
for package in "$made"/*.deb; do
    name=$(dpkg-deb -f "$package" Package)
    show "$name" "package=$name, $release, $(dpkg-deb -f "$package" Architecture)" "built=$compiler" ran= result= bytes="$(stat -c %s "$package")"
done

[ "$(id -u)" = 0 ] || {
    echo "the packages are in $build/dist, but only root can install them in a root of their own; run this as root to test them" >&2
    exit 1
}
scratch=$(mktemp -d)
root=$scratch/root
trap 'rm -rf "$scratch"' EXIT
make_root
all_files >"$scratch/before"
mkdir "$root/tmp/old" "$root/tmp/new"
older "$root/tmp/old"
cp "$made"/*.deb "$root/tmp/new"
cp packaging/debian/tests/installed "$root/tmp/"
for set in old new; do
    in_root bash -c "apt-get -y -q --no-install-recommends install /tmp/$set/*.deb" >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
done
! all_files | grep '/usr/share/doc/.*/older' || { echo "FAIL the older packages left that"; exit 1; }
echo "ok   an upgrade from older packages"
in_root bash /tmp/installed
packages=$(cd "$made" && for package in *.deb; do echo "${package%%_*}"; done)
# shellcheck disable=SC2086
in_root apt-get -y -q --autoremove purge $packages >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
all_files | diff "$scratch/before" - || { echo "FAIL the removed packages left that, or took it with them"; exit 1; }
echo "ok   removed without a trace"

show "libhalfstep$abi" ran="golden hashes"
show libhalfstep-dev ran="programs by pkg-config and find_package, shared and static"
show halfstep ran="golden hashes, demo, manual page, completion by bash, zsh and fish"
show halfstep-mpi ran="a training in two processes"
for package in $packages; do
    show "$package" ran="lintian; installed, upgraded and removed without a trace in a fresh $release" result=✓
done
