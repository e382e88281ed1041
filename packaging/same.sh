#!/bin/bash
# same.sh BUILD [TAG...]: makes the sdist and the wheels again, of a copy of the source in another folder and without what zig has kept,
# and holds them to those in BUILD/dist byte for byte. The device images are those of BUILD/packaging/images.
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
build=$(cd "$1" && pwd)
shift
other=$(mktemp -d)
trap 'rm -rf "$other"' EXIT
git clone -q "$source" "$other/copy"
git -C "$source" ls-files -z | tar -C "$source" --null -T - -c | tar -x -C "$other/copy"
mkdir -p "$other/elsewhere/packaging"
ln -s "$build/packaging/venv" "$other/elsewhere/packaging/venv"
export HALFSTEP_CUDA_IMAGES=$build/packaging/images ZIG_GLOBAL_CACHE_DIR=$other/zig
bash "$other/copy/packaging/wheels.sh" "$other/elsewhere" "$@"
different=
for file in "$other"/elsewhere/dist/*; do
    name=$(basename "$file")
    if cmp "$file" "$build/dist/$name"; then
        note=${name#halfstep-*-py3-none-}
        [ "$note" != "$name" ] || note=sdist
        python3 "$source/packaging/results.py" set "$build/packaging/results" "${note%.whl}" ran="built twice, the same bytes"
    else
        different="$different $name"
    fi
done
[ -z "$different" ] || { echo "FAIL other bytes when built in another folder:$different" >&2; exit 1; }
echo "ok   the same bytes when built again in another folder"
