#!/bin/bash
# Tests halfstep train mnist and compare mnist from the outside: what they learn, their JSON and files, their errors.
. "$(dirname "$0")/../tools/lib.sh"
halfstep=$build_dir/halfstep
[ -x "$halfstep" ] || skip "$halfstep is not built"
need python3
make_scratch
cd "$scratch"

# refused STATUS PATTERN WORDS...: checks the status, that stdout is empty, and that stderr is one line that matches.
refused() {
    local wanted=$1 pattern=$2 code=0
    shift 2
    "$halfstep" "$@" >out.txt 2>err.txt || code=$?
    [ "$code" = "$wanted" ] || fail "$*: status $code, not $wanted: $(cat err.txt)"
    [ ! -s out.txt ] || fail "$*: prints $(head -1 out.txt)"
    [ "$(wc -l <err.txt)" = 1 ] || fail "$*: not one line: $(cat err.txt)"
    grep -q -- "$pattern" err.txt || fail "$*: \"$(cat err.txt)\" does not match $pattern"
}

# One short epoch is enough to learn the drawn digits, in every format.
drawn="train mnist --train-images 6000 --test-images 500 --quiet --json"
"$halfstep" $drawn --recipe adamw/f32 --epochs 1 --batch 32 --threads 2 --log log.csv >one.json || fail "status $?"
python3 - <<'END' || fail "the JSON or the log of one epoch"
import csv, json, math
run = json.load(open("one.json"))
assert run["test_accuracy"] > 0.9, run["test_accuracy"]
assert run["recipe"] == "adamw/f32/f32" and run["params"] == 431080 and run["steps"] == 188 and run["batch"] == 32
assert run["bytes_per_param"] == {"weights": 4, "gradients": 4, "states": 8, "total": 16}
assert run["compute"] == "f32" and run["gradients"] == "f32" and run["diverged"] is False and run["skipped_steps"] == 0
keys = "train_loss val_loss seconds optimizer_seconds peak_gradient_bytes activation_bytes isa threads state_hash seed release"
assert all(key in run for key in keys.split()) and run["threads"] == 2 and run["images_per_s"] > 0
epochs = run["epochs"]
assert [len(epochs[key]) for key in ("train_loss", "test_loss", "test_accuracy")] == [1, 1, 1]
assert epochs["test_loss"][0] == run["test_loss"] == run["val_loss"] and epochs["train_loss"][0] == run["train_loss"]
assert epochs["test_accuracy"][0] == run["test_accuracy"]
# The first evaluation uses the initial weights, for which all ten classes are equally likely.
assert [point["step"] for point in run["validation"]] == [0, 188] and abs(run["validation"][0]["val_loss"] - math.log(10)) < 0.1
rows = list(csv.DictReader(open("log.csv")))
assert [row["epoch"] for row in rows] == ["0", "1"] and [row["step"] for row in rows] == ["0", "188"]
assert math.isclose(float(rows[1]["test_accuracy"]), run["test_accuracy"]) and rows[0]["train_loss"] == ""
assert math.isclose(float(rows[1]["test_loss"]), run["test_loss"], rel_tol=1e-6) and float(rows[1]["gradient_norm"]) > 0
END

# IDX files may hold any images. Plain and gzipped files give the same run.
python3 - <<'END'
import gzip, os, random, struct
random.seed(1)
def images(n, side=28):
    return struct.pack(">4I", 0x803, n, side, side) + bytes(random.choice((0, 0, 90, 255)) for _ in range(n * side * side))
def labels(n, magic=0x801, value=None):
    return struct.pack(">2I", magic, n) + bytes(i % 10 if value is None else value for i in range(n))
good = {"train-images-idx3-ubyte": images(150), "train-labels-idx1-ubyte": labels(150),
        "t10k-images-idx3-ubyte": images(70), "t10k-labels-idx1-ubyte": labels(70)}
def folder(name, changes={}, zipped=False):
    os.mkdir(name)
    for file, content in {**good, **changes}.items():
        if content is None:
            continue
        with open(os.path.join(name, file + (".gz" if zipped else "")), "wb") as out:
            out.write(gzip.compress(content) if zipped else content)
folder("plain")
folder("zipped", zipped=True)
folder("missing", {"t10k-labels-idx1-ubyte": None})
folder("truncated", {"train-images-idx3-ubyte": good["train-images-idx3-ubyte"][:-1]})
folder("long", {"t10k-images-idx3-ubyte": good["t10k-images-idx3-ubyte"] + b"x"})
folder("header", {"train-labels-idx1-ubyte": b"\0\0\x08\x01\0"})
folder("magic", {"train-images-idx3-ubyte": labels(150)})
folder("swapped", {"train-labels-idx1-ubyte": images(150)})
folder("counts", {"train-labels-idx1-ubyte": labels(149)})
folder("classes", {"t10k-labels-idx1-ubyte": labels(70, value=10)})
folder("none", {"train-images-idx3-ubyte": images(0), "train-labels-idx1-ubyte": labels(0)})
folder("sides", {"t10k-images-idx3-ubyte": images(70, 20)})
folder("odd", {"train-images-idx3-ubyte": images(150, 27), "t10k-images-idx3-ubyte": images(70, 27)})
END
files="train mnist --epochs 1 --batch 64 --lr 1e-3 --quiet --json"
for threads in 1 2 3; do
    "$halfstep" $files --data plain --recipe adamw/bf16-sr/int8 --threads $threads >threads$threads.json || fail "status $?"
