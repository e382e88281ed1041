#!/bin/bash
# Calls into the C library that fail while the program trains, resumes, compares, generates: a short sweep. `make faults` runs
# the whole.
. "$(dirname "$0")/lib.sh"
need python3 timeout
[ -x "$build_dir/halfstep" ] || skip "$build_dir/halfstep is not built"
[ -e "$build_dir/tests/libfaults.so" ] || skip "$build_dir/tests/libfaults.so is not built"
export HALFSTEP_SOURCE=$source_dir HALFSTEP_BUILD=$build_dir
timeout 600 python3 "$source_dir/tests/faults/sweep.py" --short || fail "the sweep"
