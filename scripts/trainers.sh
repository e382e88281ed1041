#!/bin/bash
# trainers.sh FOLDER [--write | ENVIRONMENT...]: runs the tests of trainers, each trainer's own packages in an environment of their
# own under FOLDER/trainers, and holds the table of docs/frameworks.md to the results; --write writes it. With environments named
# (folders of tests/trainers, or "main" for the trainers that the environment of tests/python has) it runs only those.
set -eu
cd "$(dirname "$0")/.."
build=$(mkdir -p "$1" && cd "$1" && pwd)
shift
write=
[ "${1:-}" != --write ] || { write=--write && shift; }
all=(main)
for list in tests/trainers/*/requirements.in; do
    all+=("$(basename "$(dirname "$list")")")
done
[ $# != 0 ] || set -- "${all[@]}"

export HALFSTEP_BUILD=$build HALFSTEP_SOURCE=$PWD
mkdir -p "$build/trainers"
status=0
for name; do
    echo "== $name"
    export HALFSTEP_CELLS=$build/trainers/$name.json
    rm -f "$HALFSTEP_CELLS"
    if [ "$name" = main ]; then
        bash tests/tools/run_python.sh -m cell tests/python || status=1
    elif [ ! -e "tests/trainers/$name/requirements.in" ]; then
        echo "unknown environment '$name'; known: ${all[*]}" >&2
        exit 2
    elif bash scripts/pins.sh --lock "$build/trainers/$name.txt" "tests/trainers/$name/requirements.in" 3.11 --no-deps &&
        bash scripts/venv.sh "$build/trainers/$name" "$build/trainers/$name.txt"; then
        HALFSTEP_LIBRARY=$build/libhalfstep.so HALFSTEP_IO_LIBRARY=$build/libhalfstep_io.so PYTHONPATH=python OMP_NUM_THREADS=1 \
            "$build/trainers/$name/bin/python" -m pytest -q -rs -p no:cacheprovider "tests/trainers/$name" || {
            echo "     reproduce: bash scripts/trainers.sh $build $name"
            status=1
        }
    else
        status=1
    fi
done
[ $# != ${#all[@]} ] || PYTHONPATH=tests/python:scripts "$build/venv/bin/python" tests/trainers/table.py "$build/trainers" $write || status=1
exit $status
