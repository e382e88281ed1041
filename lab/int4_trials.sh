#!/bin/bash
# Candidates for the codes of int4: builds lab/int4_trials.c and prints its tables (docs/results.md quotes them).
#
#   lab/int4_trials.sh [open|train] [SPEC...]      both parts with the standard candidates by default
#
# Environment: TEXT, a text of at least 100 KB; SEEDS of the training (12); CC; OUT, the folder to build in. WIDTH, DEPTH,
# STEPS and LR of the model, VERBOSE and QUICK as in the head of the C file. One core; `open` takes two minutes, `train` a
# minute for each candidate. Needs oneDNN, as the tool does.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/..
text=${TEXT:-$root/data/demo.txt}
out=${OUT:-$root/build/int4_trials}
cc=${CC:-cc}
seeds=${SEEDS:-12}
[ -r "$text" ] || { echo "int4_trials: cannot read $text" >&2; exit 1; }
mkdir -p "$out"
models=$root/tools/trainer/models loops=$root/tools/trainer/loops
[ -e "$root/build/libhalfstep.so" ] || { echo "int4_trials: make build comes first" >&2; exit 1; }
$cc -std=gnu11 -D_GNU_SOURCE -O3 -march=native -ffp-contract=off -Wall -Wextra -I"$root/tools" -I"$root/src" \
    -I"$root/include" -DHSTEP_ISA=scalar '-DHSTEP_VEC_HEADER="vec/scalar.h"' '-DROW_ISAS=X(scalar)' -o "$out/int4_trials" \
    "$here/int4_trials.c" "$models"/llama.c "$models"/llama_shape.c "$models"/llama_generate.c "$loops"/matmul.c \
    "$loops"/parallel.c "$loops"/rows.c "$loops"/row_kernels.c -L"$root/build" -Wl,-rpath,"$root/build" -lhalfstep \
    -ldnnl -lm -lpthread

part=${1:-all}
[ $# -gt 0 ] && shift
if [ "$part" = open ] || [ "$part" = all ]; then
    specs=("$@")
    [ $# -gt 0 ] || specs=(
        int8+int8 dyn@128.f32+dyn@128.f32 softsign+lin int4+int4 int4+int4+norm int8+int4 int8+int4+norm
        softsign+f32 root+f32 cube+f32 uniform+f32 fp4+f32 int4+f32 int4+f32+norm softsign-sr+f32 softsign-sr+f32+norm
        softsign@16+f32 softsign@64.f32+f32 softsign@16.e8+f32
        f32+lin f32+lin@64.f32 f32+lin@16 f32+lin@32.e8 f32+lin@16.e8 f32+quad f32+log16 f32+sq31 f32+sq40 f32+f22 f32+f31
        f32+f22@32.e8 f32+f22@16.e8 f32+f22s@16.e8 f32+log8@16.e8
        f32+w1a1@16.e8 f32+w2a1@16.e8 f32+w3a1@16.e8 f32+vw1a1@16.e8 f32+w2a2l4c1@16.e8 f32+int4 f32+w2a2l6c1@32.e8
        f32+w2a2l8c1@16.e8 f32+lin+factor f32+f22+factor
        f32+int8 f32+w5a1n256@32 f32+w5a4l128c4n256@32)
    "$out/int4_trials" open "$text" "${specs[@]}"
fi
if [ "$part" = train ] || [ "$part" = all ]; then
    specs=("$@")
    [ $# -gt 0 ] || specs=(int8+int8 int8+int4 int4+int4 int4+int4+norm int4-sr+int4+norm softsign+lin dyn@128.f32+dyn@128.f32)
    "$out/int4_trials" train "$text" "$seeds" "${specs[@]}"
fi
