#!/bin/bash
# Tests the program as scripts and people use it: usage errors, help, JSON, resuming bit for bit, signals, kills.
# (make test-all runs "tests/program/cli_test.sh all" too.)
. "$(dirname "$0")/../tools/lib.sh"
need python3 timeout
halfstep=$build_dir/halfstep
[ -x "$halfstep" ] || skip "$halfstep is not built"
data=$source_dir/data/demo.txt
make_scratch
cd "$scratch"
passed=0
ok() { echo "ok   $1"; passed=$((passed + 1)); }

# expect STATUS PATTERN ARGUMENT...: checks the exit status, and that stderr is one line that matches.
expect() {
    local status=$1 pattern=$2 got=0
    shift 2
    # A command that is wrongly accepted would train for minutes.
    timeout 240 "$halfstep" "$@" >out 2>err </dev/null || got=$?
    [ "$got" = "$status" ] || fail "halfstep $*: exit $got, expected $status: $(cat err)"
    [ "$(wc -l <err)" = 1 ] || fail "halfstep $*: not one line on stderr: $(cat err)"
    grep -qE -- "^halfstep: .*$pattern" err || fail "halfstep $*: $(cat err) does not match $pattern"
    [ ! -s out ] || fail "halfstep $*: wrote to stdout in spite of the error"
}
small=(train lm --data "$data" --width 32 --depth 2 --heads 2 --context 32 --batch 4 --threads 1 --val-every 4
    --eval-batches 2 --sample-bytes 20)
lm() { "$halfstep" "${small[@]}" "$@"; }
# value FILE KEY: prints one value of a JSON object. The program prints one line for each key. Starting Python for each
# value would take longer than the runs.
value() { sed -nE 's/^  "'"$2"'": "?(.*[^",]|)"?,?$/\1/p' "$1"; }
valid() { python3 -m json.tool "$1" >/dev/null || fail "$2: not valid JSON"; }

