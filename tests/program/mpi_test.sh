#!/bin/bash
# Tests `train lm` under mpirun. Any number of ranks has the weights, states, log and checkpoint of one process. Ranks
# that die, or that do not belong together, are named. A checkpoint goes on with any number of ranks. `mpi_test.sh all`
# takes every recipe on 1 to 4 ranks and kills more of them. `mpi_test.sh long [KILLS]` (make faults) does so on longer
# text, with 50 kills.
# (make test-all runs "tests/program/mpi_test.sh all" too.)
. "$(dirname "$0")/../tools/lib.sh"
need mpirun flock pgrep
# mpirun itself dies of SIGPIPE if a rank has ended before mpirun writes to it.
trap '' PIPE
[ -e "$build_dir/libhalfstep_mpi.so" ] || skip "this build found no MPI"
make_scratch
mode=${1:-short} kills=${2:-}
text=$source_dir/data/demo.txt
[ "$mode" != long ] || text=${HALFSTEP_TEXT:-$text}
# Its path has no blanks there.
data=$scratch/demo.txt
cp "$text" "$data"
cp "$build_dir/halfstep" "$scratch/"
cd "$scratch"
# mpirun takes a blank in a path for its end.
program=./halfstep
export LD_LIBRARY_PATH=$build_dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

. "$source_dir/tests/program/mpi.sh"

ranks() { timeout 300 mpirun -n "$1" "$program" train lm "${@:2}"; }
field() { sed -nE "s/^ *\"$1\": \"?([^\",]*)\"?,?$/\1/p" "$2" | head -1; }
hash_of() { field state_hash "$1"; }
# Prints a log without the columns that depend on the clock.
untimed() { cut -d, -f 1-5,8 "$1"; }
same() { [ "$2" = "$3" ] && [ -n "$2" ] || fail "$1: $2, not $3"; }
step_of() { "$program" inspect "$1" 2>/dev/null | sed -nE 's/^step ([0-9]+),.*/\1/p' | head -1; }

small="--width 64 --depth 2 --context 64 --batch 2 --val-every 5 --eval-batches 5 --sample-bytes 40 --quiet --json"
steps=10
[ "$mode" != long ] || { small="--width 128 --depth 3 --batch 4 --val-every 20 --eval-batches 5 --sample-bytes 40 --quiet --json" steps=60; }

# ---- Any number of ranks -------------------------------------------------------------------------------------------------------------

# compare RANKS RECIPE ARGUMENT...: the run on each of these numbers of ranks is that of one process. No number of ranks but 1 divides the
# 7 micro-steps. Without MPI the tree has to be asked for.
compare() {
    local numbers=$1 recipe=$2 name n
    [ "$mode" = short ] || numbers="1 2 3 4"
    name=$(tr / - <<<"$recipe")
    shift 2
    set -- --data "$data" --recipe "$recipe" --steps $steps --micro-steps 7 $small "$@"
    "$program" train lm "$@" --accumulator tree --log "$name-0.csv" --checkpoint "$name-0" >"$name-0.json" || fail "$recipe alone"
    for n in $numbers; do
        ranks $n "$@" --log "$name-$n.csv" --checkpoint "$name-$n" >"$name-$n.json" || fail "$recipe on $n ranks"
        same "$recipe, ranks of the result" "$(field ranks "$name-$n.json")" $n
        same "$recipe, hash of $n ranks" "$(hash_of "$name-$n.json")" "$(hash_of "$name-0.json")"
        same "$recipe, sample of $n ranks" "$(grep -a '"sample":' "$name-$n.json")" "$(grep -a '"sample":' "$name-0.json")"
        cmp <(untimed "$name-$n.csv") <(untimed "$name-0.csv") || fail "$recipe: another log on $n ranks"
        for file in model.safetensors optimizer.safetensors config.json; do
            cmp "$name-$n/$file" "$name-0/$file" || fail "$recipe: another $file on $n ranks"
        done
    done
    same "$recipe, rows of the log" "$(wc -l <"$name-$n.csv")" $((steps + 1))
    echo "ok   $recipe: the bits of one process on $numbers ranks: $(hash_of "$name-0.json")"
}
compare 2 adamw/bf16-sr/int8 --weight-decay 0.1
compare "1 3" lamb/f32/f32 --clip 1
compare 4 muon/bf16-sr/int8
# Averages are gathered before they are evaluated. Factors over rows and columns stay with their matrix.
compare 3 schedulefree/int8-ecc4/int8
if [ "$mode" = long ]; then
    for recipe in adafactor/bf16-sr came/bf16-kahan prodigy/f32 adamw/bf16-sr/int4 adamw/bf16-sr/fp8-lamb16 lamb16 adan/f16-ecc16/dyn8; do compare 3 $recipe; done
