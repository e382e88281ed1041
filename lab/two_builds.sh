#!/bin/bash
# two_builds.sh OLD NEW: two build folders against each other, for changes that are to cost nothing. The instructions of every kernel, function for
# function (positions of data apart), then the time of steps of every recipe of bench/results.csv, in turn in one process: one
# tensor that fits the cache, and 1000 small ones.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
old=$(cd "$1" && pwd) new=$(cd "$2" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for object in "$new"/CMakeFiles/hstep_kernels_*.dir/src/kernels/kernels.c.o; do
    folder=${object%/src/kernels/kernels.c.o}
    before=$(find "$old/CMakeFiles/${folder##*/}" -name kernels.c.o)
    python3 "$here/same_code.py" "$before" "$object"
done
cc -O2 "-I$here/../include" "$here/two_builds.c" -o "$scratch/two_builds" -ldl
printf '| recipe | tensors | old, us | new, us | new / old |\n| --- | --- | ---: | ---: | ---: |\n'
cut -d, -f1 "$here/../bench/results.csv" | tail -n +2 | sort -u | while read -r recipe; do
    "$scratch/two_builds" "$old/libhalfstep.so" "$new/libhalfstep.so" "$recipe" 1 128 512 "${ROUNDS:-301}"
    "$scratch/two_builds" "$old/libhalfstep.so" "$new/libhalfstep.so" "$recipe" 1000 2 64 "${ROUNDS:-101}"
done