expect 2 'unknown command foo' foo
expect 2 'unknown option --foo \(see halfstep train lm --help\)' train lm --foo
expect 2 'did you mean --width' train lm --data "$data" --widht 3
expect 2 '--steps needs a value' train lm --data "$data" --steps
expect 2 '"abc" is not a whole number' train lm --data "$data" --steps abc
expect 2 'whole number' train lm --data "$data" --steps 1.5
expect 2 'at least 0' train lm --data "$data" --steps=-1
expect 2 '--data FILE is missing' train lm
expect 2 'takes no value' train lm --data "$data" --release=1
expect 2 'unknown rule "adamx", did you mean adam' train lm --data "$data" --recipe adamx
expect 2 'unknown weight format "bf17"' train lm --data "$data" --recipe adamw/bf17
expect 2 'unknown state format "int9"' train lm --data "$data" --recipe adamw/bf16/int9
expect 2 'cannot store exp_avg_sq' train lm --data "$data" --recipe adamw/bf16/bf16-kahan
expect 2 'names 4 state formats; adamw has 3' train lm --data "$data" --recipe adamw/bf16/int8+int8+int8+int8
expect 2 'names 2 state formats; adan has 4' train lm --data "$data" --recipe adan/bf16/int8+int8
expect 2 'cannot store previous of adan, which is a gradient' train lm --data "$data" --recipe adan/bf16/int8+int8+int8+int8
expect 2 'names 2 state formats; schedulefree has 1 state that' train lm --data "$data" --recipe schedulefree/bf16/int8+int8
expect 2 'multiple of 4 heads' train lm --data "$data" --width 30 --heads 4
expect 2 'beta1 = 1 is not in' train lm --data "$data" --beta1 1
expect 2 'no such hyper-parameter, did you mean beta' train lm --data "$data" --hyper beta3=0.5
expect 2 '"foo" is unknown; known: given, polar-express' train lm --data "$data" --ns-coefficients foo
expect 2 '"foo" is unknown; known: given, polar-express' train lm --data "$data" --hyper ns_coefficients=foo
expect 2 'lion steps all tensors; only muon' train lm --data "$data" --recipe lion --adamw-lr 1
expect 2 'use --lr' train lm --data "$data" --hyper lr=1
expect 2 'one of bf16, f32' train lm --data "$data" --compute f64
expect 2 'needs --checkpoint' train lm --data "$data" --resume
expect 2 'nothing to add up without --micro-steps' train lm --data "$data" --accumulator bf16
expect 2 'one of f32, bf16, bf16-sr, tree, states' train lm --data "$data" --micro-steps 2 --accumulator int8
expect 2 'one of scan, per-tensor, known-finite' train lm --data "$data" --scan never
expect 2 'sgd' train lm --data "$data" --micro-steps 2 --accumulator states --recipe sgd
expect 2 'l2' train lm --data "$data" --micro-steps 2 --accumulator states --recipe adam --weight-decay 0.1
expect 2 'schedulefree' train lm --data "$data" --micro-steps 2 --accumulator states --recipe schedulefree
expect 2 'ema follows weights' train lm --data "$data" --recipe ema/bf16-sr
expect 2 '--warmup 10 is above --steps 3, so --schedule linear would never' train lm --data "$data" --steps 3 --warmup 10 --schedule linear
expect 2 'one of --params, --checkpoint, --width' plan
expect 2 'bytes' plan --params 7e9 --memory 24Q
expect 2 'prodigy/f32/f32 needs the gradients of all' plan --params 7e9 --release --recipes adamw/f32,prodigy/f32
expect 2 'prodigy needs the gradients of all' plan --params 7e9 --release --rule prodigy
expect 1 'nowhere' train lm --data nowhere
expect 1 'nowhere: No such file or directory; elsewhere: No such file or directory' train lm --data nowhere "$data" --data elsewhere
expect 2 '--data: .* contains a line break; rename the file' train lm --data "$data" $'a\nb'
expect 1 'cannot create directory' train lm --data "$data" --checkpoint nowhere/run
expect 1 'cannot write the log nowhere/log.csv' train lm --data "$data" --log nowhere/log.csv
expect 1 'no checkpoint in nowhere' train lm --data "$data" --checkpoint nowhere --resume
for command in generate plan; do expect 1 'cannot open nowhere: No such file or directory' $command --checkpoint nowhere; done
expect 1 'cannot open nowhere: No such file or directory' train lm --data "$data" --init nowhere
expect 1 'nowhere' inspect nowhere
expect 1 'data/demo.txt' inspect "$data"
# Every command refuses a malformed variable.
for setting in ISA=avx9 ISA=SCALAR ISA=scalar,avx2 THREADS=3x THREADS=1025 PIN=2 DEVICE_CHECK=no MPI=yes; do
    says="HALFSTEP_${setting%%=*} is '${setting#*=}'; known: "
    export "HALFSTEP_$setting"
    expect 1 "$says" train lm --data "$data" --log log.csv --checkpoint run
    expect 1 "$says" info
    unset "HALFSTEP_${setting%%=*}"
done
[ "$(ls)" = $'err\nout' ] || fail "failed commands left files behind: $(ls)"
ok "usage errors: one line, the right exit status, nothing left behind"

"$halfstep" --help >out
commands=$(sed -nE 's/^  ([a-z]+) .*/\1/p' out | grep -v halfstep)
[ "$(echo "$commands" | wc -w)" -ge 10 ] || fail "--help lists only: $commands"
for command in $commands; do
    words=$command
    case $command in train | compare) words="$command lm" ;; esac
    # shellcheck disable=SC2086
    "$halfstep" $words --help >out 2>err || fail "$words --help exits $?"
    grep -q '^Usage: halfstep' out || fail "$words --help prints no usage"
    [ ! -s err ] || fail "$words --help writes to stderr"
    # shellcheck disable=SC2086
    "$halfstep" help $words >out2 || fail "help $words exits $?"
    cmp -s out out2 || fail "help $words differs from $words --help"
done
"$halfstep" --version | grep -qE '^halfstep [0-9]+\.[0-9]+\.[0-9]+ ' || fail "--version"
ok "help of every command"

