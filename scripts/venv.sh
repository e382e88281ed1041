#!/bin/bash
# venv.sh FOLDER [LIST]: a Python virtual environment in FOLDER with the packages of LIST, tests/python/requirements.txt if not
# given. Every file that pip fetches must have a hash in LIST (scripts/pins.sh). Another list names every package that it needs, so
# that pip looks for none. Does nothing when the environment is there and the list has not changed since. Several may call it at the
# same time.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
list=$root/${2:-tests/python/requirements.txt}
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
if cmp -s "$list" "$folder/requirements.txt"; then
    exit 0
fi
rm -rf "$folder"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# install LIST ARGUMENT...: without isolation pip builds packages with what is installed, so it fetches nothing that the lists lack.
install() {
    "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --require-hashes --no-build-isolation "${@:2}" \
        -r "$1" >>"$log" 2>&1
}
if python3 -m venv "$folder" >"$log" 2>&1 && install "$root/scripts/pins/build.txt" --no-deps &&
    install "$list" ${2:+--no-deps}; then
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