fi

# Each rank holds its share of the states.
whole=$(sed -nE 's/^ *"states": ([0-9.]*),?$/\1/p' lamb-f32-f32-1.json) third=$(sed -nE 's/^ *"states": ([0-9.]*),?$/\1/p' lamb-f32-f32-3.json)
awk "BEGIN { exit !($third < 0.4 * $whole && $third > 0.25 * $whole) }" || fail "one of 3 ranks holds $third of $whole bytes a parameter in states"
echo "ok   states: $third of $whole bytes a parameter on the first of 3 ranks"

# The same holds for a program that uses the library.
if command -v mpicc >/dev/null; then
    mpicc -std=c11 -O2 -I"$source_dir/include" "$source_dir/examples/mpi.c" -o example -L"$build_dir" -lhalfstep -lm || fail "examples/mpi.c does not compile"
    for n in 1 2 3 5; do timeout 240 mpirun -n $n ./example >"example-$n" || fail "examples/mpi.c on $n ranks"; done
    for n in 2 3 5; do same "examples/mpi.c on $n ranks" "$(cat example-$n)" "$(cat example-1)"; done
    echo "ok   examples/mpi.c: $(cat example-1)"
fi

# ---- Resuming on another number -------------------------------------------------------------------------------------------------------

resumable="--data $data --recipe adamw/bf16-sr/int8 --micro-steps 6 $small"
ranks 2 $resumable --steps 4 --checkpoint moved >moved.json || fail "a run to be resumed"
ranks 3 --checkpoint moved --resume --steps 6 --quiet --json >moved.json || fail "2 ranks do not go on as 3"
"$program" train lm --checkpoint moved --resume --steps 8 --quiet --json >moved.json || fail "3 ranks do not go on as one process"
ranks 1 --checkpoint moved --resume --steps 9 --quiet --json >moved.json || fail "one process does not go on as one rank"
ranks 4 --checkpoint moved --resume --steps 10 --quiet --json >moved.json || fail "one rank does not go on as 4"
"$program" train lm $resumable --accumulator tree --steps 10 --checkpoint still >still.json || fail "a run that is not resumed"
same "hash after 2, 3, no, 1 and 4 ranks" "$(hash_of moved.json)" "$(hash_of still.json)"
cmp moved/optimizer.safetensors still/optimizer.safetensors || fail "resuming on other ranks left another checkpoint"
echo "ok   2 -> 3 -> without MPI -> 1 -> 4 ranks: the bits of a run that went through"

# ---- What is refused at the start -----------------------------------------------------------------------------------------------------

# refused STATUS TEXT MPIRUN-ARGUMENTS...
# mpirun need not wait for the remaining ranks.
refused() {
    local -x OMPI_MCA_odls_base_sigkill_timeout=0
    local status=$1 text=$2 got=0
    shift 2
    timeout 240 mpirun "$@" >refused.out 2>refused.err || got=$?
    [ "$got" = "$status" ] && grep -qF -- "$text" refused.err || { cat refused.err; fail "expected status $status and \"$text\", got $got"; }
    same "lines of that error" "$(grep -c '^halfstep:' refused.err)" 1
}
run="$program train lm $resumable --steps 3"
refused 2 "rank 2 of 3 was started with another --lr: 0.002, not 0.001 as rank 0" -n 2 $run : -n 1 $run --lr 0.002
head -c 100000 "$data" >other.txt
refused 2 "rank 1 of 2 was started with another data:" -n 1 $run : -n 1 $run --data other.txt
refused 1 "rank 1 of 2: nowhere.txt: No such file" -n 1 $run : -n 1 $run --data nowhere.txt
cp halfstep another
printf x >>another
refused 2 "rank 1 of 2 was started with another build:" -n 1 $run : -n 1 ./another train lm $resumable --steps 3
refused 2 "unknown option --step-size" -n 1 $run : -n 1 $run --step-size 3
refused 2 "--micro-steps 2 cannot be shared out among 3 processes" -n 3 $run --micro-steps 2
refused 2 "--release:" -n 2 $run --release
mkdir held
exec 9>held/.halfstep-train.lock
flock -n 9
refused 1 "rank 0 of 2: held: another run is training there" -n 2 $run --checkpoint held
exec 9>&-
# The data may lie elsewhere on another machine.
cp "$data" copy.txt
timeout 240 mpirun -n 1 $run : -n 1 ${run/"$data"/copy.txt} >copy.json || fail "the same data under another name"
mkdir parts
head -c 1000 "$data" >parts/1
tail -c +1001 "$data" | gzip >parts/2.gz
timeout 240 mpirun -n 1 $run : -n 1 ${run/"$data"/parts} >parts.json || fail "the same data in a folder"
same "hash of the data in a folder" "$(hash_of parts.json)" "$(hash_of copy.json)"
# A weight that explodes is the same error on all ranks. Only the first rank prints the line. The decay multiplies every weight by a
# million, because a model whose rate alone is too high may end with gradients of zero.
exploding="--recipe sgd/f32 --lr 1e6 --weight-decay 1 --steps 60" got=0
"$program" train lm $resumable $exploding --accumulator tree >bad.out 2>bad.err || got=$?
refused $got "$(tail -1 bad.err)" -n 3 $run $exploding
[ "$got" = 1 ] && grep -q "20 steps in a row" bad.err || { cat bad.err; fail "weights did not explode"; }
echo "ok   ranks with other options, data or builds, and what several cannot do, are named at the start"

