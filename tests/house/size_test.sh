#!/bin/bash
# Checks that the core library stays small enough for wheels: under 4 MB without symbols. It needs only libc, libm and
# their kin.
. "$(dirname "$0")/../tools/lib.sh"
need strip readelf
make_scratch
strip -o "$scratch/lib.so" "$build_dir/libhalfstep.so"
bytes=$(wc -c <"$scratch/lib.so")
echo "libhalfstep.so: $bytes bytes"
[ "$bytes" -lt 4000000 ] || fail "libhalfstep.so has $bytes bytes, 4000000 are too many"
others=$(readelf -d "$scratch/lib.so" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | grep -Ev '^(libc|libm|libpthread|libdl|ld-linux.*)\.so' || true)
[ -z "$others" ] || fail "libhalfstep.so needs $others"
