#!/bin/bash
# Experiments on a real text: prints markdown tables to stdout, leaves every report in OUT.
#
#   lab/experiments.sh [BUILD]           or: make experiments TEXT=FILE
#
#   E1  stale weights: learning rate 1e-5, constant, from scratch
#   E2  pretraining: learning rate tuned for each recipe, warm-up, cosine to 10 %
#   E3  accumulation: steps of 8 micro-steps, whose gradients add up in fp32, in BF16 and in the optimizer's states
#   E5  memory held and at its peak, with and without gradient release
#   EW  weights in 12 and 8 bits, without a master copy, in four regimes: only where ONLY names it; needs torch
#
# Environment: TEXT, any large text (docs/results.md was made from tinyshakespeare.txt; without it the text of the demo
# serves); OUT, default BUILD/experiments; ONLY="E1 E5" runs some of them; SCALE=0.02 shortens all runs to that share of
# their steps (to try the script); SEEDS1, SEEDS2, SEEDS3 and SEEDSW are the numbers of seeds of E1, E2, E3 and EW;
# RECIPES, between spaces, takes the place of the recipes of E1, E2, E5 and EW, and RATES of the rates of E2;
# OTHER is the text that EW tunes to; PYTHON, the interpreter of EW; THREADS. What has finished is not run again: delete
# its folder in OUT to repeat it. What was interrupted goes on where it stopped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/../build}
text=${TEXT:-data/demo.txt}
out=${OUT:-$build/experiments}
halfstep=$build/halfstep
[ -r "$text" ] || [ -n "${TEXT:-}" ] || text=$here/../data/demo.txt
threads=${THREADS:-0}
scale=${SCALE:-1}
only=${ONLY:-E1 E2 E3 E5}
[ -x "$halfstep" ] || { echo "experiments: $halfstep is missing; run make build" >&2; exit 1; }
[ -r "$text" ] || { echo "experiments: cannot read $text" >&2; exit 1; }
mkdir -p "$out"

# A count of the full-length experiment, scaled.
steps() {
    awk -v n="$1" -v s="$scale" 'BEGIN { n = int(n * s); print n < 4 ? 4 : n }'
}

wanted() {
    case " $only " in *" $1 "*) return 0 ;; *) return 1 ;; esac
}

# compare NAME ARGUMENTS...: one comparison into OUT/NAME, unless it is complete there.
compare() {
    local name=$1
    shift
    if [ -e "$out/$name/report.json" ] && grep -q '"complete": true' "$out/$name/report.json"; then
        echo "experiments: $name is there already" >&2
        return
    fi
    echo "experiments: $name" >&2
    "$halfstep" compare lm --data "$text" --threads "$threads" --out "$out/$name" --checkpoint "$out/$name/runs" --resume "$@" \
        >"$out/$name.txt"
    rm -rf "$out/$name/runs"
}

recipes=${RECIPES:-adamw/f32 adamw/bf16-sr adamw/bf16-kahan adamw/bf16-ecc8 adamw/bf16-sr/int8 adamw/bf16-ecc8/int8 adamw/bf16-sr/int4
    adamw/bf16-ecc8/int4}

tables() {
    python3 "$here/tables.py" "$@"
}

if wanted E1; then
    n=$(steps 300)
    grid=
    for recipe in $recipes; do
        grid=$grid,$recipe
        # What all the others are there to avoid, behind the reference.
        [ -n "${RECIPES:-}" ] || [ "$recipe" != adamw/f32 ] || grid=$grid,adamw/bf16
    done
    compare e1 --recipes "${grid#,}" --seeds "${SEEDS1:-3}" --lr 1e-5 --weight-decay 0.01 --width 512 --depth 2 --heads 8 --context 64 --batch 8 \
        --steps "$n" --val-every "$(steps 50)" --eval-batches "$(steps 32)"
    tables results "E1: stale weights" "$out/e1/report.json"
fi

if wanted E2; then
    # Every rate of the grid with every seed, so that the choice of a rate and the comparison share their runs.
    n=$(steps 400)
    grid=
    for recipe in $recipes; do
        for lr in ${RATES:-2e-3 4e-3}; do
            grid=$grid,$recipe:lr=$lr
        done
    done
    compare e2 --recipes "${grid#,}" --seeds "${SEEDS2:-3}" --seed 101 --width 128 --depth 4 --heads 4 --context 128 --batch 16 \
        --weight-decay 0.1 --clip 1 --schedule cosine --final-lr 0.1 --steps "$n" --warmup $((n / 20)) --val-every 0 \
        --eval-batches "$(steps 48)"
    tables rates "E2: pretraining" "$out/e2/report.json"
fi

if wanted E3; then
    n=$(steps 400)
    grid=
    for accumulator in f32 bf16 bf16-sr states; do grid=$grid,adamw/bf16-sr:accumulator=$accumulator; done
    compare e3 --recipes "${grid#,}" --seeds "${SEEDS3:-3}" --seed 201 --micro-steps 8 --batch 2 --lr "${RATE3:-2e-3}" --width 128 \
        --depth 4 --heads 4 --context 128 --weight-decay 0.1 --schedule cosine --final-lr 0.1 --steps "$n" --warmup $((n / 20)) \
        --val-every 0 --eval-batches "$(steps 384)"
    tables results "E3: accumulation" "$out/e3/report.json"
fi

if wanted EW; then
    # shellcheck disable=SC2086
    PYTHONPATH=$here/../python HALFSTEP_LIBRARY=$build/libhalfstep.so "${PYTHON:-python3}" "$here/weights.py" --text "$text" \
        --other "${OTHER:-$here/../data/demo.txt}" --out "$out/ew" --scale "$scale" --seeds "${SEEDSW:-3}" ${RECIPES:+--recipes $RECIPES}
fi

if wanted E5; then
    grid=
    for recipe in $recipes lion/bf16-sr/int8; do
        grid=$grid,$recipe,$recipe:release
    done
    compare e5 --recipes "${grid#,}" --lr 1e-4 --width 256 --depth 12 --heads 8 --context 64 --batch 2 --steps 4 --val-every 0 \
        --eval-batches 1
    tables memory "E5: memory" "$out/e5/report.json"
fi
