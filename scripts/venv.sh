#!/bin/bash
# venv.sh FOLDER [LIST]: a Python virtual environment in FOLDER with the packages of LIST, tests/python/requirements.txt if not
# given. LIST is a file of this tree, or has a whole path. It names every package that is needed, each with its hashes
# (scripts/pins.sh). Does nothing when the environment is there and the list has not changed since. Several may call it at the
# same time.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
list=${2:-tests/python/requirements.txt}
[ "${list#/}" != "$list" ] || list=$root/$list
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
if cmp -s "$list" "$folder/requirements.txt"; then
    exit 0
fi
rm -rf "$folder"
scratch=$(mktemp -d)
log=$scratch/log
trap 'rm -rf "$scratch"' EXIT
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@" >>"$log" 2>&1; }
# hashed LIST: without isolation pip builds packages with what is installed, so it fetches nothing that lists lack.
hashed() { pip install --require-hashes --no-deps --no-build-isolation -r "$1"; }
# The index's own torch for Linux is a CUDA build, which draws in packages that the list does not name.
install() {
    local torch
    torch=$(sed -nE 's/^torch==([0-9.]+).*/\1/p' "$list")
    if [ -n "$torch" ] && [ "$(uname -s)" = Linux ] && ! "$folder/bin/python" -m pip index versions torch 2>/dev/null | grep -qF "$torch+cpu"; then
        echo "venv.sh: pip offers no CPU build of torch $torch; it installs the index's own and what that needs, without hashes" >&2
        pip install "torch==$torch" || return 1
        sed '/^torch==/,/^[^ ]/{/^torch==/d; /^ /d}' "$list" >"$scratch/list"
        hashed "$scratch/list"
    else
        hashed "$list"
    fi
}
if python3 -m venv "$folder" >"$log" 2>&1 && hashed "$root/scripts/pins/build.txt" && install; then
    cp "$list" "$folder/requirements.txt"
    exit 0
fi
tail -n 20 "$log" >&2
if [ "${CI:-}" = true ]; then
    echo "the packages of $list cannot be installed (skipped outside CI)"
    exit 1
fi
echo "skipped: the packages of $list cannot be installed"
exit 77
