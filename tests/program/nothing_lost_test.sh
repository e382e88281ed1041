#!/bin/bash
# Tests the trainer's promises about work. A run that ends well has left a checkpoint that loads. Nothing that existed
# before is lost, and every failure on the way is reported. Arguments: the names of tests; none: all.
. "$(dirname "$0")/../tools/lib.sh"
need python3 timeout
halfstep=$build_dir/halfstep
[ -x "$halfstep" ] || skip "$halfstep is not built"
data=$source_dir/data/demo.txt
make_scratch
cd "$scratch"
small=(train lm --data "$data" --width 16 --depth 1 --heads 2 --context 8 --batch 2 --threads 1 --val-every 4 --eval-batches 2
    --sample-bytes 4 --quiet)
lm() { timeout 240 "$halfstep" "${small[@]}" "$@"; }
resume() { timeout 240 "$halfstep" train lm --resume --quiet "$@"; }
# field KEY, value FILE KEY: print one value of a JSON object. The program prints one line for each key.
field() { sed -nE 's/^  "'"$1"'": "?(.*[^",]|)"?,?$/\1/p'; }
value() { field "$2" <"$1"; }
step_of() { "$halfstep" inspect "$1" --json | field step | grep .; }
# A test that fails says why and ends. Each test is a subshell.
bad() {
    echo "     $*"
    exit 1
}
# refused STATUS PATTERN WORDS...: checks the status, and that stderr is one line that matches.
refused() {
    local wanted=$1 pattern=$2 got=0
    shift 2
    timeout 240 "$halfstep" "$@" >out 2>err </dev/null || got=$?
    [ $got = "$wanted" ] || bad "$*: exit $got, not $wanted: $(head -c 300 err)"
    [ "$(wc -l <err)" = 1 ] || bad "$*: not one line: $(head -c 300 err)"
    LC_ALL=C grep -aqE -- "$pattern" err || bad "$*: $(head -c 300 err) does not match $pattern"
}
wait_for() {
    for _ in $(seq 400); do
        ! eval "$1" || return 0
        sleep 0.05
    done
    bad "waited in vain for: $1"
}

# with_fault FAULT WORDS...: runs the program while calls fail (tests/faults/inject.c). faults WHO WORDS...: counts the allocations of
# a module.
with_fault() {
    timeout 240 env HSTEP_FAULT="$1" LD_PRELOAD=libfaults.so LD_LIBRARY_PATH="$build_dir/tests" "$halfstep" "${@:2}" 2>err
}
faults() {
    rm -f calls
    HSTEP_FAULT_LOG=calls with_fault MEMORY:ENOMEM:1000000:"$1" "${@:2}" >whole || bad "$* fails without a fault: $(head -c 300 err)"
    count=$(awk -v who="$1" '$3 == who && $2 ~ /alloc|memalign|strdup|mmap/ { n++ } END { print n + 0 }' calls)
    [ "$count" -gt 10 ] || bad "$*: only $count allocations of $1 can fail"
}
[ -e "$build_dir/tests/libfaults.so" ] || skip "$build_dir/tests/libfaults.so is not built"

# ---- Memory ----

# Printed JSON is whole, or the exit status is not 0.
json_without_memory() {
    lm --steps 2 --checkpoint run >out
    for library in jansson ours; do
        faults "$library" inspect run --json
        for ((at = 1; at <= count; at += 7)); do
            got=0
            with_fault MEMORY:ENOMEM:$at:$library inspect run --json >some || got=$?
            [ $got = 1 ] || { [ $got = 0 ] && cmp -s some whole; } || bad "allocation $at of $library: exit $got, other output"
        done
    done
}