"$halfstep" info --json >info.json
valid info.json "info --json"
python3 - info.json "$("$halfstep" --version)" <<'PY' || fail "info --json"
import json, sys
info = json.load(open(sys.argv[1]))
assert info["version"] == sys.argv[2].split()[1], (info["version"], sys.argv[2])
assert info["isa"] in info["isas"] and info["threads"] >= 1, info
assert "adamw" in info["rules"] and "bf16-sr" in info["weight_formats"] and "int8" in info["state_formats"], info
PY
# A recipe stands for its rule. Each rule is described, with its own hyper-parameters and the common ones.
expect 2 'unknown rule "adamx", did you mean adam?' info adamx
"$halfstep" info adamw/bf16-sr/int8 >rule.txt
grep -q '^beta2  *0.999  *decay rate of the second moment$' rule.txt || fail "info adamw lacks beta2: $(cat rule.txt)"
grep -q '^lr  *0.001 ' rule.txt && grep -q '^clip_norm .*(optimizer)$' rule.txt || fail "info adamw: $(cat rule.txt)"
"$halfstep" info lion --json >rule.json
valid rule.json "info RULE --json"
python3 - rule.json <<'PY' || fail "info RULE --json"
import json, sys
rule = json.load(open(sys.argv[1]))
assert (rule["rule"], rule["decay"], rule["states"]) == ("lion", "decoupled", ["exp_avg"]), rule
values = {hyper["name"]: hyper["default"] for hyper in rule["hyper_parameters"]}
assert (values["lr"], values["beta1"], values["beta2"], values["total_steps"]) == (1e-4, 0.9, 0.99, 0), values
PY
"$halfstep" plan --params 7e9 --memory 24G --json >plan.json
valid plan.json "plan --json"
python3 - plan.json <<'PY' || fail "plan --json"
import json, sys
rows = {r["recipe"]: r for r in json.load(open(sys.argv[1]))["recipes"]}
near = lambda a, b: abs(a - b) < 1e-6
assert near(rows["adamw/f32/f32"]["bytes_per_param"]["total"], 16), rows["adamw/f32/f32"]
assert near(rows["adamw/bf16-sr/bf16-sr"]["bytes_per_param"]["total"], 8), rows["adamw/bf16-sr/bf16-sr"]
assert near(rows["adamw/bf16-sr/int8"]["bytes_per_param"]["total"], 6.125), rows["adamw/bf16-sr/int8"]
assert not rows["adamw/f32/f32"]["fits"], rows["adamw/f32/f32"]
sizes = [r["total_bytes"] for r in json.load(open(sys.argv[1]))["recipes"]]
assert sizes == sorted(sizes)
assert len(sizes) <= 40, f"{len(sizes)} recipes are more than anybody reads"
weights = {recipe.split("/")[1] for recipe in rows}
assert "bf16-sr" in weights and "bf16" not in weights and not any(weight.startswith("f16") for weight in weights), weights
PY
"$halfstep" plan --params 7e9 --all --json >all.json
"$halfstep" plan --params 7e9 --recipes lion/bf16/bf16,adamw/f32 --json >some.json
python3 - plan.json all.json some.json <<'PY' || fail "plan --all, plan --recipes"
import json, sys
few, many, some = ({r["recipe"] for r in json.load(open(name))["recipes"]} for name in sys.argv[1:])
assert few < many and "adamw/bf16/bf16" in many, many
assert some == {"lion/bf16/bf16", "adamw/f32/f32"}, some
PY
"$halfstep" plan --params 7e9 --recipes muon/f32/int8,muon/f32/int4,muon/bf16-sr/int4 >coarse.txt
[ "$(grep -c "^muon: momentum_buffer in int4 ends " coarse.txt)" = 1 ] || fail "plan does not say once what int4 costs muon"
ok "info and plan"

"$halfstep" bench --recipes adamw/f32,adamw/bf16-sr/int8 --params 8192 --tensors 8 --rounds 1 --threads 1 --csv bench.csv --json >bench.json
valid bench.json "bench --json"
python3 - bench.json bench.csv <<'PY' || fail "bench"
import csv, json, sys
cases = json.load(open(sys.argv[1]))["cases"]
assert [(c["recipe"], c["tensors"]) for c in cases] == [(r, n) for r in ("adamw/f32/f32", "adamw/bf16-sr/int8") for n in (1, 8)], cases
# A step reads and writes weights and states, and reads gradients. These are 28 bytes in fp32.
assert cases[0]["bytes_per_param"] == 28 and 10 < cases[2]["bytes_per_param"] < 10.6, cases
for case in cases:
    assert case["ns_per_param"] > 0 and 0 < case["stream_fraction"] < 100, case
