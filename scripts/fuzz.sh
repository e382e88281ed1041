#!/bin/bash
# fuzz.sh BUILD MINUTES: all fuzz targets for so many minutes in all, under libFuzzer with AddressSanitizer and
# UndefinedBehaviorSanitizer, then the mutations of Python's state_dicts where the tests have made their environment. Prints one
# row per target: executions and what was found. Inputs that were found go to BUILD/found and are worth a place in fuzz/corpus.
set -eu
cd "$(dirname "$0")/.."
build=$1 minutes=$2 source=$PWD
mkdir -p "$build/found" "$build/grown"
build=$(cd "$build" && pwd)
unset MAKEFLAGS MFLAGS MAKELEVEL
cmake -S . -B "$build" -DHALFSTEP_TOOLS=ON -DHALFSTEP_IO=ON -DHALFSTEP_TESTS=UNIT -DHALFSTEP_FUZZ=ON -DCMAKE_C_COMPILER=clang \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DHALFSTEP_SANITIZE=fuzzer-no-link,address,undefined" >"$build/configure.log"
cmake --build "$build" --parallel "$(nproc)" --target fuzz >"$build/build.log"

targets=$(cd fuzz && ls fuzz_*.c | sed 's/\.c$//')
count=$(echo "$targets" | wc -w) python=
if [ -e "$source/build/venv/halfstep.installed" ]; then
    python=$source/build/venv/bin/python
    count=$((count + 1))
fi
# 0 would be no limit to libFuzzer.
seconds=$((minutes > 0 ? minutes * 60 / count : 1))
status=0
printf '| target | seconds | executions | found |\n|---|---|---|---|\n'
for target in $targets; do
    mkdir -p "$build/grown/$target"
    log=$build/$target.log
    found=nothing
    "$build/tests/$target" -max_total_time="$seconds" -print_final_stats=1 -rss_limit_mb=4096 -timeout=60 -max_len=16384 \
        -artifact_prefix="$build/found/$target-" "$build/grown/$target" "$source/fuzz/corpus/$target" >"$log" 2>&1 || {
        found=$(grep -aE '^SUMMARY|^fuzz_[a-z]*: ' "$log" | tail -n 2 | paste -sd ' ' | cut -c1-150)
        status=1
    }
    runs=$(sed -nE 's/^stat::number_of_executed_units: +//p' "$log")
    printf '| %s | %s | %s | %s |\n' "$target" "$seconds" "${runs:-?}" "$found"
done
if [ -n "$python" ]; then
    out=$(HALFSTEP_BUILD=$source/build "$python" fuzz/fuzz_state_dict.py --seconds "$seconds") || status=1
    printf '%s\n' "$out" | tail -n 1
    [ "$status" = 0 ] || printf '%s\n' "$out" | head -n -1
fi
[ $status = 0 ] || echo "see $build/*.log; an input of $build/found is run again by $build/tests/TARGET FILE" >&2
exit $status
