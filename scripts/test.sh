#!/bin/bash
# test.sh check|test|all FOLDER JOBS: builds what the tests need in FOLDER and runs one tier of them: the short ones, those of
# `make test`, or all. Prints the slowest, what was left to `make test-all`, and last "N passed, M failed", where each case of
# pytest counts.
# test.sh again FOLDER JOBS CTEST-ARGUMENTS...: builds nothing, and runs the tests of `make test` that need no build of another kind.
set -u
tier=$1 build=$2 jobs=$3
shift 3
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
passed=0 failed=0

# run CTEST-ARGUMENTS...: runs some tests and adds their cases to the sums.
run() {
    local file=$build/Testing/Temporary/LastTest.log line
    rm -f "$file"
    (cd "$build" && exec ctest -j"$jobs" --output-on-failure --no-tests=error "$@") 2>&1 </dev/null | tee -a "$log"
    [ "${PIPESTATUS[0]}" = 0 ] || status=1
    # "93% tests passed, 1 tests failed out of 14"; from CMake 4 on, without the middle part if nothing failed.
    line=$(grep -aE '^[0-9]+% tests passed.* out of [0-9]+' "$log" | tail -n 1)
    add "${line##* }" "$(sed -nE 's/.*, ([0-9]+) tests? failed.*/\1/p' <<<"$line")"
    # "1 failed, 612 passed, 3 skipped in 70.05s": the cases of pytest, in place of the one test that they were above.
    while read -r line; do
        add "$(($(count passed "$line") + $(count failed "$line") + $(count error "$line") - 1))" \
            "$(($(count failed "$line") + $(count error "$line") - $(grep -cE 'failed|error' <<<"$line")))"
    done < <(grep -aE '^(=+ )?([0-9]+ [a-z]+, )*[0-9]+ (passed|failed|errors?|skipped).* in [0-9.]+s' "$file")
}
count() { sed -nE "s/.*\b([0-9]+) $1s?\b.*/\1/p;t;s/.*/0/p" <<<"$2"; }
add() {
    failed=$((failed + ${2:-0}))
    passed=$((passed + ${1:-0} - ${2:-0}))
}

if [ "$tier" = again ]; then
    run -LE all -E '^(build_|test_cuda_few|python_package)' -FA . "$@"
elif bash scripts/setup.sh $([ "$tier" = all ] && echo all || echo test) &&
    bash scripts/build.sh "$build" "$jobs" -DHALFSTEP_TESTS=ON -DHALFSTEP_WERROR=ON; then
    case $tier in
    check) run -C check -LE 'long|all' ;;
    test) run -LE all ;;
    all)
        run -LE all
        run -L all -FS python
        ;;
    esac
else
    status=1 failed=1
fi

echo
echo "the slowest, in seconds:"
sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec.*/\2 \1/p' "$log" | sort -rn | head -n 10 | sed 's/^/  /'
if [ "$tier" = check ] || [ "$tier" = test ]; then
    echo "left to make test-all:"
    (cd "$build" && ctest -N -L all -FS python) | sed -nE 's/^ *Test +#[0-9]+: ([^ ]+)/\1/p' | paste -sd ' ' | fold -sw 110 | sed 's/^/  /'
fi
# A log of CI may be cut in its middle, so failures stand at its end once more.
grep -aE '^(FAILED|ERROR) ' "$log" | sed 's/ - .*//' | sort -u | head -n 20
echo "$passed passed, $failed failed"
exit $status
