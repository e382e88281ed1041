#!/bin/bash
# run.sh BUILD [TAG...]: runs what can be run of the wheels in BUILD/dist, or of those with the tags of packaging/platforms.csv.
# Needs the packages of `setup.sh packages`, which it installs, and the Python environment of the tests, BUILD/venv.
set -eu
[ $# -ge 1 ] || {
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
}
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
build=$(cd "$1" && pwd)
shift
cd "$source"
bash scripts/setup.sh packages
bash scripts/venv.sh "$build/packaging/venv" packaging/requirements.txt
bash scripts/venv.sh "$build/venv"
exec "$build/packaging/venv/bin/python" packaging/run.py "$build" "$@"
