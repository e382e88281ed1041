#!/bin/bash
# scan.sh LIBRARY [LIBRARY]: what the look through the gradients costs, by recipe and pages. ELEMENTS, THREADS and ROUNDS choose.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cc -O2 "-I$here/../include" "$here/scan.c" -o "$scratch/scan" -ldl
printf '| recipe | threads | pages | known finite, ns | scanned | difference |%s\n' "${2:+ known finite, second | scanned | difference |}"
printf '| --- | ---: | --- | ---: | ---: | ---: |%s\n' "${2:+ ---: | ---: | ---: |}"
for recipe in adamw/f32/f32 adamw/bf16-sr/bf16-sr adamw/bf16-kahan/bf16-sr ema/f32; do
    for pages in small huge; do
        "$scratch/scan" "$(realpath "$1")" "$recipe" "${ELEMENTS:-67108864}" "${THREADS:-2}" "$pages" "${ROUNDS:-31}" ${2:+"$(realpath "$2")"}
    done
done
