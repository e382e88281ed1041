#!/bin/bash
# Kills examples/resume.c at random instants and starts it again. It must end with the bits of a run that was never
# stopped. So must examples/train.cpp, by two compilers, and examples/halfstep.rs, each from a checkpoint of another.
# resume_test.sh [SEED]: the same seed gives the same instants.
. "$(dirname "$0")/../tools/lib.sh"
need cc
[ -e "$build_dir/libhalfstep_io.so" ] || skip "halfstep_io is not built"
make_scratch
seed=${1:-20251}
steps=3000 kills=25
cc -std=c11 -O2 -I"$source_dir/include" "$source_dir/examples/resume.c" -o "$scratch/resume" -L"$build_dir" -lhalfstep_io \
    -lhalfstep -lm -Wl,-rpath,"$build_dir" || fail "examples/resume.c does not compile"
cd "$scratch"

time_of() { # TIME VARIABLE: seconds that a run without kills takes, checkpoints included
    local start=$EPOCHREALTIME
    "${@:2}" || fail "$*"
    elapsed=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')
}
time_of whole ./resume whole $steps >whole.txt
expected=$(tail -1 whole.txt)
case "$expected" in "step $steps loss "*) ;; *) fail "an uninterrupted run printed '$expected'" ;; esac

RANDOM=$seed
resumed=0 killed=0 tries=0 last=0
while [ $killed -lt $kills ] && [ $((tries += 1)) -le $((4 * kills)) ]; do
    # Waits up to twice the time between evenly spread kills.
    pause=$(awk -v r=$RANDOM -v t="$elapsed" -v n=$kills 'BEGIN { printf "%.4f", 2 * t / n * r / 32768 + 0.005 }')
    ./resume run $steps >out.txt 2>err.txt &
    sleep "$pause"
    if kill -9 $! 2>/dev/null; then
        killed=$((killed + 1))
    else # The machine is faster than when the time was taken: once more from the start.
        killed=0
        elapsed=$(awk -v t="$elapsed" 'BEGIN { print t / 2 }')
        rm -rf run
    fi
    wait $! 2>/dev/null || true
    [ ! -s err.txt ] || fail "seed $seed: $(cat err.txt)"
done
# A killed run loses its buffered output, so this run tells which step was reached.
./resume run $steps >rest.txt || fail "seed $seed: the last run"
grep -q '^resumed at step' rest.txt && resumed=1
last=$(sed -n 's/^resumed at step //p' rest.txt)
[ "$killed" -eq $kills ] || fail "seed $seed: only $killed of $kills runs were killed"
[ $resumed = 1 ] && [ "$last" -gt 0 ] || fail "seed $seed: no checkpoint was left by $killed killed runs"
if [ "$last" -lt $steps ]; then
    [ "$(tail -1 rest.txt)" = "$expected" ] || fail "seed $seed: $(tail -1 rest.txt), uninterrupted $expected"
else
    # The loss belongs to the last step of this process. The hash covers everything stored.
    [ "$(tail -1 rest.txt | sed 's/.*hash //')" = "${expected##*hash }" ] || fail "seed $seed: $(tail -1 rest.txt), uninterrupted $expected"
fi
[ "$(ls -A run | grep -c '^checkpoint-')" = 1 ] || fail "seed $seed: left in the directory: $(ls -A run)"
# The next save removes the leftovers of a killed save. A run that had no step left made no save.
[ "$last" -ge $steps ] || ! ls -A run | grep -q '^\.halfstep' || fail "seed $seed: left in the directory: $(ls -A run)"
echo "ok   $killed kills, the last one after step $last of $steps: $expected"

# The error names what does not fit. Nothing is overwritten.
sed 's/adamw\/bf16-kahan\/int8/lion\/bf16-kahan\/int8/' "$source_dir/examples/resume.c" >other.c
cc -std=c11 -O2 -I"$source_dir/include" other.c -o other -L"$build_dir" -lhalfstep_io -lhalfstep -lm -Wl,-rpath,"$build_dir"
if ./other run $steps >out.txt 2>err.txt; then fail "another optimizer took the checkpoint"; fi
grep -q 'the recipe of tensor "hidden.weight" is lion/bf16-kahan/int8 here but adamw/bf16-kahan/int8 in run/' err.txt ||
    fail "another optimizer: $(cat err.txt)"
echo "ok   another optimizer is refused by name"

# The programs in C++ and Rust are one: each goes on from a checkpoint of the one before it.
link=(-L"$build_dir" -lhalfstep_io -lhalfstep -Wl,-rpath,"$build_dir")
programs=()
for compiler in g++ clang++; do
    command -v "$compiler" >/dev/null || { echo "left out: $compiler is not installed"; continue; }
    "$compiler" -std=c++17 -O2 -ffp-contract=off -Wall -Wextra -Wpedantic -Werror -I"$source_dir/include" \
        "$source_dir/examples/train.cpp" -o "train-$compiler" "${link[@]}" || fail "examples/train.cpp does not compile"
    programs+=("train-$compiler")
done
if command -v rustc >/dev/null && rustc --version >/dev/null 2>&1; then
    # Its structures have the sizes of C.
    sed -nE 's/.*size_of::<.*== ([0-9]+).*(sizeof\(\w+\)).*/_Static_assert(\2 == \1, "\2");/p' "$source_dir/examples/halfstep.rs" >sizes.h
    [ "$(wc -l <sizes.h)" = "$(grep -c 'repr(C)' "$source_dir/examples/halfstep.rs")" ] ||
        fail "examples/halfstep.rs does not check the size of each structure"
    printf '#include <halfstep_io.h>\n#include "sizes.h"\n' | cc -std=c11 -fsyntax-only -I"$source_dir/include" -I. -x c - ||
        fail "a structure of examples/halfstep.rs has another size in C"
    rustc --edition 2021 -O -D warnings "$source_dir/examples/halfstep.rs" -o train-rustc -L native="$build_dir" -l halfstep_io \
        -l halfstep -C link-arg=-Wl,-rpath,"$build_dir" || fail "examples/halfstep.rs does not compile"
    programs+=(train-rustc)
else
    echo "left out: rustc is not installed"
fi
[ ${#programs[@]} = 0 ] || "./${programs[0]}" "$source_dir/LICENSE" whole-run $((100 * ${#programs[@]})) >whole.txt ||
    fail "${programs[0]} learned nothing: $(cat whole.txt)"
steps=0
for program in "${programs[@]}"; do
    steps=$((steps + 100))
    "./$program" "$source_dir/LICENSE" parts $steps >parts.txt || fail "$program learned nothing: $(cat parts.txt)"
    for bad in "$source_dir/LICENSE" /dev/null; do
        if "./$program" "$bad" missing/parts $steps 2>err.txt >/dev/null; then fail "$program: no error for $bad, missing/parts"; fi
        grep -qE 'cannot create directory missing/parts|/dev/null: no text to learn' err.txt || fail "$program: $(cat err.txt)"
    done
done
if [ $steps != 0 ]; then
    for file in model optimizer; do
        cmp whole-run/$file.safetensors parts/$file.safetensors || fail "parts by ${programs[*]} differ from a whole run"
    done
    same=$(cat parts.txt)
    [ "$same" = "$(cat whole.txt)" ] || fail "$program: $same, uninterrupted $(cat whole.txt)"
    echo "ok   ${programs[*]}, one after the other: $same"
fi