assert cases[1]["time_over_one_tensor"] > 0 and 0 < cases[0]["cache_ns_per_param"] < 100 * cases[0]["ns_per_param"], cases
rows = list(csv.DictReader(open(sys.argv[2])))
assert [r["recipe"] for r in rows] == [c["recipe"] for c in cases], rows
PY
expect 2 'unknown rule' bench --recipes adamx
expect 2 'at least 4096' bench --params 1
timeout 240 "$halfstep" bench --recipes sgd/bf16-sr,lion/f32 --params 4096 --tensors 1 --rounds 1 --threads 2 >bench.txt || fail "bench of two threads: $?"
grep -q lion/f32 bench.txt || fail "bench as text: $(cat bench.txt)"
"$halfstep" bench --grid --params 4096 --rounds 1 --threads 1 | sed -n '4,5p;5q' >grid.txt
[ "$(cut -d/ -f1,2 grid.txt | uniq -c | grep -c '^ *2 ')" = 1 ] || fail "bench --grid: one weight format has not several states: $(cat grid.txt)"
expect 2 'exclude each other' bench --grid --recipes lion/f32
ok "bench"

"$halfstep" verify --threads 1 --write hashes.txt >out
cmp hashes.txt "$source_dir/tests/golden/hashes.txt" || fail "verify --write: not tests/golden/hashes.txt (after a new row: make golden, docs/adding.md)"
"$halfstep" verify --every 50 --json >verify.json
valid verify.json "verify --json"
ok "verify"

"$halfstep" random --generator mixer --seed 3 --count 10 >ten
"$halfstep" random --generator mixer --seed 3 --first 2 --count 8 >eight
"$halfstep" random --generator mixer --seed 4 --count 10 >other
[ "$(wc -c <ten)" = 40 ] && cmp <(tail -c 32 ten) eight || fail "random: --first does not go on where --count has ended"
! cmp -s ten other || fail "random: two seeds, one stream"
[ "$("$halfstep" random --generator philox7 | head -c 65536 | sort -u | wc -c)" -gt 0 ] || fail "random: without end"
expect 2 '--generator' random
expect 2 'one of' random --generator dice
ok "random"

lm --steps 8 --json >run.json 2>progress
valid run.json "train lm --json"
python3 - run.json <<'PY' || fail "keys of train lm --json"
import json, sys
run = json.load(open(sys.argv[1]))
for key in "recipe compute seed steps train_loss val_loss tokens_per_s skipped_steps bytes_per_param state_hash".split():
    assert key in run, key
held = run["bytes_per_param"]
assert run["recipe"] == "adamw/bf16-sr/bf16-sr" and run["steps"] == 8 and run["skipped_steps"] == 0, run
assert held["weights"] == 2 and held["gradients"] == 2 and held["states"] == 4 and held["total"] == 8, held
assert 4 < run["train_loss"] < 6 and len(run["sample"]) > 0, run
PY
grep -q 'step 8/8' progress || fail "no progress lines on stderr"
grep -q $'[\r\033]' progress && fail "control characters in a progress that is no terminal"
ok "results as JSON, progress as plain lines"

lm --steps 6 --json --recipe adamw/bf16-sr/int8 --release --quiet >release.json 2>err
[ ! -s err ] || fail "--quiet: $(cat err)"
python3 - release.json <<'PY' || fail "--release holds more than one layer's gradients"
import json, sys
run = json.load(open(sys.argv[1]))
assert 0 < run["bytes_per_param"]["gradients"] < 1.9, run
PY
ok "gradient release"

# A step made of micro-steps sees the same data as a step with one large batch. Their results differ by roundings only.
learn() { lm --steps 20 --recipe adamw/f32 --compute f32 --quiet --json --val-every 0 --lr 3e-3 "$@"; }
learn --batch 8 --eval-batches 2 >whole.json
for accumulator in f32 bf16 bf16-sr; do
    for release in "" --release; do
        # shellcheck disable=SC2086
        learn --batch 2 --micro-steps 4 --eval-batches 8 --accumulator $accumulator $release >cut.json
        python3 - whole.json cut.json $accumulator <<'PY' || fail "micro-steps into $accumulator $release"
import json, sys
whole, cut = (json.load(open(name)) for name in sys.argv[1:3])
bound = 1e-5 if sys.argv[3] == "f32" else 3e-3
for key in "train_loss", "val_loss":
    assert abs(whole[key] - cut[key]) <= bound * whole[key], (key, whole[key], cut[key])
