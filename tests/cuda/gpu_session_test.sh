#!/bin/bash
# Tests bench/gpu_session.py without a GPU; the driver of tests/cuda/fake stands for one. Its commands exist and take
# their options. Mistakes are reported in one sentence. A step that fails or never ends does
# not keep the others from running.
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need python3
[ -x "$build_dir/halfstep" ] || skip "$build_dir/halfstep is not built"
fake=$build_dir/tests/cuda/fake
[ -e "$fake/libcuda.so.1" ] || skip "$fake/libcuda.so.1 is not built"
make_scratch
cd "$source_dir"
python=python3
[ ! -e "$build_dir/venv/halfstep.installed" ] || python=$build_dir/venv/bin/python
unset PYTHONPATH HALFSTEP_LIBRARY

# A script cannot list its options if a package that it needs is missing. All packages exist where the Python package is
# tested.
told=0
for script in bench/*.py lab/*.py examples/*.py; do
    grep -q 'argparse.ArgumentParser' "$script" || continue
    if PYTHONPATH=python HALFSTEP_LIBRARY=$build_dir/libhalfstep.so "$python" "$script" --help >"$scratch/out" 2>"$scratch/err"; then
        told=$((told + 1))
    elif [ "$python" != python3 ] || ! grep -qE "ModuleNotFoundError: No module named '(torch|numpy)'" "$scratch/err"; then
        fail "$script --help: $(tail -n 1 "$scratch/err")"
    fi
done
[ "$told" -ge 8 ] || fail "only $told scripts tell their options"
echo "ok   $told scripts tell their options"

session() { "$python" bench/gpu_session.py --build "$build_dir" --logs "$scratch/logs" "$@"; }
# expect STATUS PATTERN ARGUMENT...: checks the status, and that stderr is one line that matches.
expect() {
    local wanted=$1 pattern=$2 got=0
    shift 2
    session "$@" >"$scratch/out" 2>"$scratch/err" || got=$?
    [ "$got" = "$wanted" ] && [ "$(wc -l <"$scratch/err")" = 1 ] && [ ! -s "$scratch/out" ] || fail "gpu_session.py $*: exit $got: $(cat "$scratch/err")"
    grep -qE -- "$pattern" "$scratch/err" || fail "gpu_session.py $*: $(cat "$scratch/err") does not match $pattern"
}

# Stands for compute-sanitizer. Runs the command behind the options.
mkdir "$scratch/bin"
cat >"$scratch/bin/compute-sanitizer" <<'END'
#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
END
chmod +x "$scratch/bin/compute-sanitizer"
export PATH=$scratch/bin:$PATH

session --list >"$scratch/list"
for word in gpu_arithmetic.py 'verify --device cuda' gpu_model.py memcheck racecheck 'gpu.py --small 300' 'gpu.py --shapes one' 'gpu.py --shapes model'; do
    grep -qF -- "$word" "$scratch/list" || fail "--list lacks $word"
done
head -n 1 "$scratch/list" | grep -q '^check' || fail "--list does not begin with the check on first use"
session --dry >"$scratch/dry" || fail "--dry: $(cat "$scratch/dry" "$scratch"/logs/dry-*)"
! grep -q '^WRONG' "$scratch/dry" || fail "--dry: $(cat "$scratch/dry")"
! grep -q 'compute-sanitizer' "$scratch/dry" || fail "--dry does not find compute-sanitizer"
grep -qE '^carry +[0-9.]+ MiB  [0-9]+ files of the working tree$' "$scratch/dry" && grep -qE '^carry .* MiB  .*/halfstep$' "$scratch/dry" ||
    fail "--dry does not say what is carried: $(cat "$scratch/dry")"
steps=$(grep -cE ' \((timed, )?at most ' "$scratch/list")
[ "$(grep -cE '^(ready|lacks) ' "$scratch/dry")" = "$steps" ] || fail "--dry does not look at $steps steps"
if grep -q '^ready  limit' "$scratch/dry"; then
    for way in bf16-sr/int8 int8-ecc4/int8; do
        grep -qE "^\\| StateStreaming $way released \\|.* of 3 \\|\$" "$scratch/logs/dry-limit.log" || fail "limit: $(cat "$scratch/logs/dry-limit.log")"
    done
    [ "$(grep -cE '^\| 10.8 M \| `adamw/.*\| [-+][0-9.]+ \|$' "$scratch/logs/dry-ladder.log")" = 3 ] || fail "ladder: $(cat "$scratch/logs/dry-ladder.log")"
    echo "ok   small models are trained on the processor"
