#!/bin/bash
# Detects losses of speed without being disturbed by a busy machine. No row may need more instructions than its budget
# in bench/instructions.csv (`make budgets` records them). The counter itself is compared with the processor's own
# single steps, and the check with budgets lowered by hand.
. "$(dirname "$0")/../tools/lib.sh"
need python3 cc objdump readelf
cache=$build_dir/CMakeCache.txt
[ -e "$build_dir/libhalfstep.so" ] && [ -e "$cache" ] || fail "$build_dir/libhalfstep.so is not built"
cached() { sed -n "s/^$1:[A-Z]*=//p" "$cache"; }
loose=
case "$(cached CMAKE_BUILD_TYPE)" in
Release) ;;
RelWithDebInfo) loose=--loose ;;
*) skip "only optimized builds have budgets" ;;
esac
[ -z "$(cached HALFSTEP_SANITIZE)" ] || skip "builds with sanitizers have no budgets"
[ -z "$(cached CMAKE_C_FLAGS)" ] || loose=--loose
make_scratch
count() { python3 "$source_dir/lab/instructions.py" "$@"; }

# Both counts leave out the C library. Two rows are counted: one through tiles, one fused.
if [ "$(uname -m)" = x86_64 ]; then
    cc -std=c11 -O1 -I"$source_dir/include" "$source_dir/lab/instructions.c" -o "$scratch/instructions" -ldl
    for mode in "" --single-step; do
        # shellcheck disable=SC2086
        "$scratch/instructions" "$build_dir/libhalfstep.so" $mode --isa "$("$build_dir/halfstep" info --json | python3 -c \
            'import json, sys; print(json.load(sys.stdin)["isa"])')" lion/f32/f32 sgd/f32/f32 >"$scratch/count$mode" ||
            skip "code cannot be counted here"
    done
    cmp "$scratch/count" "$scratch/count--single-step" || { cat "$scratch"/count*; fail "single steps count otherwise"; }
    echo "ok   single steps count the same: $(tr '\n' ' ' <"$scratch/count")"
fi

# Makes the whole count once. The tool says what it counts, and why it cannot.
budgets=$source_dir/bench/instructions.csv counts=$scratch/counts.csv status=0
count "$build_dir" --write "$counts" || status=$?
[ "$status" != 77 ] || skip "code cannot be counted here"
[ "$status" = 0 ] || fail "lab/instructions.py $build_dir"
# alarm FILE ARGUMENTS...: runs the check against these budgets, with its output in $scratch/log.
alarm() {
    local file=$1
    shift
    count "$counts" --check "$file" "$@" >"$scratch/log" 2>&1
}
# shellcheck disable=SC2086
alarm "$budgets" $loose || status=$?
cat "$scratch/log"
[ "$status" != 77 ] || skip "bench/instructions.csv has nothing for this machine"
[ "$status" = 0 ] || fail "budgets of instructions: reproduce with lab/instructions.py $build_dir --check bench/instructions.csv $loose"

# edited SCRIPT: makes budgets from these counts with an awk script. raised WHAT TEXT: checks that the check fails with
# this line only.
edited() { awk -F, -v OFS=, "$1 { print }" "$counts" >"$scratch/budgets.csv"; }
raised() {
    if alarm "$scratch/budgets.csv"; then fail "no alarm: $1"; fi
    [ "$(grep -cE "^FAIL" "$scratch/log")" = 1 ] && grep -qE "^FAIL $2" "$scratch/log" || { cat "$scratch/log"; fail "the alarm after $1 does not say: $2"; }
}
isa=$(awk -F, 'NR == 2 { print $2 }' "$counts") row=adamw/f32/f32
one="\$2 == \"$isa\" && \$3 == \"$row\""
edited "$one { \$4 /= 1.04 }"
raised "a budget lowered by 4 %" "$row, $isa: [0-9.]+ instructions for each element; its budget is [0-9.]+, and [0-9.]+ the most"
edited "$one { \$5 /= 1.12 }"
raised "a small tensor's budget lowered" "$row, $isa: [0-9]+ instructions for a small tensor; its budget is [0-9]+,"
edited "$one { next }"
raised "a budget left out" "$row, $isa: has no budget"
edited "$one { print; \$3 = \"adamw/no/more\" }"
raised "a budget of a row that is gone" "adamw/no/more, $isa: has a budget, and is no row any more"
# A compiler without recorded budgets may need at most 30 % more.
edited "NR > 1 { \$1 = \"another 1\" } $one { \$4 /= 1.2 }"
alarm "$scratch/budgets.csv" || { cat "$scratch/log"; fail "a compiler without budgets is held to another's"; }
edited "NR > 1 { \$1 = \"another 1\" } $one { \$4 /= 1.4 }"
raised "another compiler's budget, a third lower" "$row, $isa: "
echo "ok   budgets lowered or left out raise the alarm"
