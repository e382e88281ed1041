#!/bin/sh
# Runs dieharder on the random words of a generator. Takes one to two hours a generator on one core.
#   tests/core/random_stats.sh GENERATOR [KIND...]      kinds: elements writes tensors slots (default: all; see random_stream.c)
# Environment: OUT (folder for logs, default build/random), SEED (default 1), CC, TESTS (default: the list below).
# Every test reads a strand of its own seed, so that no two tests judge the same words. A test with a weak or failed p-value
# (outside 0.005 .. 0.995: one in a hundred is expected) is repeated with two more seeds; a generator fails a test that
# fails once, or where the same p-value is weak all three times. Ends with a table; exits 1 if anything failed.
set -eu
cd "$(dirname "$0")/../.."
generator=${1:?usage: tests/core/random_stats.sh GENERATOR [KIND...]}
shift
out=${OUT:-build/random}
first_seed=${SEED:-1}
fields='-D test_name -D ntuple -D tsamples -D psamples -D pvalues -D assessment'
# Each is number or number:ntuple. The most telling and cheapest tests come first.
tests=${TESTS:-'0 1 3 4 8 9 10 11 12 13 15 16 17 100 101 102 205 206 209 202:2 202:3 202:4 202:5 200:1 200:2 200:3 200:4
200:5 200:6 200:7 200:8 200:9 200:10 200:11 200:12 207:32 208:0 208:1 203:0 203:1 203:2 203:3 203:4 203:5 203:7 2
201:2 201:3 201:4 201:5 204 203:15 203:16 203:31 203:32 5 6 7'}

command -v dieharder >/dev/null || { echo "random_stats.sh: dieharder is not installed" >&2; exit 2; }
mkdir -p "$out"
${CC:-cc} -std=c11 -O2 -ffp-contract=off -Isrc tests/core/random_stream.c -o "$out/random_stream"

run_test() { # kind seed test -> lines "seed|test|name|ntuple|tsamples|psamples|p|assessment"
    number=${3%%:*}
    options="-d $number"
    case $3 in *:*) options="$options -n ${3#*:}" ;; esac
    # shellcheck disable=SC2086
    "$out/random_stream" "$generator" "$1" "$2" | dieharder -g 200 $options $fields |
        awk -F'|' -v seed="$2" -v test="$3" 'NF >= 6 && $5 + 0 == $5 { gsub(/ /, ""); print seed "|" test "|" $0; fflush() }'
}

for kind in ${*:-elements writes tensors slots}; do
    log=$out/$generator-$kind.log
    : >"$log"
    seed=$((first_seed * 10000))
    for test in $tests; do
        seed=$((seed + 1))
        run_test "$kind" $seed "$test" >"$log.part"
        cat "$log.part" >>"$log"
        if grep -q -e WEAK -e FAILED "$log.part"; then
            run_test "$kind" $((seed + 1000)) "$test" >>"$log"
            run_test "$kind" $((seed + 2000)) "$test" >>"$log"
        fi
    done
    rm -f "$log.part"
done

tests/core/random_table.sh "$out"/"$generator"-*.log