fi
echo "ok   commands of $steps steps"

expect 2 "unknown step 'goldn'; known: check, " --only golden,goldn
FAKE_CUDA_DEVICES=0 LD_LIBRARY_PATH=$fake expect 1 'no GPU here: .*CUDA_ERROR_NO_DEVICE'
expect 1 'is not built: bash scripts/build.sh' --build "$scratch/none"
echo "ok   mistakes, and no GPU, in one sentence"

export LD_LIBRARY_PATH=$fake HALFSTEP_CUDA_IMAGE=$fake/image
session --only info,memcheck >"$scratch/out" || fail "info and memcheck: $(cat "$scratch/out" "$scratch"/logs/*)"
grep -q '^2 of 2 steps passed$' "$scratch/out" || fail "$(cat "$scratch/out")"
for line in '\*\*Measured on [0-9-]+ on Fake GPU 0 \(driver of CUDA 12\.8; device code: HALFSTEP_CUDA_IMAGE' '\| question \| answer \|' \
    '\| no access out of bounds \| ok: ([0-9]+) of \1 cases give the promised bits \(cuda\) \|'; do
    grep -qE "^$line" "$scratch/logs/results.md" || fail "results.md lacks $line: $(cat "$scratch/logs/results.md")"
done
grep -qE '^ok: ([0-9]+) of \1 cases' "$scratch/logs/memcheck.log" || fail "$(cat "$scratch/logs/memcheck.log")"
session --minutes 0.2 --only golden,info >"$scratch/out" || fail "--minutes: $(cat "$scratch/out")"
grep -q '^1 of 1 steps passed; no time for golden$' "$scratch/out" || fail "--minutes: $(cat "$scratch/out")"
! FAKE_CUDA_FAULT=5 session --only golden,info >"$scratch/out" || fail "a fault passes"
grep -q '^1 of 2 steps passed; failed: golden$' "$scratch/out" || fail "$(cat "$scratch/out")"
grep -q 'CUDA_ERROR_ILLEGAL_ADDRESS' "$scratch/out" || fail "the end of a log is not shown: $(cat "$scratch/out")"
echo "ok   steps run, and go on after one that fails"

# Wrong commands are found. A command that never ends is stopped, with the processes that it started.
cat >"$scratch/altered.py" <<'END'
import os
import sys
import time

sys.path.insert(0, "bench")
import gpu_session
from gpu_session import Step

arguments = ["--build", sys.argv[1], "--logs", sys.argv[2]]
gpu_session.STEPS = (Step("script", False, 9, "", "lab/none.py"), Step("option", False, 9, "", "lab/gpu_arithmetic.py --parts 3"),
                     Step("command", True, 9, "", "{build}/halfstep verify --devices cuda"))
assert gpu_session.main([*arguments, "--dry"]) == 1
gpu_session.STEPS = (Step("endless", False, 1, "", f"bash -c '(sleep 2; touch {sys.argv[2]}/late) & sleep 60'"),
                     Step("none", False, 9, "", "no-such-program"), Step("good", False, 9, "", "true"))
assert gpu_session.main(arguments) == 1
time.sleep(1.5)
assert not os.path.exists(sys.argv[2] + "/late"), "what an endless step had started goes on"
END
"$python" -B "$scratch/altered.py" "$build_dir" "$scratch/logs" >"$scratch/out" 2>&1 || fail "altered steps: $(cat "$scratch/out")"
for line in 'there is no lab/none.py' 'gpu_arithmetic.py has no --parts' 'halfstep verify has no --devices' \
    '^FAIL endless: ran past its limit of 1 s' 'no-such-program: No such file' '^ok   good' '^1 of 3 steps passed; failed: endless, none$'; do
    grep -qE -- "$line" "$scratch/out" || fail "altered steps: no $line: $(cat "$scratch/out")"
done
echo "ok   wrong commands are found, and an endless one is ended"
