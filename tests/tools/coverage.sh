#!/bin/bash
# coverage.sh FOLDER JOBS: builds this tree in FOLDER with gcov's counters, runs the test programs and scripts that use that build,
# and prints how many branches they took. It prints two tables, because a branch that is inlined into hundreds of kernels is counted
# once for each place. Code that is compiled once has branches; kernels and the headers inlined into them have lines.
# FOLDER/branches.txt and FOLDER/lines.txt list what was not reached; docs/reliability.md says why.
set -eu
folder=$1 jobs=$2
cd "$(dirname "$0")/../.."
bash scripts/build.sh "$folder" "$jobs" -DCMAKE_BUILD_TYPE=None -DHALFSTEP_TESTS=ON -DHALFSTEP_SHORT_TESTS=ON \
    -DCMAKE_C_FLAGS="-O1 -g --coverage -fprofile-abs-path -fprofile-update=atomic -DHSTEP_COVERAGE=1"
find "$folder" -name '*.gcda' -delete
# Leaves out tests that build or install a tree of their own, because they would count nothing here.
export HSTEP_FAULT_UNTIL_EXIT=1
failed=0
(cd "$folder" && ctest -j"$jobs" --timeout 3000 -E '^(build_|python|install|by_hand|mingw|new_rows|size|structure)' >ctest.log 2>&1) ||
    failed=1
# Takes every place. The tests above take some of them.
"$folder/tests/test_program_faults" --all >>"$folder/ctest.log" 2>&1 || failed=1
bash scripts/venv.sh "$folder/gcovr" scripts/pins/gcovr.txt

# report NAME METRIC TEXT FILTERS...: prints the table, and writes the list of missing places.
report() {
    local name=$1 metric=$2
    shift 2
    "$folder/gcovr/bin/gcovr" -r . --object-directory "$folder" --gcov-ignore-parse-errors=all \
        --merge-mode-functions=merge-use-line-min --exclude-unreachable-branches --txt-metric "$metric" --txt "$folder/$name.txt" "$@" \
        >/dev/null 2>"$folder/gcovr.log" || { cat "$folder/gcovr.log"; exit 1; }
}
inlined='src/(kernels/(kernels\.[ch]|pair\.h|tiles\.h|fused\.h|product\.h|fused\.def)|base/(scale|rng)\.h|vec/|formats/|rules/)'
report lines line --filter "$inlined"
report branches branch --filter src/ --filter tools/ --exclude "$inlined"

# total PREFIX METRIC: adds up the files of a table whose names begin with PREFIX.
total() {
    awk -v prefix="$1" -v what="$2" -v name="$3" '
        index($1, prefix) == 1 && $2 ~ /^[0-9]+$/ { all += $2; taken += $3 }
        END { if (all) printf "%-28s %6d of %6d %s  %5.1f %%\n", name, taken, all, what, 100 * taken / all }' "$folder/$4.txt"
}
total src/ branches "src, compiled once" branches
total src/io/ branches "  of which src/io" branches
total tools/ branches "tools" branches
total src/ lines "src, inlined into kernels" lines
[ "$failed" = 0 ] || { echo "some tests failed: $folder/ctest.log" >&2; exit 1; }
