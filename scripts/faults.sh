#!/bin/bash
# faults.sh BUILD: the long form of the tests of faults; prints the rows of docs/reliability.md. Each part goes on after a failure of
# another; the exit status says whether there was one. What needs Python and torch runs where `make test` has made its environment.
set -u
cd "$(dirname "$0")/.."
export HALFSTEP_SOURCE=$PWD
HALFSTEP_BUILD=$(cd "$1" && pwd)
export HALFSTEP_BUILD
build=$HALFSTEP_BUILD
status=0
part() {
    echo "==> $*"
    "$@" || {
        status=1
        echo "FAIL $*"
    }
}
part python3 tests/faults/sweep.py --jobs "$(nproc)"
# Both again where a sanitizer sees what they leave behind.
part bash scripts/build.sh "$build/asan" "$(nproc)" --preset asan -DCMAKE_C_COMPILER=clang
part "$build/asan/tests/test_faults" --all
part "$build/asan/tests/test_program_faults" --all
part env HALFSTEP_BUILD="$build/asan" python3 tests/faults/sweep.py --every 4 --jobs "$(nproc)"
part python3 tests/faults/durability.py --all
part "$build/tests/test_kill_save" 1000
part "$build/tests/test_store" 1000
part "$build/tests/test_long_run" 1000000
part bash tests/program/mpi_test.sh long
if [ -e "$build/venv/halfstep.installed" ]; then
    export OMP_NUM_THREADS=1
    part env LD_PRELOAD=libfaults.so LD_LIBRARY_PATH="$build/tests" "$build/venv/bin/python" tests/faults/python_sweep.py
    part "$build/venv/bin/python" tests/faults/peers.py
fi
exit $status