assert whole["state_hash"] != cut["state_hash"], "nothing was cut"
assert (whole["accumulator"], cut["accumulator"], cut["micro_steps"]) == (None, sys.argv[3], 4), cut
size = 4 if sys.argv[3] == "f32" else 2
assert size < cut["bytes_per_param"]["gradients"] < size + 1.9, cut["bytes_per_param"]
PY
    done
done
# Moments that are fed batch by batch give another result. They must still learn, and need no memory for sums.
learn --batch 8 --steps 0 --eval-batches 2 >start.json
learn --batch 2 --micro-steps 4 --eval-batches 8 --accumulator states --release >cut.json
python3 - start.json cut.json <<'PY' || fail "micro-steps into states"
import json, sys
start, cut = (json.load(open(name)) for name in sys.argv[1:3])
assert cut["val_loss"] < start["val_loss"] - 0.1, (start["val_loss"], cut["val_loss"])
assert cut["bytes_per_param"]["gradients"] < 1.9, cut["bytes_per_param"]
PY
ok "micro-steps: the step of the whole batch, and the memory they promise"

# n steps equal k steps, a save, a load and n - k steps, for each storage format. This includes state that only the
# trainer has (clipping with release).
resume_case() {
    lm --steps 12 --json --quiet "$@" >whole.json
    rm -rf run
    lm --steps 5 --json --quiet --checkpoint run "$@" >half.json
    HALFSTEP_ISA=scalar lm --steps 12 --json --quiet --checkpoint run --resume "$@" >rest.json
    for name in whole half rest; do
        grep -E '^  "(state_hash|train_loss|val_loss|skipped_steps|weights_changed_percent|sample)": ' $name.json >$name.values
    done
    [ "$(wc -l <whole.values)" = 6 ] || fail "$*: not 6 values: $(cat whole.values)"
    diff whole.values rest.values || fail "resumed, $*: not the values of the uninterrupted run"
    ! diff <(grep state_hash whole.values) <(grep state_hash half.values) >/dev/null || fail "$*: seven steps changed nothing"
}
names() { python3 -c 'import json, sys; print(*json.load(open("info.json"))[sys.argv[1]])' "$1"; }
for weight in $(names weight_formats); do
    resume_case --recipe "adamw/$weight"
done
for state in $(names state_formats); do
    # A format for signed states serves only the momentum.
    rule=adamw
    "$halfstep" plan --params 1e6 --recipes "adamw/bf16-sr/$state" >out 2>err || rule=lion
    resume_case --recipe "$rule/bf16-sr/$state"
done
for rule in $(names rules); do
    [ "$rule" != ema ] || continue
    resume_case --recipe "$rule/bf16-kahan/int8" --weight-decay 0.1
done
resume_case --recipe schedulefree/int8-ecc4/int8 --release
resume_case --recipe sgd/bf16-kahan --momentum 0.9 --weight-decay 0.1
resume_case --recipe adamw/bf16-ecc8/int8+bf16-sr --release --clip 0.5 --generator mixer
resume_case --gradients f16 --clip 1 --warmup 3
for accumulator in f32 bf16 bf16-sr states; do
    resume_case --micro-steps 3 --batch 2 --accumulator $accumulator --clip 1
    resume_case --micro-steps 2 --batch 2 --accumulator $accumulator --recipe adamw/bf16-ecc8/int8 --release --clip 0.5
done
resume_case --recipe muon/bf16-ecc8/int8 --adamw-lr 3e-3 --ns-coefficients polar-express --clip 1 --weight-decay 0.1
resume_case --scan per-tensor --recipe lion/bf16-sr/int8
ok "a resumed run ends with the bits of an uninterrupted one"

