#!/bin/bash
# two_builds.sh OLD NEW: compares two build folders, for changes that must cost nothing. Prints which functions of the kernels differ
# in their instructions. Then times steps of every recipe of bench/results.csv, in turn in one process: one tensor that fits the
# cache, and 1000 small ones. THREADS and ROUNDS choose.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
old=$(cd "$1" && pwd) new=$(cd "$2" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for object in "$new"/CMakeFiles/hstep_kernels_*.dir/src/kernels/kernels.c.o; do
    folder=${object%/src/kernels/kernels.c.o}
    before=$old/CMakeFiles/${folder##*/}/src/kernels/kernels.c.o
    python3 "$here/same_code.py" "$before" "$object"
done
cc -O2 "-I$here/../include" "$here/two_builds.c" -o "$scratch/two_builds" -ldl
printf '| recipe | tensors | old, us | new, us | new / old |\n| --- | --- | ---: | ---: | ---: |\n'
steps() { "$scratch/two_builds" "$old/libhalfstep.so" "$new/libhalfstep.so" "$@"; }
cut -d, -f1 "$here/../bench/results.csv" | tail -n +2 | sort -u | while read -r recipe; do
    steps "$recipe" 1 128 512 "${ROUNDS:-301}"
    steps "$recipe" 1000 2 64 "${ROUNDS:-101}"
done