# started STATUS TEXT VARIABLE=VALUE...: the program has these variables of a launcher, which is none of this MPI.
started() {
    local got=0
    env "${@:3}" timeout 240 ${command:-$run} >started.out 2>started.err || got=$?
    [ "$got" = "$1" ] && { [ -z "$2" ] || grep -qF -- "$2" started.err; } || { cat started.err; fail "${*:3}: expected status $1 and \"$2\", got $got"; }
}
started 1 "PMI_SIZE is 3, but MPI finds one process" PMI_RANK=0 PMI_SIZE=3
started 1 "PMIX_RANK is 2, but MPI finds one process" PMIX_RANK=2
started 1 "SLURM_STEP_NUM_TASKS is 2, but MPI finds" SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2
started 1 "SLURM_PROCID is 1, but MPI finds one process" SLURM_PROCID=1 SLURM_NTASKS=2
for command in "$program train mnist --epochs 1" "$program compare lm --data $data --recipes adamw/f32"; do
    started 1 "PMI_SIZE is 3, and this command runs in one process" PMI_RANK=0 PMI_SIZE=3
done
# Each by itself, a batch script, a shell of salloc, and srun of one task.
command="$run --steps 1"
started 0 "" HALFSTEP_MPI=0 PMI_RANK=1 PMI_SIZE=3
started 0 "" SLURM_PROCID=0 SLURM_NTASKS=8
started 0 "" SLURM_NTASKS=8
started 0 "" SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1
echo "ok   processes of the launcher of another MPI do not each train the run"

# ---- Signals and deaths ---------------------------------------------------------------------------------------------------------------

lasting="--data $data --recipe adamw/bf16-sr/int8 --micro-steps 6 $small --val-every 0"
# start N ARGUMENTS...: starts mpirun in the background. The ranks are its children.
start() {
    mpirun -n "$1" "$program" train lm "${@:2}" >job.out 2>job.err &
    job=$!
}
# finish WHAT: waits for the job, at most four minutes, and sets `ended` to its status. mpirun may wait for itself when all ranks have
# ended: if one dies while it connects, Open MPI 4.1 waits in pmix_rte_finalize() for a lock in freed memory. Such an mpirun is killed,
# but not while it may still sleep between SIGTERM and SIGKILL.
finish() {
    local began=$SECONDS seen=$SECONDS patience=$((20 + ${OMPI_MCA_odls_base_sigkill_timeout:-1}))
    while kill -0 "$job" 2>/dev/null; do
        [ $((SECONDS - began)) -lt 240 ] || { kill -9 "$job"; fail "the job did not end within four minutes of $1"; }
        ! ps -o stat= --ppid "$job" | grep -qv '^Z' || seen=$SECONDS
        [ $((SECONDS - seen)) -lt $patience ] || kill -9 "$job"
        sleep 0.1
    done
    ended=0
    wait "$job" || ended=$?
}
# a_rank: prints a rank that runs the program already. mpirun never ends if its child dies before that.
a_rank() { pgrep -P "$job" -x halfstep | shuf -n 1; }
saved() {
    for _ in $(seq 2400); do
        [ ! -e "$1/manifest.json" ] || return 0
        kill -0 "$job" 2>/dev/null || { cat job.err; fail "the job has ended by itself"; }
        sleep 0.1
    done
    fail "nothing was saved in four minutes"
}

