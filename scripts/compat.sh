#!/bin/bash
# compat.sh BUILD FOLDER [read]: writes one file of each kind that later versions have to read into FOLDER, which must be new or empty, and
# reads them back. With "read", reads what is there. BUILD has the C programs of the tests and an environment of Python, or PYTHON names one.
#
#   FOLDER/c         by tests/io/test_compat.c: a checkpoint of every storage format, a file of an optimizer, a file of states
#   FOLDER/program   checkpoints of `halfstep train lm` on one process and, where there is MPI, on three
#   FOLDER/python    by scripts/compat.py: state dictionaries, a pickle, a file of states, weights of 8 bits, averages, sums
#
# expected.txt and expected.json in these folders have hashes of what was saved, and of what it becomes in some steps more.
set -eu
export LC_ALL=C # ranges such as [A-Z] and the order of sort follow the language otherwise
build=$(cd "$1" && pwd) mode=${3:-write}
mkdir -p "$2"
folder=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-$build/venv/bin/python}
program=$build/halfstep
fail() {
    echo "FAIL $*" >&2
    exit 1
}

# train RANKS CHECKPOINT ARGUMENT...: a run of three steps. Prints its hash of weights and states.
train() {
    local start=()
    [ "$1" = 1 ] || start=(mpirun -n "$1")
    (
        . tests/program/mpi.sh
        "${start[@]}" "$program" train lm --data data/demo.txt --recipe adamw/bf16-ecc8/int8 --width 64 --depth 1 --heads 2 --context 32 \
            --batch 2 --micro-steps 3 --accumulator tree --steps 3 --threads 1 --val-every 0 --eval-batches 1 --sample-bytes 0 --seed 9 \
            --quiet --json --checkpoint "$2" "${@:3}"
    ) | sed -nE 's/^ *"state_hash": "(.*)",?$/\1/p'
}

if [ "$mode" = write ]; then
    [ -z "$(ls -A "$folder")" ] || fail "$folder is not empty; files that a release has left are not replaced"
    mkdir "$folder/c" "$folder/program" "$folder/python"
    "$build/tests/test_compat" --write "$folder/c"
    ranks=1
    [ ! -e "$build/libhalfstep_mpi.so" ] || ! command -v mpirun >/dev/null || ranks="1 3"
    [ "$ranks" != 1 ] || echo "This machine or build has no MPI, so there is no checkpoint of three processes."
    for n in $ranks; do
        echo "$n $(train "$n" "$folder/program/$n")" >>"$folder/program/expected.txt"
    done
    "$python" scripts/compat.py write "$folder/python"
fi

"$build/tests/test_compat" --read "$folder/c" || fail "files of C"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
while read -r n hash; do
    cp -R "$folder/program/$n" "$scratch/$n" # a run writes to its folder
    found=$(train 1 "$scratch/$n" --resume)
    [ -n "$hash" ] && [ "$found" = "$hash" ] || fail "the checkpoint of $n processes is '$found', not '$hash'"
done <"$folder/program/expected.txt"
for path in c/checkpoint c/optimizer.safetensors c/run.states program/1 python/lamb.safetensors python/run.states; do
    "$program" inspect "$folder/$path" >"$scratch/log" || fail "the program does not inspect $path: $(cat "$scratch/log")"
done
echo "ok   files of C, of the program and of Python are read by the program"
[ "$mode" = write ] || "$python" scripts/compat.py read "$folder/python"
