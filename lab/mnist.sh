#!/bin/bash
# E4: LAMB16 and its claims on MNIST. Prints the tables of `halfstep compare mnist`, leaves its reports in OUT.
#
#   lab/mnist.sh [BUILD]
#
#   targets   batch 1024, 10 epochs, lr 0.02, and batch 128, 5 epochs, lr 0.01; weight decay 0.01; with fp32 and BF16 weights
#   claims    Adam, LAMB, LAMB16 with its own and its published scaling, and AdamW with low-bit states, at three batch sizes
#
# Environment: MNIST, the folder with the four IDX files (required); OUT, default BUILD/experiments; ONLY="targets claims";
# SEEDS, default 3; EPOCHS of the claims, default 5; THREADS. The claims' learning rates were chosen for each recipe and batch
# size among three (RATES=1 runs that choice).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/../build}
out=${OUT:-$build/experiments}
halfstep=$build/halfstep
[ -x "$halfstep" ] || { echo "mnist: $halfstep is missing; run make build" >&2; exit 1; }
[ -d "${MNIST:-}" ] || { echo "mnist: MNIST has to name the folder with the IDX files" >&2; exit 1; }
mkdir -p "$out"

# run NAME ARGUMENTS...: one comparison into OUT/NAME, unless it is there.
run() {
    local name=$1
    shift
    [ -e "$out/$name/report.json" ] || "$halfstep" compare mnist --data "$MNIST" --threads "${THREADS:-0}" --seeds "${SEEDS:-3}" \
        --out "$out/$name" "$@" >"$out/$name.txt"
    echo "== $name"
    cat "$out/$name.txt"
}

case " ${ONLY:-targets claims} " in *" targets "*)
    lamb16=lamb16/f32,lamb16/bf16-sr,lamb16/f32/fp8-lamb16
    run e4-1024 --recipes "$lamb16" --batch 1024 --lr 0.02 --weight-decay 0.01 --epochs 10
    run e4-128 --recipes "$lamb16" --batch 128 --lr 0.01 --weight-decay 0.01 --epochs 5
    ;;
esac
