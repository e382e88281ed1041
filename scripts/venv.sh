#!/bin/bash
# venv.sh FOLDER [LIST]: a Python virtual environment in FOLDER with the pinned packages of LIST, tests/python/requirements.txt
# if not given. Another list names every package that it needs, so that pip looks for none. Does nothing when the environment is
# there and the list has not changed since. Several may call it at the same time.
set -eu
folder=$1
list=$(cd "$(dirname "$0")/.." && pwd)/${2:-tests/python/requirements.txt}
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
if cmp -s "$list" "$folder/requirements.txt"; then
    exit 0
fi
rm -rf "$folder"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if python3 -m venv "$folder" >"$log" 2>&1 &&
    "$folder/bin/python" -m pip install --disable-pip-version-check --quiet ${2:+--no-deps} -r "$list" >>"$log" 2>&1; then
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