done
"$halfstep" $files --data zipped --recipe adamw/bf16-sr/int8 >zipped.json || fail "gzipped files: status $?"
"$halfstep" $files --data plain --recipe adamw/bf16-sr/int8 --seed 2 >seed.json || fail "status $?"
"$halfstep" $files --data plain --recipe adamw/bf16-kahan --gradients f16 --compute bf16 --train-images 100 >mixed.json ||
    fail "status $?"
python3 - <<'END' || fail "runs on IDX files"
import json
runs = [json.load(open(name + ".json")) for name in ("threads1", "threads2", "threads3", "zipped", "seed", "mixed")]
for key in ("state_hash", "test_loss", "test_accuracy", "train_loss"):
    assert len({run[key] for run in runs[:4]}) == 1, (key, [run[key] for run in runs[:4]])
assert runs[4]["state_hash"] != runs[0]["state_hash"]
assert runs[0]["steps"] == 3 and runs[5]["steps"] == 2 and runs[5]["gradients"] == "f16" and runs[5]["compute"] == "bf16"
END

there="train mnist --epochs 1"
refused 1 "neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz" $there --data nowhere
refused 1 "missing: has neither t10k-labels-idx1-ubyte" $there --data missing
refused 1 "truncated/train-images-idx3-ubyte: truncated; its header asks for 117616 bytes, the file has 117615" \
    $there --data truncated
refused 1 "t10k-images-idx3-ubyte: too long" $there --data long
refused 1 "header/train-labels-idx1-ubyte: 5 bytes are too short" $there --data header
refused 1 "magic/train-images-idx3-ubyte: begins with 00000801; IDX images begin with 00000803" $there --data magic
refused 1 "swapped/train-labels-idx1-ubyte: begins with 00000803; IDX labels" $there --data swapped
refused 1 "149 labels for 150 images" $there --data counts
refused 1 "label 0 is 10; classes are 0 to 9" $there --data classes
refused 1 "0 images" $there --data none
refused 1 "training images have 28 x 28 pixels, test images 20 x 20; they must agree" $there --data sides
refused 1 "27 x 27 do not divide evenly" $there --data odd
refused 1 "train-images is 151; there are only 150" $there --data plain --train-images 151
refused 1 "no/log.csv" $there --data plain --log no/log.csv
refused 2 "unknown rule" $there --recipe adamx
refused 2 "use --lr" $there --hyper lr=1
refused 2 "no such hyper-parameter" $there --data plain --hyper beta9=1
refused 2 "at least 1" $there --batch 0
refused 2 "unknown option --width" $there --width 4
refused 2 "known: lm, mnist" train rnn
# A run that diverges says so, and its status is 1.
code=0
"$halfstep" train mnist --data plain --recipe sgd/f32 --lr 1e6 --epochs 50 --quiet >out.txt 2>err.txt || code=$?
[ "$code" = 1 ] && [ ! -s out.txt ] || fail "a run that diverges: status $code"
grep -q "20 steps in a row had gradients that are not finite" err.txt || fail "a run that diverges says $(cat err.txt)"

# SIGINT ends the program between two steps. The file shows that the program runs: a shell that has not yet become the
# program would end by its own trap.
rm err.txt
"$halfstep" train mnist --data plain --epochs 100000 >out.txt 2>err.txt &
process=$!
for _ in $(seq 600); do
    [ ! -s err.txt ] || break
    sleep 0.05
done
kill -INT $process
code=0
wait $process || code=$?
[ "$code" = 130 ] || fail "SIGINT: status $code: $(tail -1 err.txt)"
grep -q "interrupted after step [0-9]*; nothing was saved" err.txt || fail "SIGINT: it says $(tail -1 err.txt)"

# One report has two batch sizes with a rate for each. A recipe that diverges does not stop the others.
"$halfstep" compare mnist --data plain --epochs 2 --batch 32,64 --seeds 2 --seed 3 --lr 5e-4 \
    --recipes adamw/f32@1e-3/2e-3,adamw/bf16-sr/int8:clip=1,sgd/f32@1e6 --out report --log runs.csv --json --quiet >result.json 2>notes.txt || fail "compare mnist: status $?"
