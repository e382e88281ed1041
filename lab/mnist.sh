#!/bin/bash
# E4: LAMB16 and its claims on MNIST. Prints the tables of `halfstep compare mnist`, leaves its reports in OUT.
#
#   lab/mnist.sh [BUILD]
#
#   targets   batch 1024, 10 epochs, lr 0.02, and batch 128, 5 epochs, lr 0.01, weight decay 0.01, with fp32 and BF16 weights:
#             at a constant rate, as published, and with a cosine to 0
#   claims    Adam, LAMB, LAMB16 with its own and its published scaling, and AdamW with low-bit states, at three batch sizes
#
# Environment: MNIST, the folder with the four IDX files (required); OUT, default BUILD/experiments; ONLY="targets claims";
# SEEDS, default 3; EPOCHS of the claims, default 5; THREADS. What is there already is not run again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/../build}
out=${OUT:-$build/experiments}
halfstep=$build/halfstep
[ -x "$halfstep" ] || { echo "mnist: $halfstep is missing; run make build" >&2; exit 1; }
[ -d "${MNIST:-}" ] || { echo "mnist: MNIST has to name the folder with the IDX files" >&2; exit 1; }
mkdir -p "$out"

# run NAME ARGUMENTS...: one comparison into OUT/NAME.
run() {
    local name=$1
    shift
    if [ ! -s "$out/$name.txt" ]; then
        "$halfstep" compare mnist --data "$MNIST" --threads "${THREADS:-0}" --seeds "${SEEDS:-3}" --out "$out/$name" "$@" >"$out/$name.tmp"
        mv "$out/$name.tmp" "$out/$name.txt"
    fi
    echo "== $name"
    cat "$out/$name.txt"
}

case " ${ONLY:-targets claims} " in *" targets "*)
    for schedule in constant cosine; do
        lamb16=lamb16/f32,lamb16/bf16-sr
        [ $schedule = cosine ] || lamb16=$lamb16,lamb16/f32/fp8-lamb16
        set -- --recipes $lamb16 --weight-decay 0.01 --schedule $schedule --final-lr 0
        run e4-1024-$schedule "$@" --batch 1024 --lr 0.02 --epochs 10
        run e4-128-$schedule "$@" --batch 128 --lr 0.01 --epochs 5
    done
    ;;
esac

# Adam without its l2 decay. Rates by batch size: adam's 1e-3 and LAMB's 0.01 at 128, by the square root of the batch size beyond, rounded.
case " ${ONLY:-targets claims} " in *" claims "*)
    recipes=adam/f32@1e-3/3e-3/8e-3:weight-decay=0,lamb/f32@0.01/0.03/0.08
    for recipe in lamb16/f32 lamb16/f32/fp8-lamb16; do recipes=$recipes,$recipe@0.01/0.02/0.04; done
    for states in int8 int4 dyn8 dyn4; do recipes=$recipes,adamw/f32/$states@1e-3/3e-3/8e-3; done
    run e4-claims --recipes "$recipes" --weight-decay 0.01 --batch 128,1024,8192 --epochs "${EPOCHS:-5}"
    ;;
esac