# A save without memory leaves the earlier checkpoint. A save that succeeds loads and goes on to the same bits.
saves_without_memory() {
    lm --steps 3 --checkpoint start >out
    lm --steps 6 --json >reference.json
    for library in ours jansson; do
        rm -rf run && cp -r start run
        faults "$library" train lm --resume --checkpoint run --steps 4 --quiet --json
        for ((at = 1; at <= count; at += 11)); do
            rm -rf run && cp -r start run
            got=0
            with_fault MEMORY:ENOMEM:$at:$library train lm --resume --checkpoint run --steps 4 --quiet --json >out || got=$?
            [ $got -le 1 ] || bad "allocation $at of $library: exit $got: $(head -c 300 err)"
            step=$(step_of run) || bad "allocation $at of $library: exit $got, and no checkpoint"
            [ $got = 1 ] || [ "$step" = 4 ] || bad "allocation $at of $library: exit 0, but step $step was saved"
            resume --checkpoint run --steps 6 --json >rest.json || bad "allocation $at of $library: exit $got, and no way back"
            [ "$(value rest.json state_hash)" = "$(value reference.json state_hash)" ] ||
                bad "allocation $at of $library: exit $got, and other bits"
        done
    done
}

# Lack of memory is reported in one sentence. It is neither a crash nor a usage error. If one run of a comparison lacks
# it, the other goes on.
no_memory_is_no_usage() {
    local alone=0
    words=(compare lm "${small[@]:2}" --steps 1 --recipes "adamw/f32,adamw/bf16:beta1=0.8" --out report)
    faults ours "${words[@]}"
    for ((at = 1; at <= count; at += 5)); do
        got=0
        with_fault MEMORY:ENOMEM:$at:ours "${words[@]}" >out || got=$?
        [ $got -le 1 ] || bad "allocation $at: exit $got: $(head -c 300 err)"
        ! grep -q -e --help err || bad "allocation $at: $(head -c 300 err)"
        ! grep -q ': 1 of 2 runs failed; .*: out of memory' err || alone=$((alone + 1))
        ! grep -q 'runs failed' err || [ $got = 1 ] || bad "allocation $at: a run failed, and status $got"
    done
    [ $alone -gt 3 ] || bad "one run went on without the other $alone times"
}

no_address_space() {
    local got=0 refusals=0
    for kilobytes in $(seq 46000 1500 90000); do
        for threads in 1 2; do
            got=0
            (ulimit -v "$kilobytes" && exec "$halfstep" "${small[@]}" --steps 2 --threads $threads) >out 2>err || got=$?
            # 127: the loader itself had no room.
            [ $got -le 1 ] || [ $got = 127 ] || bad "ulimit -v $kilobytes, $threads threads: exit $got: $(head -c 300 err)"
            [ $got != 1 ] || refusals=$((refusals + 1))
        done
    done
    [ $refusals -gt 5 ] || bad "only $refusals limits were too low"
} 2>/dev/null

# The sentence names the limit that the activations meet, whether they alone are more or the process has some already.
the_limit_of_memory_is_named() {
    local got needs kilobytes=200000
    for _ in 1 2; do
        got=0
        (ulimit -v $kilobytes && exec "$halfstep" "${small[@]}" --width 64 --context 512 --batch 256 --steps 2) >out 2>err || got=$?
        [ $got = 1 ] && [ "$(wc -l <err)" = 1 ] || bad "ulimit -v $kilobytes: exit $got: $(head -c 300 err)"
        needs=$(sed -nE 's/.* needs ([0-9.]+) GiB of activations; .*/\1/p' err)
        awk -v a="$(sed -nE 's/.* may have ([0-9.]+) GiB in all \(ulimit -v\); choose a smaller batch .*/\1/p' err)" \
            -v b=$kilobytes 'BEGIN { b /= 1048576; exit !(a > 0.99 * b && a < 1.01 * b) }' || bad "$kilobytes: $(cat err)"
        kilobytes=$(awk -v n="$needs" 'BEGIN { printf "%d", n * 1048576 * 1.005 }')
    done
}

# ---- Odd file systems ----

