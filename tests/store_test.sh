#!/bin/bash
# Tests `train lm --store`: the bits of a run with states in memory, also after kills at random instants, and files of
# states that become checkpoints and come back.
# store_test.sh [SEED]: the same seed gives the same instants.
. "$(dirname "$0")/lib.sh"
halfstep=$build_dir/halfstep
[ -x "$halfstep" ] || skip "$halfstep is not built"
make_scratch
cd "$scratch"
RANDOM=${1:-43}
head -c 20000 "$source_dir/data/demo.txt" >text
small=(train lm --data text --width 64 --depth 2 --heads 2 --context 32 --batch 4 --eval-batches 2 --sample-bytes 0
    --threads 1 --val-every 3 --steps 6 --quiet --json)
lm() { timeout 240 "$halfstep" "${small[@]}" "$@"; }
# result FILE: the numbers that must be equal. Curves are not in a file of states.
result() { grep -E '^  "(train_loss|val_loss|skipped_steps|weights_changed_percent|state_hash)"' "$1"; }
same() { # WHAT FILE WANTED
    [ "$(result "$2")" = "$(result "$3")" ] && [ -n "$(result "$2")" ] ||
        fail "seed ${1##*seed }: $1 has $(result "$2"), and not $(result "$3")"
}

killed() { # OPTIONS...: kills a run until it is done; `kills` says how often
    local status
    kills=0
    rm -f run.states run.states.start*
    while :; do
        "$halfstep" "${small[@]}" --store run.states "$@" >killed.json 2>err &
        # Waits for a tenth to half of the time of a whole run. The last run lives.
        if [ $kills -lt 4 ]; then
            sleep "$(awk -v t="$elapsed" -v r=$RANDOM 'BEGIN { printf "%.4f", t * (0.1 + 0.4 * r / 32768) }')"
            kill -9 $! 2>/dev/null || true
        fi
        status=0
        wait $! 2>/dev/null || status=$?
        [ $status != 0 ] || break
        if [ $status = 137 ]; then
            kills=$((kills + 1))
        else
            fail "$*: exit $status after $kills kills: $(cat err)"
        fi
    done
}

total=0
while read -r options; do
    rm -f whole.states
    # shellcheck disable=SC2086 # words
    {
        lm $options >plain.json
        start=$EPOCHREALTIME
        lm $options --store whole.states >whole.json
        elapsed=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')
        same "--store $options" whole.json plain.json
        killed $options
    }
    same "--store $options after $kills kills" killed.json plain.json
    total=$((total + kills))
done <<'OPTIONS'
--recipe adamw/bf16-sr/int8 --clip 0.5
--recipe adamw/int8-ecc4/int8 --release --clip 1
--recipe adamw/bf16-kahan --micro-steps 3 --accumulator states
--recipe muon/bf16-ecc8/int4 --adamw-lr 1e-3 --micro-steps 2
OPTIONS
[ "$total" -ge 2 ] || fail "only $total runs were killed"
echo "ok   4 ways to train have the bits of states in memory, and had them after $total kills"

# A file becomes a checkpoint, as --checkpoint writes it, and the checkpoint a file. Both go on.
options=(--recipe adamw/bf16-kahan/int8 --release --clip 1)
lm "${options[@]}" >plain.json
lm "${options[@]}" --steps 3 --store a.states >/dev/null
lm "${options[@]}" --steps 3 --checkpoint a >/dev/null
"$halfstep" convert a.states b --to checkpoint >/dev/null
"$halfstep" convert a b.states --to store >/dev/null
"$halfstep" convert a.states c.safetensors --to optimizer >/dev/null
for file in model.safetensors optimizer.safetensors config.json; do cmp "a/$file" "b/$file" || fail "$file differs"; done
[ "$("$halfstep" generate --checkpoint a.states)" = "$("$halfstep" generate --checkpoint a)" ] || fail "generate differs"
lm --recipe sgd/f32 --steps 1 --init a >plain-init.json
lm --recipe sgd/f32 --steps 1 --init a.states >init.json
same "--init a.states" init.json plain-init.json
for from in "--store a.states" "--store b.states" "--checkpoint b --resume"; do
    # shellcheck disable=SC2086 # words
    timeout 240 "$halfstep" train lm --quiet --json --steps 6 $from >again.json
    same "$from" again.json plain.json
done
"$halfstep" inspect c.safetensors --json | grep -q "lm_head.weight/exp_avg_sq.scale" || fail "c.safetensors lacks states"
echo "ok   files of states and checkpoints become each other"