for whom in $([ "$mode" = short ] || echo job) rank; do
    rm -rf told
    # mpirun waits this long between SIGTERM and SIGKILL. It also waits this long whenever a rank fails.
    [ $whom = rank ] || export OMPI_MCA_odls_base_sigkill_timeout=15
    start 3 $lasting --steps 1000000 --checkpoint told --checkpoint-every 4
    saved told
    if [ $whom = job ]; then kill -TERM "$job"; else kill -TERM "$(a_rank)"; fi
    finish "SIGTERM"
    unset OMPI_MCA_odls_base_sigkill_timeout
    # mpirun has its own status for a signal that it received.
    same "status after SIGTERM to the $whom" $ended "$([ $whom = rank ] && echo 143 || echo 1)"
    same "lines after SIGTERM to the $whom" "$(grep -c '^halfstep:.*interrupted after step .*; saved in told' job.err)" 1
    step=$(sed -nE 's/.*interrupted after step ([0-9]+);.*/\1/p' job.err)
    same "saved step" "$(step_of told)" "$step"
done
"$program" train lm $lasting --accumulator tree --steps $((step + 3)) >straight.json
ranks 2 --checkpoint told --resume --steps $((step + 3)) --quiet --json >resumed.json || fail "what a signal saved does not go on"
same "hash after SIGTERM" "$(hash_of resumed.json)" "$(hash_of straight.json)"
echo "ok   SIGTERM, to mpirun or to one rank, saves once, at one step"

# Kills one run and resumes it on changing numbers of ranks, until there were enough kills.
if [ -z "$kills" ]; then kills=$(case $mode in short) echo 1 ;; all) echo 3 ;; *) echo 50 ;; esac); fi
# Ranks start late on a busy machine. The kills then come later, until one run has saved something.
# mpirun forgets to name a rank if it sees the closed connection before the death.
deaths=0 between=0 longest=0 named=0
while [ $deaths -lt "$kills" ] || [ ! -e killed/manifest.json ] || [ $((named * 2)) -lt $deaths ]; do
    [ $deaths -lt $((kills + 20)) ] || fail "no run came as far as a checkpoint, or $named of $deaths deaths were named"
    n=$((2 + deaths % 3))
    if [ -e killed/manifest.json ]; then start $n --checkpoint killed --resume --steps 1000000 --quiet --json
    else start $n $lasting --steps 1000000 --checkpoint killed --checkpoint-every 2; fi
    # The delays reach from the start of the program to some steps behind it.
    sleep "$(awk "BEGIN { srand($RANDOM); print rand() * (1.6 + ($deaths > $kills) * ($deaths - $kills)) }")"
    left=600
    until victim=$(a_rank) && [ -n "$victim" ] && kill -KILL "$victim" 2>/dev/null; do
        left=$((left - 1))
        [ $left -gt 0 ] && kill -0 "$job" 2>/dev/null || { cat job.err; fail "there is no rank to kill"; }
        sleep 0.1
    done
    since=$(date +%s%N)
    finish "the death of a rank"
    took=$((($(date +%s%N) - since) / 1000000))
    [ $took -le $longest ] || longest=$took
    [ $ended != 0 ] || fail "a job that lost a rank says that it succeeded"
    grep -qE '1 process returned|rank [0-9]+' job.err || { cat job.err; fail "mpirun says nothing of the rank that died"; }
    ! grep -qE "rank [0-9]+ .*(signal 9|Killed)|process rank [0-9]+|Process name: \[\[[0-9]+,[0-9]+\],[0-9]+\]" job.err || named=$((named + 1))
    deaths=$((deaths + 1))
    if [ -e killed/manifest.json ]; then
        "$program" inspect killed >/dev/null || fail "kill $deaths left a checkpoint that does not load"
        [ "$(step_of killed)" -gt "$between" ] && between=$(step_of killed)
    fi
done
ranks 3 --checkpoint killed --resume --steps $((between + 2)) --quiet --json >killed.json || fail "a killed run does not go on"
"$program" train lm $lasting --accumulator tree --steps $((between + 2)) >undisturbed.json
same "hash after $deaths kills" "$(hash_of killed.json)" "$(hash_of undisturbed.json)"
echo "ok   $deaths kills of a random rank, $((between + 2)) steps: each job ended within $longest ms, and the run has the hash of an undisturbed one"
