#!/bin/bash
# Makes calls into the C library fail while the program trains, resumes, compares, generates. Also tests a loss of
# power, a full disk and two trainers. This is a short choice; `make faults` runs all.
. "$(dirname "$0")/../tools/lib.sh"
need python3 timeout
[ -x "$build_dir/halfstep" ] || skip "$build_dir/halfstep is not built"
[ -e "$build_dir/tests/libfaults.so" ] || skip "$build_dir/tests/libfaults.so is not built"
export HALFSTEP_SOURCE=$source_dir HALFSTEP_BUILD=$build_dir
timeout 600 python3 "$source_dir/tests/faults/sweep.py" --short || fail "the sweep"
timeout 300 python3 "$source_dir/tests/faults/durability.py" || fail "durability"
