#!/bin/bash
# Checks that the core library stays small enough for wheels: under 4 MB without symbols.
. "$(dirname "$0")/../tools/lib.sh"
need strip
make_scratch
strip -o "$scratch/lib.so" "$build_dir/libhalfstep.so"
bytes=$(wc -c <"$scratch/lib.so")
echo "libhalfstep.so: $bytes bytes"
[ "$bytes" -lt 4000000 ] || fail "libhalfstep.so has $bytes bytes, 4000000 are too many"
