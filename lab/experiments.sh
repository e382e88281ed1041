#!/bin/bash
# Experiments on a real text: prints markdown tables to stdout, leaves every report in OUT.
#
#   lab/experiments.sh [BUILD]           or: make experiments TEXT=FILE
#
#   E1  stale weights: learning rate 1e-5, constant, from scratch
#   E2  pretraining: learning rate tuned for each recipe, warm-up, cosine to 10 %
#   E3  accumulation: steps of 8 micro-steps, whose gradients add up in fp32, in BF16 and in the optimizer's states
#   E5  memory held and at its peak, with and without gradient release
#   E6  rules beside adamw in fp32, each at three rates: E1's model, cosine; only where ONLY names it. RULES, between spaces, are others
#   EM  storage of Muon's momentum: from one checkpoint in fp32, rate decayed to 0; only where ONLY names it
#   EW  weights in 12 and 8 bits, without a master copy, in four regimes: only where ONLY names it; needs torch
#   ER  every rule with bf16-sr weights and int8 states, at two rates of its own: only where ONLY names it
#
# Environment: TEXT, any large text (docs/results.md was made from tinyshakespeare.txt; without it the text of the demo
# serves); OUT, default BUILD/experiments; ONLY="E1 E5" runs some of them; SCALE=0.02 shortens all runs to that share of
# their steps (to try the script); SEEDS1, SEEDS2, SEEDS3, SEEDSM and SEEDSW are the numbers of seeds of E1, E2, E3, EM
# and EW; RECIPES, between spaces, takes the place of the recipes of E1, E2, E5, EM and EW, and RATES of the rates of E2;
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

if wanted EM; then
    # From a common start runs with one seed stay close, so that few seeds tell small differences. AdamW steps the rest.
    n=$(steps 200)
    options="--adamw-lr 3e-3 --batch 8 --clip 1 --weight-decay 0.1"
    if [ ! -e "$out/em-start/manifest.json" ]; then
        echo "experiments: em-start" >&2
        # shellcheck disable=SC2086
        "$halfstep" train lm --data "$text" --threads "$threads" --recipe muon/f32 --lr 2e-2 $options --width 128 --depth 2 --heads 4 \
            --context 128 --steps $((2 * n)) --warmup $((n / 10)) --seed 500 --val-every 0 --checkpoint "$out/em-start" --quiet >/dev/null
    fi
    options="$options --init $out/em-start --schedule linear --final-lr 0 --steps $n --warmup $((n / 20)) --val-every 0 --eval-batches $(steps 64)"
    grid=
    for lr in 5e-3 1e-2 2e-2 4e-2; do grid=$grid,muon/f32:lr=$lr; done
    # shellcheck disable=SC2086
    compare em-rates $options --recipes "${grid#,}" --seed 501
    tables rates "EM: rates of fp32" "$out/em-rates/report.json"
    grid=
    for recipe in ${RECIPES:-muon/f32 muon/f32/int8 muon/f32/int6 muon/f32/int4 muon/bf16-sr/int8 muon/bf16-sr muon/bf16-ecc8/int8}; do
        grid=$grid,$recipe
    done
    # shellcheck disable=SC2086
    compare em $options --recipes "${grid#,}" --lr 1e-2 --seed 601 --seeds "${SEEDSM:-4}"
    tables results "EM: momentum of Muon" "$out/em/report.json"
fi

if wanted EW; then
    # shellcheck disable=SC2086
    PYTHONPATH=$here/../python HALFSTEP_LIBRARY=$build/libhalfstep.so "${PYTHON:-python3}" "$here/weights.py" --text "$text" \
        --other "${OTHER:-$here/../data/demo.txt}" --out "$out/ew" --scale "$scale" --seeds "${SEEDSW:-3}" ${RECIPES:+--recipes $RECIPES}
fi

# The rates at which a rule is tried; rates mean other things to each of them.
rates_of() {
    case $1 in
    sgd) echo 0.3 1 ;;
    lion) echo 2e-4 4e-4 ;;
    compass | rmsprop) echo 5e-4 1e-3 ;;
    lpfadamw) echo 1e-3 2e-3 ;;
    lamb | lamb16 | muon | schedulefree) echo 1e-2 2e-2 ;;
    *) echo 2e-3 4e-3 ;;
    esac
}

if wanted ER; then
    n=$(steps 400)
    grid=
    for rule in adamw $("$halfstep" info --json | python3 -c 'import json, sys; print(*json.load(sys.stdin)["rules"])'); do
        # What follows weights trains none; adamw comes first, as the reference.
        case $rule,$grid in ema,* | adamw,?*) continue ;; esac
        special=
        case $rule in
        # Coupled decay of this strength would rule the update.
        sgd) special=:momentum=0.9:weight-decay=0 ;;
        adam | radam | rmsprop) special=:weight-decay=0 ;;
        schedulefree) special=:schedule=constant ;;
        esac
        for lr in $(rates_of "$rule"); do grid=$grid,$rule/bf16-sr/int8:lr=$lr$special; done
    done
    compare er --recipes "${grid#,}" --seeds "${SEEDS2:-1}" --seed 301 --width 128 --depth 4 --heads 4 --context 128 --batch 16 \
        --weight-decay 0.1 --clip 1 --schedule cosine --final-lr 0.1 --steps "$n" --warmup $((n / 20)) --val-every 0 \
        --eval-batches "$(steps 48)"
    tables best "ER: every rule" "$out/er/report.json"
fi

if wanted E6; then
    n=$(steps 300)
    grid=
    for recipe in adamw/f32 ${RULES:-adamw/bf16-sr/int8 adamw/bf16-sr/int8:cautious=1 adopt/bf16-sr/int8 ademamix/bf16-sr/int8 mars/bf16-sr/int8 prodigy/bf16-sr/int8
        adafactor/bf16-sr came/bf16-sr/int8}; do
        case $recipe in
        prodigy/*) rates="0.0625 0.125 0.25" ;;
        adafactor/*) rates="1e-2 3e-2 1e-1" ;;
        came/*) rates="2.5e-5 5e-5 1e-4" ;;
        adopt/* | mars/*) rates="2.5e-4 5e-4 1e-3" ;;
        *) rates="1.25e-4 2.5e-4 5e-4" ;;
        esac
        for lr in $rates; do grid=$grid,$recipe:lr=$lr; done
    done
    compare e6 --recipes "${grid#,}" --seeds "${SEEDS1:-1}" --seed 401 --width 512 --depth 2 --heads 8 --context 64 --batch 8 --clip 1 \
        --weight-decay 0.01 --schedule cosine --final-lr 0.1 --steps "$n" --warmup $((n / 20)) --val-every 0 --eval-batches "$(steps 32)"
    tables best "E6: rules" "$out/e6/report.json"
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