[ "$(grep -c "warning: step 3: the gradient of conv1.weight is not finite" notes.txt)" = 4 ] ||
    fail "what diverged is not told: $(cat notes.txt)"
"$halfstep" train mnist --data plain --epochs 2 --batch 64 --lr 2e-3 --seed 4 --recipe adamw/f32 --json --quiet >train.json ||
    fail "status $?"
python3 - <<'END' || fail "the report of compare mnist"
import csv, json, math, os
result, one = json.load(open("result.json")), json.load(open("train.json"))
table, runs = result["table"], result["runs"]
names = ["adamw/f32/f32@%s:batch=%d", "adamw/bf16-sr/int8:clip=1:batch=%d", "sgd/f32/f32@1e6:batch=%d"]
assert [row["name"] for row in table] == [names[0] % ("1e-3", 32), names[1] % 32, names[2] % 32,
                                          names[0] % ("2e-3", 64), names[1] % 64, names[2] % 64], [row["name"] for row in table]
assert [row["group"] for row in table] == 3 * ["batch 32"] + 3 * ["batch 64"]
assert len(runs) == 12 and [run["batch"] for run in runs] == 2 * (3 * [32] + 3 * [64])
# The runs equal those of train mnist.
assert runs[9]["state_hash"] == one["state_hash"] and runs[9]["epochs"] == one["epochs"] and runs[9]["seed"] == 4
for i, row in enumerate(table):
    mine = [runs[i], runs[i + 6]]
    if "sgd" in row["name"]:
        assert row["test_accuracy"]["mean"] is None and row["val_loss"]["mean"] is None, row
        assert all(run["diverged"] and run["test_accuracy"] is None for run in mine)
        continue
    assert math.isclose(row["test_accuracy"]["mean"], sum(run["test_accuracy"] for run in mine) / 2, abs_tol=1e-9)
    assert math.isclose(row["val_loss"]["mean"], sum(run["test_loss"] for run in mine) / 2, abs_tol=1e-7)
# Each batch size has a reference of its own.
assert math.isclose(table[4]["difference"]["mean"], table[4]["val_loss"]["mean"] - table[3]["val_loss"]["mean"], abs_tol=1e-7)
assert "With batch 32, " in result["sentence"] and "With batch 64, " in result["sentence"]
rows = list(csv.DictReader(open("report/runs.csv")))
assert len(rows) == 12 and all(math.isclose(float(row["test_accuracy"]), run["test_accuracy"], abs_tol=1e-6) for row, run in zip(rows, runs)
                               if run["test_accuracy"] is not None)
history = list(csv.DictReader(open("report/history.csv")))
steps = {kind: [row["step"] for row in history if row["kind"] == kind and row["run"] == table[0]["name"]]
         for kind in ("train", "validation", "accuracy")}
assert steps == {"train": 2 * ["1", "2"], "validation": 2 * ["0", "1", "2"], "accuracy": 2 * ["0", "1", "2"]}, steps
page = open("report/report.html", encoding="utf-8").read()
for words in ("Test error, 100 % − accuracy, batch 32", "Test loss, batch 64", "Training loss, batch 64", "Memory", "diverged"):
    assert words in page, words
assert len([name for name in os.listdir(".") if name.startswith("runs-")]) == 12
END
code=0
"$halfstep" compare mnist --data plain --epochs 0 --recipes adamw/f32 --expect "adamw/f32>100,adamw/f32<100" \
    --out expected --quiet >out.txt 2>err.txt || code=$?
[ "$code" = 1 ] || fail "an expectation that is not met: status $code"
grep -q "expectation not met: adamw/f32/f32: test accuracy .* %, wanted more than 100$" err.txt || fail "it says: $(cat err.txt)"
[ "$(wc -l <err.txt)" = 1 ] || fail "not one line: $(cat err.txt)"
there="compare mnist --data plain --out nothing"
refused 2 "2 learning rates for 1 batch size" $there --recipes adamw/f32@1/2
refused 2 "not a number" $there --recipes adamw/f32@fast
refused 2 "--batch: \"many\" is not a number of images" $there --batch 128,many
refused 2 "--batch: 128 appears twice" $there --batch 128,128
refused 2 "twice" $there --recipes adamw/f32,adamw/f32/f32
refused 2 "same for all" $there --recipes adamw/f32,adamw/f32:epochs=2
refused 2 "known: lm, mnist" compare rnn
[ ! -e nothing ] || fail "a refused comparison left something behind"
for words in "train mnist" "compare mnist"; do
    "$halfstep" $words --help >help.txt || fail "$words --help: status $?"
    grep -q -- "--train-images" help.txt && ! grep -q -- "--width" help.txt || fail "$words --help shows the options of train lm"
    [ "$(grep -c -- "^  --batch " help.txt)" = 1 ] || fail "$words --help has not one --batch"
done
echo "ok   train mnist and compare mnist"
