#!/bin/bash
# Tests halfstep compare lm from the outside: its files, its numbers, its errors. (make check leaves it out)
. "$(dirname "$0")/../tools/lib.sh"
halfstep=$build_dir/halfstep
[ -x "$halfstep" ] || skip "$halfstep is not built"
need python3
make_scratch
cd "$scratch"

text=$source_dir/data/demo.txt
tiny="--data $text --width 32 --depth 1 --heads 2 --context 32 --batch 4 --steps 12 --val-every 4 --eval-batches 2 --lr 1e-3 --threads 1"
status() {
    local code=0
    "$@" >out.txt 2>err.txt || code=$?
    echo "$code"
}
# refused STATUS PATTERN WORDS...: checks the status, that stderr is one line that matches, and that no file is left.
refused() {
    local wanted=$1 pattern=$2
    shift 2
    local code
    code=$(status "$halfstep" "$@")
    [ "$code" = "$wanted" ] || fail "$*: status $code, not $wanted: $(cat err.txt)"
    [ "$(wc -l <err.txt)" = 1 ] || fail "$*: not one line: $(cat err.txt)"
    grep -q -- "$pattern" err.txt || fail "$*: \"$(cat err.txt)\" does not match $pattern"
    [ ! -e nothing ] || fail "$*: left something behind"
}

# Compares three recipes with two seeds. One recipe has options of its own.
"$halfstep" compare lm $tiny --recipes adamw/f32,adamw/bf16-sr/int8,adamw/bf16-sr:lr=2e-3:release --seeds 2 --seed 5 \
    --out report --json >result.json 2>progress.txt || fail "a comparison ended with status $?: $(tail -1 progress.txt)"
for file in report.html report.json runs.csv history.csv; do
    [ -s "report/$file" ] || fail "report/$file is missing"
done
[ "$(ls -A report | wc -l)" = 4 ] || fail "unexpected files: $(ls -A report)"
python3 - <<'EOF' || fail "result.json or the files beside it"
import csv, json, math
from html.parser import HTMLParser

result = json.load(open("result.json"))
assert result["report"] == "report/report.html"
runs = result["runs"]
assert [(r["recipe"], r["seed"]) for r in runs] == [(recipe, seed) for seed in (5, 6) for recipe in
    ("adamw/f32/f32", "adamw/bf16-sr/int8", "adamw/bf16-sr/bf16-sr")], runs
keys = "recipe compute seed steps train_loss val_loss tokens_per_s skipped_steps bytes_per_param state_hash".split()
assert all(key in run for run in runs for key in keys)
assert {run["compute"] for run in runs} == {"bf16"}
assert [run["release"] for run in runs[:3]] == [False, False, True]
assert runs[0]["bytes_per_param"] == {"weights": 4, "gradients": 4, "states": 8, "total": 16}
assert runs[2]["bytes_per_param"]["gradients"] < runs[1]["bytes_per_param"]["gradients"] == 2
assert len({run["state_hash"] for run in runs}) == 6
saved = json.load(open("report/report.json"))
given = saved["configuration"]
assert {key: given[key] for key in ("width", "depth", "steps", "lr", "seed")} == \
    {"width": "32", "depth": "1", "steps": "12", "lr": "0.001", "seed": "5 to 6"}, given
assert all(given.values()) and saved["command"].startswith("halfstep compare lm --data "), saved
assert saved["runs"] == runs and saved["complete"] is True and saved["sentence"].endswith(".")
table = saved["table"]
assert [line["name"] for line in table] == ["adamw/f32/f32", "adamw/bf16-sr/int8", "adamw/bf16-sr/bf16-sr:lr=2e-3:release"]
for i, line in enumerate(table):
    losses = [run["val_loss"] for run in runs[i::3]]
    paired = [run["val_loss"] - reference["val_loss"] for run, reference in zip(runs[i::3], runs[0::3])]
    assert math.isclose(line["val_loss"]["mean"], sum(losses) / 2, abs_tol=1e-7)
    assert math.isclose(line["difference"]["mean"], sum(paired) / 2, abs_tol=1e-7)
    assert math.isclose(line["difference"]["standard_error"], abs(paired[0] - paired[1]) / 2, abs_tol=1e-7)