rm -rf run log.csv
lm --steps 6 --quiet --checkpoint run --log log.csv --recipe adamw/bf16-sr/int8 >out
[ "$(wc -l <log.csv)" = 7 ] || fail "log of 6 steps: $(wc -l <log.csv) lines"
resume() { "$halfstep" train lm --checkpoint run --resume "$@"; }
expect 1 '--recipe is adamw/f32/f32 here but adamw/bf16-sr/int8 in run' train lm --checkpoint run --resume --recipe adamw
expect 1 '--width is 64 here but 32 in run' train lm --checkpoint run --resume --width 64
expect 1 '--micro-steps is 2 here but 1 in run' train lm --checkpoint run --resume --micro-steps 2
expect 1 '--scan is per-tensor here but scan in run' train lm --checkpoint run --resume --scan per-tensor
expect 1 '--lr is 0.1 here but 0.001 in run' train lm --checkpoint run --resume --lr 0.1
expect 1 'beta1 is 0.8 here but 0.9 in run' train lm --checkpoint run --resume --beta1 0.8
expect 1 'run is already at step 6' train lm --checkpoint run --resume --steps 3
expect 1 'run already holds a checkpoint of step 6' train lm --checkpoint run --data "$data"
head -c 100000 "$data" >other.txt
expect 1 '--data holds other bytes' train lm --checkpoint run --resume --data other.txt
# A resumed run replaces the rows after the checkpoint, and a row that was cut off.
printf '7,1,1,1,1,1,1,0\n8,1,1' >>log.csv
resume --steps 9 --quiet >out
[ "$(cut -d, -f1 log.csv | paste -sd,)" = step,1,2,3,4,5,6,7,8,9 ] || fail "log after resuming: $(cat log.csv)"
[ "$(sort -u log.csv | wc -l)" = 10 ] || fail "the log has a line twice"
grep -q '^7,1,1' log.csv && fail "a row of the lost steps stayed in the log"
mkdir elsewhere
cd elsewhere
expect 1 'the log of this run, log.csv, is not here: resume in the folder' train lm --checkpoint ../run --resume --steps 12
cd ..
rm elsewhere/out elsewhere/err
rmdir elsewhere || fail "a resume that is refused left something behind"
rm -rf cosine
lm --steps 6 --quiet --checkpoint cosine --schedule cosine >out
expect 1 'the cosine schedule of the steps already made depends on it' train lm --checkpoint cosine --resume --steps 9
ok "resuming names what differs, and continues the log"

# Files and folders are read as one text, in the way cat joins them. Their names do not matter.
mkdir -p text/b text/.git
head -c 100000 "$data" >text/a
head -c 200000 "$data" | tail -c +100001 >text/b/1
tail -c +200001 "$data" | gzip >text/b/2.gz
echo nothing >text/.git/config
joined=(train lm "${small[@]:4}" --quiet --json)
lm --steps 4 --quiet --json >a.json
for words in text 'text/a text/b' 'text/a --data text/b/1 text/b/2.gz'; do
    # shellcheck disable=SC2086
    "$halfstep" "${joined[@]}" --steps 4 --data $words >b.json || fail "--data $words"
    [ "$(value a.json state_hash)" = "$(value b.json state_hash)" ] || fail "--data $words has not the bits of the whole file"
    [ "$(value b.json data_files) $(value b.json data_bytes)" = "3 $(wc -c <"$data")" ] || fail "--data $words: how many files"
done
"$halfstep" "${joined[@]}" --steps 4 --data text/b text/a >b.json
[ "$(value a.json state_hash)" != "$(value b.json state_hash)" ] || fail "the order of --data does not matter"
lm --steps 4 --quiet --json --val "$data" >a.json
"$halfstep" "${joined[@]}" --steps 4 --data "$data" --val text >b.json
[ "$(value a.json val_loss)" = "$(value b.json val_loss)" ] || fail "--val text has not the loss of the whole file"
lm --steps 6 --quiet --json >a.json
"$halfstep" "${joined[@]}" --steps 4 --data text --checkpoint joined >out
"$halfstep" train lm --checkpoint joined --resume --steps 5 --quiet --json >b.json || fail "a resumed list of files"
echo more >text/b/0
expect 1 '--data holds other bytes' train lm --checkpoint joined --resume --steps 6
rm text/b/0
"$halfstep" train lm --checkpoint joined --resume --steps 6 --quiet --json --data text/a text/b >b.json || fail "the same text by other names"
[ "$(value a.json state_hash)" = "$(value b.json state_hash)" ] || fail "resuming with several files"
for output in '--log text/log.csv' '--checkpoint text/b/run' '--checkpoint text'; do
    # shellcheck disable=SC2086
    expect 2 'lies in text, a folder of --data, and would be read' train lm --data text $output
done
[ "$(find text | wc -l)" = 7 ] || fail "something was written into the folder of --data: $(find text)"
ok "several files and folders are one text, and resume as such"