# Modes, links and syncs of folders are polish. Without them everything is saved, and only the links get a note.
without_polish() {
    polished() { with_fault POLISH "$@"; }
    mkdir run report
    polished "${small[@]}" --steps 6 --checkpoint run --checkpoint-every 2 --log log.csv >out || bad "train: $(cat err)"
    ! grep -v '^note: the checkpoint is saved, but .*cannot make a link' err || bad "train says this"
    polished train lm --resume --quiet --checkpoint run --steps 8 >out || bad "resume: $(cat err)"
    [ "$(step_of run)" = 8 ] || bad "step $(step_of run)"
    for _ in 1 2; do
        polished compare lm "${small[@]:2}" --steps 1 --recipes adamw/f32,adamw/bf16 --out report --checkpoint report/runs >out ||
            bad "compare: $(cat err)"
        rm -r report/runs
    done
    polished convert run model.safetensors --to f32 >out || bad "convert: $(cat err)"
}

# An output that is a link is written where it leads to. A folder is not made through a link, which is said.
links_as_outputs() {
    mkdir far
    for name in model.safetensors log.csv; do ln -s far/$name $name; done
    ln -s far/later later
    ln -s nowhere/file astray
    lm --steps 2 --checkpoint run --log log.csv >out || bad "$(cat err)"
    "$halfstep" convert run model.safetensors --to f32 >out 2>err || bad "convert: $(cat err)"
    for name in model.safetensors log.csv; do [ -L $name ] && [ -s far/$name ] || bad "$name does not lie behind its link"; done
    refused 1 'later: it is a link to far/later, which does not exist' "${small[@]}" --steps 2 --checkpoint later
    refused 1 'later: it is a link to far/later, which does not exist' \
        compare lm "${small[@]:2}" --steps 1 --recipes adamw/f32,adamw/bf16 --out later
    refused 1 'astray: it is a link to nowhere/file, which does not exist' convert run astray --to f32
    refused 1 'astray: it is a link to nowhere/file, which does not exist' "${small[@]}" --steps 2 --log astray
    [ "$(ls far)" = "$(printf 'log.csv\nmodel.safetensors')" ] || bad "left: $(ls far)"
}

# A limit of file sizes is an error like a full disk: a sentence, the files as they were, and nothing left over.
limit_of_file_sizes() {
    limited() {
        local got=0
        (ulimit -c 0 && ulimit -f 8 && exec timeout 240 "$halfstep" "$@") >out 2>err </dev/null || got=$?
        [ $got = 1 ] || bad "$*: exit $got: $(head -c 300 err)"
        [ "$(grep -cv '^warning: ' err)" = 1 ] && grep -q '^halfstep: .*File too large$' err || bad "$*: $(head -c 300 err)"
        find . -mindepth 1 | sort | diff - ../limit_before || bad "$*: left something behind"
    }
    "$halfstep" "${small[@]}" --width 32 --steps 3 --checkpoint run >out 2>err || bad "$(cat err)"
    touch out err
    find . -mindepth 1 | sort >../limit_before
    limited train lm --resume --quiet --checkpoint run --steps 4
    [ "$(step_of run)" = 3 ] || bad "step $(step_of run)"
    limited "${small[@]}" --width 32 --steps 4 --checkpoint other --checkpoint-every 2
    limited convert run model.safetensors --to f32
}

# ---- Two runs ----

one_run_in_a_directory() {
    "$halfstep" "${small[@]}" --steps 1000000 --checkpoint run --checkpoint-every 100 >out1 2>err1 &
    first=$!
    trap 'kill -KILL $first 2>/dev/null || true' EXIT
    wait_for '[ -e run/manifest.json ]'
    refused 1 "run: another run is training there: process $first on" train lm --checkpoint run --resume --steps 2000000
    refused 1 "run: another run is training there: process $first on" "${small[@]}" --checkpoint run
    kill -TERM $first
    got=0
    wait $first || got=$?
    [ $got = 143 ] || bad "the first run: exit $got: $(head -c 300 err1)"
    "$halfstep" inspect run >out || bad "the checkpoint of the first run is gone"
    [ -z "$(find run -name '.*lock*')" ] || bad "a run that has ended left its lock: $(ls -A run)"
}