rows = list(csv.DictReader(open("report/runs.csv")))
assert len(rows) == 6 and all(math.isclose(float(row["val_loss"]), run["val_loss"], abs_tol=1e-7) for row, run in zip(rows, runs))
history = list(csv.DictReader(open("report/history.csv")))
assert sum(row["kind"] == "train" for row in history) == 6 * 12
assert [row["step"] for row in history if row["kind"] == "validation"] == ["0", "4", "8", "12"] * 6

class Page(HTMLParser):
    stack, words = [], []
    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attributes}
        if tag not in ("meta", "br"):
            self.stack.append(tag)
    def handle_startendtag(self, tag, attributes):
        pass
    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, tag
    def handle_data(self, data):
        self.words.append(data)

page = Page()
page.feed(open("report/report.html", encoding="utf-8").read())
words = " ".join(page.words)
assert not page.stack and saved["sentence"] in words
assert "Matrix products run in bf16 for every recipe" in words
for run in runs:
    assert run["recipe"] in words
EOF

# The runs equal those of train lm, and are the same the second time.
"$halfstep" train lm $tiny --recipe adamw/bf16-sr/int8 --seed 6 --json >train.json 2>/dev/null || fail "train lm ended with status $?"
python3 -c '
import json
one, run = json.load(open("train.json")), json.load(open("result.json"))["runs"][4]
assert one["state_hash"] == run["state_hash"] and one["val_loss"] == run["val_loss"], (one, run)' ||
    fail "compare and train lm differ"

# Expectations decide the status. The report is written in both cases.
code=$(status "$halfstep" compare lm $tiny --recipes adamw/f32,adamw/bf16 --expect "adamw/bf16>50,adamw/bf16~50" --out expected --quiet)
[ "$code" = 1 ] || fail "an expectation that is not met: status $code"
grep -q "expectation not met: adamw/bf16/bf16-sr: .* wanted more than 50" err.txt || fail "it says: $(cat err.txt)"
[ "$(wc -l <err.txt)" = 1 ] || fail "not one line: $(cat err.txt)"
[ -s expected/report.html ] || fail "no report when an expectation is not met"
[ "$(tail -1 out.txt)" = "$(python3 -c 'import json; print(json.load(open("expected/report.json"))["sentence"])')" ] ||
    fail "does not end with the sentence: $(tail -1 out.txt)"
grep -q "^report: expected/report.html$" out.txt || fail "does not name the report"
code=$(status "$halfstep" compare lm $tiny --recipes adamw/f32,adamw/bf16 --expect "adamw/bf16<50" --out expected --quiet)
[ "$code" = 0 ] || fail "an expectation that is met: status $code: $(cat err.txt)"

# A recipe that diverges or fails does not stop the others, whose results are those of a comparison without it.
"$halfstep" compare lm $tiny --recipes adamw/f32,adamw/bf16-sr --steps 24 --out alone --quiet --json >alone.json || fail "status $?"
code=$(status "$halfstep" compare lm $tiny --recipes sgd/f32@1e6,adamw/f32,adamw/bf16-sr --steps 24 --out some --quiet --json)
[ "$code" = 0 ] || fail "a recipe that diverges: status $code: $(cat err.txt)"
grep -q "^sgd/f32/f32@1e6: diverged: 20 steps in a row" err.txt || fail "what diverged is not told: $(cat err.txt)"
cp out.txt some.json
mkdir taken
touch taken/adamw-bf16-sr-bf16-sr-seed1
code=$(status "$halfstep" compare lm $tiny --recipes adamw/bf16-sr,adamw/f32 --steps 24 --checkpoint taken --out taken/report --quiet --json)
[ "$code" = 1 ] || fail "a recipe that fails: status $code"
[ "$(grep -c '^warning: adamw/bf16-sr/bf16-sr failed: cannot create directory' err.txt)" = 1 ] &&
    grep -q "^halfstep: compare lm: 1 of 2 runs failed; adamw/bf16-sr/bf16-sr: cannot create directory" err.txt ||
    fail "what failed is not told: $(cat err.txt)"