"$halfstep" generate --checkpoint run --prompt 'The ' --bytes 50 --seed 3 --json >text.json
valid text.json "generate --json"
"$halfstep" generate --checkpoint run --prompt 'The ' --bytes 50 --seed 3 >text1
"$halfstep" generate --checkpoint run --prompt 'The ' --bytes 50 --seed 3 >text2
cmp -s text1 text2 || fail "generate differs between two calls"
[ "$(wc -c <text1)" = 55 ] || fail "generate wrote $(wc -c <text1) bytes"
"$halfstep" inspect run --json >inspect.json
valid inspect.json "inspect --json"
[ "$(value inspect.json step)" = 9 ] && [ "$(value inspect.json recipe)" = adamw/bf16-sr/int8 ] || fail "inspect --json"
"$halfstep" inspect run/model.safetensors --json >inspect.json
valid inspect.json "inspect FILE --json"
"$halfstep" inspect run | grep -q 'lm_head.weight' || fail "inspect does not list the tensors"
ok "generate and inspect"

# An error code of 16 bits keeps all of fp32. The weights are the same whether they come as F32 or as BF16 and code.
lm --steps 4 --quiet --recipe adamw/bf16-ecc16/f32 --checkpoint ecc >out
lm --steps 0 --quiet --json --recipe adamw/bf16-ecc16/f32 --init ecc >a.json
lm --steps 0 --quiet --recipe adamw/f32/f32 --init ecc --checkpoint wide >out
lm --steps 0 --quiet --json --recipe adamw/bf16-ecc16/f32 --init wide >b.json
[ "$(value a.json state_hash)" = "$(value b.json state_hash)" ] || fail "--init lost bits"
"$halfstep" train lm --data "$data" --init ecc --steps 0 --quiet --json >c.json
[ "$(value c.json params)" = "$(value a.json params)" ] || fail "--init does not bring its shape"
expect 2 '--width is 64, but the config.json of --init ecc says' train lm --data "$data" --init ecc --width 64
ok "--init takes the weights in full"

# Schedule-free training evaluates another point than the stored weights. Validation, the sample, generate and --init
# all use that point.
lm --steps 30 --quiet --json --recipe schedulefree/bf16-kahan --lr 1e-2 --checkpoint free --log free.csv >free.json
lm --steps 0 --quiet --json --recipe adamw/f32 --init free >average.json
lm --steps 0 --quiet --json --recipe adamw/f32 --init "$(ls -d free/checkpoint-*)"/model.safetensors >stored.json
"$halfstep" generate --checkpoint free --bytes 20 --json >text.json
python3 - free.json average.json stored.json text.json <<'PY' || fail "schedulefree: not one average everywhere"
import csv, json, sys
free, average, stored, text = (json.load(open(name)) for name in sys.argv[1:])
losses = [float(row["train_loss"]) for row in csv.DictReader(open("free.csv"))][-20:]
assert abs(free["train_loss"] - sum(losses) / 20) < 1e-5, (free["train_loss"], losses)
assert average["val_loss"] == free["val_loss"] != stored["val_loss"], (free["val_loss"], average["val_loss"], stored["val_loss"])
assert average["sample"] == text["text"] == free["sample"], (free["sample"], average["sample"], text["text"])
PY
ok "schedulefree speaks with its average"

# Any damage is reported in one line. The program never crashes.
damage() {
    cp -r run damaged
    "$@"
    expect 1 damaged train lm --checkpoint damaged --resume --steps 20
    expect 1 damaged generate --checkpoint damaged
    rm -rf damaged
}
truncate_model() { truncate -s -1 "$(ls -d damaged/checkpoint-*)"/model.safetensors; }
flip_model() { printf 'x' | dd of="$(ls -d damaged/checkpoint-*)"/model.safetensors bs=1 seek=5000 conv=notrunc 2>/dev/null; }
drop_model() { rm "$(ls -d damaged/checkpoint-*)"/model.safetensors; }
break_manifest() { echo '{' >damaged/manifest.json; }
for kind in truncate_model flip_model drop_model break_manifest; do damage $kind; done
ok "damaged checkpoints are refused in one line"