a_dead_run_is_no_obstacle() {
    "$halfstep" "${small[@]}" --steps 1000000 --checkpoint run --checkpoint-every 100 >out1 2>err1 &
    first=$!
    wait_for '[ -e run/manifest.json ]'
    kill -KILL $first
    wait $first 2>/dev/null || true
    [ -n "$(find run -name '.*lock*')" ] || bad "the run had no lock"
    step=$(step_of run)
    resume --checkpoint run --steps $((step + 2)) >out 2>err || bad "$(cat err)"
    [ "$(step_of run)" = $((step + 2)) ] || bad "step $(step_of run)"
}

one_run_for_a_log() {
    "$halfstep" "${small[@]}" --steps 1000000 --log log.csv >out1 2>err1 &
    first=$!
    trap 'kill -KILL $first 2>/dev/null || true' EXIT
    wait_for '[ -s log.csv ] && [ $(wc -l <log.csv) -gt 3 ]'
    refused 1 'log.csv: another run is writing to it' "${small[@]}" --steps 3 --log log.csv
    [ "$(sed -n 2p log.csv | cut -d, -f1)" = 1 ] && [ "$(wc -l <log.csv)" -gt 3 ] || bad "the log of the first run is damaged"
}

# ---- What was there before ----

# A directory without its manifest.json is not empty. A new run must not prune it, and the old run can be continued. A kill
# of the first save may leave one checkpoint so, which is resumed as if the pointer were there.
a_lost_pointer_loses_nothing() {
    lm --steps 20 --checkpoint first >out
    rm first/manifest.json
    refused 1 'first already holds a checkpoint of step 20' "${small[@]}" --steps 3 --checkpoint first
    resume --checkpoint first --steps 24 --json >first.json 2>err || bad "$(cat err)"
    lm --steps 24 --json >whole.json
    [ "$(value first.json state_hash)" = "$(value whole.json state_hash)" ] || bad "other bits"
    lm --steps 20 --checkpoint run --checkpoint-every 10 >out
    rm run/manifest.json
    lost='run: there is no manifest.json; there is another checkpoint: run/checkpoint-20'
    refused 1 "$lost" train lm --checkpoint run --resume
    refused 1 "$lost" "${small[@]}" --steps 3 --checkpoint run
    "$halfstep" inspect run/checkpoint-20 >out || bad "checkpoint-20 is gone"
    resume --checkpoint run/checkpoint-20 --steps 24 --json >rest.json 2>err || bad "$(cat err)"
    [ "$(value rest.json state_hash)" = "$(value whole.json state_hash)" ] || bad "other bits"
    [ "$(step_of run)" = 24 ] || bad "step $(step_of run)"
    "$halfstep" inspect run/checkpoint-20 >out || bad "checkpoint-20 was removed by a save"
    grep -q 'removes none' err || bad "nothing was said of what stays: $(head -c 300 err)"
}

# Another program may save into the directory meanwhile. Its checkpoint is still there afterwards.
checkpoints_of_others_stay() {
    lm --steps 7 --checkpoint other >out
    "$halfstep" "${small[@]}" --steps 1000000 --checkpoint run --checkpoint-every 1000 >out1 2>err1 &
    first=$!
    trap 'kill -KILL $first 2>/dev/null || true' EXIT
    wait_for '[ -e run/manifest.json ]'
    # This happens between two saves of the run.
    until kill -STOP $first && [ -z "$(find run -name '.halfstep-tmp*')" ]; do
        kill -CONT $first
        sleep 0.05
    done
    rm -rf run/checkpoint-* && cp -r other/checkpoint-7 run/ && cp other/manifest.json run/
    kill -CONT $first
    wait_for '[ "$(step_of run 2>/dev/null || echo 7)" != 7 ]'
    kill -TERM $first
    wait $first || true
    "$halfstep" inspect run/checkpoint-7 >out || bad "the other checkpoint is gone: $(ls run)"
    [ "$(step_of run)" -gt 7 ] || bad "the run has saved nothing more"
    [ "$(grep -c 'removes none' err1)" = 1 ] || bad "not told once: $(head -c 300 err1)"
}