cp out.txt taken.json
python3 - <<'EOF' || fail "the reports beside recipes that diverge or fail"
import json
alone, some, taken = (json.load(open(name)) for name in ("alone.json", "some.json", "taken.json"))
assert [run["diverged"] for run in some["runs"]] == [True, False, False]
assert some["complete"] and some["runs"][0]["val_loss"] is None and not some["failed"], some
assert some["table"][0]["val_loss"]["mean"] is None and "diverged" in some["sentence"]
assert [run["state_hash"] for run in some["runs"][1:]] == [run["state_hash"] for run in alone["runs"]]
assert [run["state_hash"] for run in taken["runs"]] == [alone["runs"][0]["state_hash"]]
assert [(f["recipe"], f["seed"]) for f in taken["failed"]] == [("adamw/bf16-sr/bf16-sr", 1)] and not taken["complete"]
assert "cannot create directory" in taken["failed"][0]["error"]
for folder in ("some", "taken/report"):
    page = open(folder + "/report.html").read()
    assert "nan" not in page and json.load(open(folder + "/report.json"))["table"]
EOF
rm -r taken/adamw-f32-f32-seed1 taken/report
touch taken/adamw-f32-f32-seed1
code=$(status "$halfstep" compare lm $tiny --recipes adamw/bf16-sr,adamw/f32 --checkpoint taken --out taken/report --quiet)
[ "$code" = 1 ] && [ ! -s out.txt ] && [ -z "$(ls taken/report)" ] && grep -q "2 of 2 runs failed; adamw/bf16-sr" err.txt ||
    fail "all recipes fail: status $code, $(cat out.txt err.txt)"

# Each mistake is reported in one line, before anything is trained or written.
there="compare lm $tiny --out nothing"
refused 2 "bf17" $there --recipes adamw/f32,adamw/bf17
refused 2 "twice" $there --recipes adamw/f32,adamw/f32/f32
refused 2 "same for all" $there --recipes adamw/f32,adamw/f32:width=64
refused 2 "not an option" $there --recipes adamw/f32,adamw/f32:colour=red
refused 2 "needs a value" $there --recipes adamw/f32,adamw/f32:lr
refused 2 "not one of the recipes" $there --recipes adamw/f32,adamw/bf16 --expect "lion>1"
refused 2 "has no" $there --recipes adamw/f32,adamw/bf16 --expect "adamw/bf16"
refused 2 "recipes is empty" $there --recipes ,
refused 2 "at least 1" $there --seeds 0
refused 2 "unknown model" compare rnn
refused 1 "no-such-file" $there --data no-such-file
refused 1 "out.txt" compare lm $tiny --out out.txt
refused 1 "no-such-file" demo --data no-such-file --out nothing

# SIGINT finishes the step. The report has the finished runs, and --resume makes the others.
long="$tiny --steps 1200 --val-every 0 --recipes adamw/f32,adamw/bf16-sr --checkpoint saved"
"$halfstep" compare lm $long --out cut >out.txt 2>err.txt &
process=$!
for _ in $(seq 600); do
    [ ! -e cut/report.html ] || break
    sleep 0.05
done
kill -INT $process
code=0
wait $process || code=$?
[ "$code" = 130 ] || fail "SIGINT in the second run: status $code: $(tail -2 err.txt)"
grep -q "Incomplete: 1 of 2 runs" cut/report.html || fail "the interrupted report does not say that it is incomplete"
"$halfstep" compare lm $long --resume --out cut --json --quiet >resumed.json || fail "--resume ended with status $?"
"$halfstep" compare lm ${long% --checkpoint saved} --out whole --json --quiet >whole.json || fail "the uninterrupted run ended with status $?"
python3 -c '
import json
hashes = [[run["state_hash"] for run in json.load(open(name))["runs"]] for name in ("resumed.json", "whole.json")]
assert hashes[0] == hashes[1], hashes' || fail "interrupted and resumed, the bits differ"
echo "ok   compare lm"
