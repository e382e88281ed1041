#!/bin/bash
# many.sh LIBRARY [LIBRARY]: many small tensors against one with as many elements, and where there is a second library, its many against
# the first one's. THREADS and ROUNDS choose.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cc -O2 "-I$here/../include" "$here/many.c" -o "$scratch/many" -ldl
printf '| recipe | tensors | threads | scan | one, us | many, us | many / one | ns a tensor |%s\n' "${2:+ second / first |}"
printf '| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |%s\n' "${2:+ ---: |}"
for recipe in adamw/f32/f32 adamw/bf16-sr/bf16-sr adamw/bf16-kahan/bf16-sr lion/bf16-sr/bf16-sr; do
    for shapes in '2-64x64*1000' '2x64*1000' '16x64*1000' '64x64*1000' model; do
        "$scratch/many" "$(realpath "$1")" "$recipe" "$shapes" "${THREADS:-1}" scan "${ROUNDS:-301}" ${2:+"$(realpath "$2")"}
    done
done