files_in_the_way_stay() {
    mkdir run
    echo mine >run/config.json
    refused 1 'run/config.json is in the way' "${small[@]}" --steps 2 --checkpoint run
    [ "$(cat run/config.json)" = mine ] || bad "it was replaced"
    echo "to be, or not to be" >book.txt
    refused 1 'book.txt: the file exists and is not a log' "${small[@]}" --steps 2 --log book.txt
    [ "$(cat book.txt)" = "to be, or not to be" ] || bad "the book was overwritten"
    lm --steps 2 --log log.csv >out && lm --steps 2 --log log.csv >out || bad "a log cannot be written again"
}

make_digits() {
    python3 - <<'PY'
import os, struct
os.mkdir("digits")
for name, n in ("train", 60), ("t10k", 20):
    open(f"digits/{name}-images-idx3-ubyte", "wb").write(struct.pack(">IIII", 0x803, n, 28, 28) + bytes(784 * n))
    open(f"digits/{name}-labels-idx1-ubyte", "wb").write(struct.pack(">II", 0x801, n) + bytes(i % 10 for i in range(n)))
PY
}

outputs_are_no_inputs() {
    head -c 20000 "$data" >d.txt
    cp d.txt v.txt
    cp d.txt saved.txt
    ln d.txt hard.txt
    ln -s d.txt soft.txt
    local run=("${small[@]}" --data d.txt --val v.txt --steps 2)
    for log in d.txt ./d.txt hard.txt soft.txt "$PWD/d.txt"; do
        refused 2 '--log would overwrite .*, which is --data' "${run[@]}" --log "$log"
    done
    refused 2 '--log would overwrite v.txt, which is --val' "${run[@]}" --log v.txt
    lm --steps 2 --checkpoint base >out
    refused 2 '--log would overwrite base/config.json, a file of --init' "${run[@]}" --init base --log base/config.json
    refused 2 '--log would overwrite .*, a file of --init' "${run[@]}" --init base --log base/checkpoint-2/trainer.json
    refused 2 '--log would overwrite base/trainer.json' train lm --resume --checkpoint base --steps 4 --log base/trainer.json
    refused 2 '--log and --checkpoint are the same file' "${run[@]}" --checkpoint new --log new/manifest.json
    [ ! -e new ] || bad "a refused run left its directory"
    make_digits
    mkdir out1 && ln -s ../d.txt out1/report.html && cp d.txt out1/runs.csv
    local two=(compare lm "${small[@]:2}" --steps 1 --recipes adamw/f32,adamw/bf16 --out out1)
    refused 2 '--out would overwrite out1/report.html, which is --data' "${two[@]}" --data d.txt
    refused 2 '--out would overwrite out1/runs.csv, which is --val' "${two[@]}" --data v.txt --val out1/runs.csv
    refused 2 '--out would overwrite out1/report.html, which is --data' demo --data d.txt --out out1
    ln d.txt x-adamw-bf16-bf16-sr-seed1.csv
    refused 2 '--log would overwrite' compare lm "${small[@]:2}" --data d.txt --steps 1 --recipes adamw/f32,adamw/bf16 --log x.csv
    # File names do not contain this sign.
    refused 2 'would write the same files' compare lm "${small[@]:2}" --steps 1 --recipes adamw/f32@1e-3,adamw/f32@1e+3 --log y.csv
    refused 2 '--log would overwrite digits/t10k-labels-idx1-ubyte, a file of --data' train mnist --data digits --log \
        digits/t10k-labels-idx1-ubyte
    for file in d.txt hard.txt soft.txt out1/runs.csv v.txt; do
        cmp -s $file saved.txt || bad "$file has changed"
    done
}