interrupt_case() {
    rm -rf run log.csv
    # Does not use lm(), because the signal is for the program and not for a shell around it. Without --foreground,
    # timeout would send it twice: to the program and to its group. A failed test must not leave the program running.
    timeout --foreground -k 1 30 "$halfstep" "${small[@]}" --steps 1000000 --quiet --checkpoint run --log log.csv \
        >out 2>err &
    local pid=$! got=0 waited=0
    until [ "$(cat log.csv 2>/dev/null | wc -l)" -gt 3 ] || [ $waited = 200 ]; do
        sleep 0.1
        waited=$((waited + 1))
    done
    kill -"$1" $pid
    wait $pid || got=$?
    [ $got = "$2" ] || fail "SIG$1: exit $got: $(cat err)"
    grep -q 'interrupted after step [0-9]*; saved in run' err || fail "SIG$1: $(cat err)"
    local step
    step=$("$halfstep" inspect run --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["step"])')
    lm --steps "$step" --json --quiet >whole.json
    resume --steps "$step" --json --quiet >rest.json
    [ "$(value whole.json state_hash)" = "$(value rest.json state_hash)" ] || fail "SIG$1 at step $step saved other bits"
}
interrupt_case INT 130
interrupt_case TERM 143
ok "SIGINT and SIGTERM finish the step, save and exit 130 and 143"

# The program saves after every step and is killed at any instant. The directory holds a checkpoint that goes on to the
# same end.
rm -rf run
lm --steps 3 --quiet --checkpoint run --checkpoint-every 1 >out
kills=$([ "${1:-}" = all ] && echo 8 || echo 3)
for i in $(seq "$kills"); do
    { timeout -s KILL "$((RANDOM % 2)).$((RANDOM % 5 + 5))$((RANDOM % 10))" \
        "$halfstep" train lm --checkpoint run --resume --steps 1000000 --quiet --checkpoint-every 1 >out || true; } 2>/dev/null
    "$halfstep" inspect run --json >inspect.json || fail "kill $i left no sound checkpoint"
done
step=$(value inspect.json step)
[ "$step" -gt 3 ] || fail "$kills runs of a second made no step"
lm --steps "$step" --json --quiet >whole.json
resume --steps "$step" --json --quiet >rest.json
[ "$(value whole.json state_hash)" = "$(value rest.json state_hash)" ] || fail "after $kills kills, step $step has other bits"
ok "kills while saving ($step steps survived)"

# The embedding of one byte has a NaN. Steps that see the byte are refused whole and counted, and reported once.
poison() {
    python3 - "$1" "$2" <<'PY'
import json, struct, sys
source, byte = sys.argv[1], int(sys.argv[2])
raw = bytearray(open(source, "rb").read())
size = struct.unpack("<Q", raw[:8])[0]
tensor = json.loads(raw[8:8 + size])["model.embed_tokens.weight"]
at = 8 + size + tensor["data_offsets"][0] + byte * tensor["shape"][1] * 4
raw[at:at + 4] = struct.pack("<I", 0x7fc00000)
open("poisoned.safetensors", "wb").write(raw)
PY
}
nan_run() { lm --recipe sgd/f32/f32 --steps 40 --sample-bytes 0 --init poisoned.safetensors "$@"; }
poison "$(ls -d wide/checkpoint-*)"/model.safetensors 66
nan_run --json >some.json 2>err
valid some.json "train lm --json with NaN losses"
skipped=$(value some.json skipped_steps)
[ "$skipped" -gt 0 ] && [ "$skipped" -lt 40 ] || fail "a rare NaN: $skipped of 40 steps skipped"
[ "$(grep -c 'is not finite' err)" = 1 ] || fail "a rare NaN is not told once: $(cat err)"
poison "$(ls -d wide/checkpoint-*)"/model.safetensors 32
got=0
nan_run --quiet --json >out 2>err || got=$?
[ $got = 1 ] && [ ! -s out ] && grep -q '20 steps in a row had gradients that are not finite' err ||
    fail "nothing but NaN: exit $got: $(cat err)"
poison "$(ls -d wide/checkpoint-*)"/model.safetensors 66
nan_run --scan per-tensor --json >some.json 2>err
[ "$(value some.json skipped_steps)" -gt "$skipped" ] || fail "--scan per-tensor counts $(value some.json skipped_steps) tensors"
grep -q 'that tensor is left unchanged' err || fail "--scan per-tensor: $(cat err)"
ok "gradients that are not finite"

echo "$passed passed, 0 failed"
