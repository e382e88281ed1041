#!/bin/bash
# run_python.sh SCRIPT: runs a Python test with the packages of tests/python/requirements.txt.
script=$1
. "$(dirname "$0")/lib.sh"
need python3
status=0
bash "$source_dir/scripts/venv.sh" "$build_dir/venv" || status=$?
[ "$status" = 0 ] || exit "$status"
exec "$build_dir/venv/bin/python" "$script"