# ---- Told ----

# A folder has the name of a link. Each save succeeds with the same note.
notes_of_saves_are_told_once() {
    lm --steps 3 --checkpoint run >out
    rm run/config.json
    mkdir run/config.json
    resume --checkpoint run --steps 9 --checkpoint-every 2 --json >rest.json 2>err || bad "$(cat err)"
    [ "$(grep -c '^note: the checkpoint is saved, but .*config.json' err)" = 1 ] || bad "not told once: $(head -c 300 err)"
    python3 -c 'import json
notes = json.load(open("rest.json"))["notes"]
assert len(notes) == 1 and notes[0].startswith("note: the checkpoint is saved, but"), notes' || bad "not in the JSON"
}

# ---- The log ----

a_log_that_cannot_be_read_is_kept() {
    lm --steps 20 --log log.csv --checkpoint run >out
    cp log.csv before.csv
    for line in 1 2 12; do
        got=0
        with_fault fgets:EIO:$line train lm --resume --quiet --checkpoint run --steps 24 >out || got=$?
        [ $got = 1 ] && grep -q 'log.csv: Input/output error' err || bad "line $line: exit $got: $(head -c 300 err)"
        cmp -s log.csv before.csv || bad "line $line: $(wc -l <log.csv) of 21 lines are left"
    done
    resume --checkpoint run --steps 24 >out && [ "$(wc -l <log.csv)" = 25 ] || bad "the log does not go on"
}

closed_streams_stay_out_of_files() {
    "$halfstep" "${small[@]:0:${#small[@]}-1}" --steps 6 --log log.csv 2>&- >out || bad "exit $?"
    [ "$(cut -d, -f1 log.csv | paste -sd,)" = step,1,2,3,4,5,6 ] || bad "the log: $(cat log.csv)"
    "$halfstep" "${small[@]:0:${#small[@]}-1}" --steps 6 --log log.csv --checkpoint run <&- 2>&- >out || bad "exit $?"
    "$halfstep" inspect run >out || bad "no sound checkpoint"
    ! "$halfstep" info >&- 2>err || bad "results for a closed stdout end as success"
}

# ---- Signals ----

# start WORDS...: starts a long run in the background and waits for its first steps.
start() {
    "$@" "${small[@]:0:${#small[@]}-1}" --steps 1000000 --val-every 3 --checkpoint run --log log.csv >out1 2>err1 &
    first=$!
    trap 'kill -KILL $first 2>/dev/null || true' EXIT
    wait_for '[ -e log.csv ] && [ $(wc -l <log.csv) -gt 3 ]'
}

# A terminal that closes, and batch systems, send these. The kernel repeats SIGXCPU each second, and a batch system may
# add SIGTERM. Neither ends a save.
signals_that_warn_save() {
    for signal in HUP:129 USR1:138 USR2:140 XCPU:152; do
        rm -rf run log.csv
        start "$halfstep"
        kill -${signal%:*} $first
        kill -${signal%:*} $first 2>/dev/null || true
        [ $signal != USR1:138 ] || kill -TERM $first 2>/dev/null || true
        got=0
        wait $first || got=$?
        [ $got = ${signal#*:} ] || bad "$signal: exit $got: $(tail -1 err1)"
        grep -q 'saved in run' err1 && "$halfstep" inspect run >out || bad "$signal: not saved: $(tail -1 err1)"
    done
}

nohup_outlives_the_terminal() {
    start bash -c 'trap "" HUP; exec "$0" "$@"' "$halfstep"
    kill -HUP $first
    lines=$(wc -l <log.csv)
    wait_for '[ $(wc -l <log.csv) -gt $((lines + 50)) ]'
    kill -TERM $first
    got=0
    wait $first || got=$?
    [ $got = 143 ] || bad "exit $got: $(tail -1 err1)"
}

a_closed_pipe_saves() {
    python3 - "$halfstep" "${small[@]:0:${#small[@]}-1}" --steps 1000000 --val-every 3 --checkpoint run <<'PY' || exit 1
import subprocess, sys, signal
run = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                       preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL))
run.stderr.readline()
run.stderr.close()
status = run.wait(timeout=60)
if status != 128 + signal.SIGPIPE:
    sys.exit(f"     exit {status}")
PY
    "$halfstep" inspect run >out || bad "not saved"
}

