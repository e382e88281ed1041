#!/bin/bash
# venv.sh FOLDER: a Python virtual environment in FOLDER with the pinned packages of tests/python/requirements.txt. Does
# nothing when it is there and the list has not changed since. Several may call it at the same time.
set -eu
folder=$1
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
list=$(cd "$(dirname "$0")/.." && pwd)/tests/python/requirements.txt
if cmp -s "$list" "$folder/requirements.txt"; then
    exit 0
fi
rm -rf "$folder"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if python3 -m venv "$folder" >"$log" 2>&1 &&
    "$folder/bin/python" -m pip install --disable-pip-version-check --quiet -r "$list" >>"$log" 2>&1; then
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
