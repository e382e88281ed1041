#!/bin/bash
# coverage.sh BUILD [JOBS]: builds with gcc's coverage counters, runs the test programs and the shell tests that use the program,
# and prints coverage per folder. What is not covered goes to BUILD/uncovered.txt.
set -eu
cd "$(dirname "$0")/.."
build=$1 jobs=${2:-2} source=$PWD
# Threads count too; the kernels' loops would take minutes without optimization.
bash scripts/build.sh "$build" "$jobs" -DHALFSTEP_TESTS=UNIT -DHALFSTEP_SHORT_TESTS=ON -DCMAKE_BUILD_TYPE=None \
    "-DCMAKE_C_FLAGS=-O1 --coverage -fprofile-update=prefer-atomic"
build=$(cd "$build" && pwd)
find "$build" -name '*.gcda' -delete
(cd "$build" && ctest -j"$jobs" >ctest.log 2>&1) || tail -n 20 "$build/ctest.log" >&2
export HALFSTEP_SOURCE=$source HALFSTEP_BUILD=$build
for script in cli compare mnist faults; do
    bash "tests/${script}_test.sh" >"$build/$script.log" 2>&1 || echo "tests/${script}_test.sh failed: $build/$script.log" >&2
done
exec python3 scripts/coverage.py "$build"