# Nothing is to be saved while a pipe waits for its other end, so a signal ends the program.
a_signal_ends_waiting_for_a_pipe() {
    mkfifo pipe
    for words in "train lm --log pipe" "compare lm --out report --val pipe"; do
        # shellcheck disable=SC2086
        "$halfstep" ${words%% --*} "${small[@]:2}" --steps 3 ${words#* lm} >out 2>err &
        first=$!
        trap 'kill -KILL $first 2>/dev/null || true' EXIT
        sleep 1
        kill -TERM $first
        for _ in $(seq 100); do
            kill -0 $first 2>/dev/null || continue 2
            sleep 0.05
        done
        bad "$words: still waiting"
    done
}

# ---- Numbers ----

long_numbers_are_read_to_the_end() {
    zeros=$(printf '0%.0s' $(seq 300))
    lm --steps 4 --beta1 0.8 --json >short.json
    lm --steps 4 --beta1 "${zeros}0.8" --json --checkpoint run >long.json
    [ "$(value short.json state_hash)" = "$(value long.json state_hash)" ] || bad "it was cut"
    resume --checkpoint run --steps 6 --json >long.json || bad "it cannot be resumed"
    lm --steps 6 --beta1 0.8 --json >short.json
    [ "$(value short.json state_hash)" = "$(value long.json state_hash)" ] || bad "it was cut in the checkpoint"
    timeout 240 "$halfstep" compare lm "${small[@]:2}" --steps 2 --recipes "adamw/f32@1e-3,adamw/f32@${zeros}1e-2" --out report \
        --json >long.json || bad "compare: exit $?"
    python3 -c 'import json; a, b = json.load(open("long.json"))["runs"]; assert a["state_hash"] != b["state_hash"]' ||
        bad "a learning rate was cut"
}

names_that_json_cannot_hold() {
    head -c 20000 "$data" >$'d\xe9.txt'
    refused 2 '--data .* a checkpoint can only keep it as UTF-8' "${small[@]}" --data $'d\xe9.txt' --steps 2 --checkpoint run
    [ ! -e run ] || bad "it left its directory"
    lm --data $'d\xe9.txt' --steps 2 --json >out.json && python3 -m json.tool out.json >/dev/null || bad "without a checkpoint"
}

# ---- All of them ----

names=("$@")
[ $# -gt 0 ] || mapfile -t names < <(sed -nE 's/^([a-z_0-9]+)\(\) \{$/\1/p' "$source_dir/tests/program/nothing_lost_test.sh" |
    grep -vxE 'bad|refused|wait_for|with_fault|faults|start|make_digits')
passed=0
failed=0
for name in "${names[@]}"; do
    rm -rf "$scratch/$name"
    mkdir "$scratch/$name"
    got=0
    (cd "$scratch/$name" && "$name") || got=$?
    if [ $got = 0 ]; then
        echo "ok   $name"
        passed=$((passed + 1))
    else
        echo "FAIL $name"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ $passed -gt 0 ] && [ $failed = 0 ] || fail "$failed tests"
