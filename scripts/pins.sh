#!/bin/bash
# pins.sh [LIST...]: writes the hashes of all files of every version into lists of Python packages, into all of the tree if none is named.
# A list NAME.txt beside NAME.in is made of it: what NAME.in names, and what that draws in. It keeps its versions while they fit;
# to change one, change it in NAME.txt. Other lists are complete by hand: a line NAME==VERSION each. The machine's pip must find the CPU
# build of torch, by PIP_FIND_LINKS, which gets a hash beside the files of the index.
set -eu
export LC_ALL=C # ranges such as [A-Z] and the order of sort follow the language otherwise
cd "$(dirname "$0")/.."
[ $# != 0 ] || set -- $(git ls-files '*requirements.txt' 'scripts/pins/*.txt')
bash scripts/venv.sh build/pins scripts/pins/uv.txt
python=build/pins/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# compile ARGUMENT...: runs uv for the oldest Python that the lists are used with.
compile() { "$python" -m uv pip compile --quiet --no-header --generate-hashes --python-version 3.11 "$@"; }

# torch FILE: gives torch in a list the hashes of the CPU build and of the index's files for other systems. pip would take the index's
# file for Linux, a CUDA build, before a file without a known hash.
torch() {
    local version
    version=$(sed -nE 's/^torch==([0-9.]+)\+.*/\1/p' "$1")
    if [ -z "$version" ]; then
        ! grep '^torch==' "$1" >/dev/null || { echo "pins.sh: pip offers no CPU build of torch; set PIP_FIND_LINKS to a folder or page that has it" >&2 && exit 1; }
        return 0
    fi
    [ -d "$scratch/torch" ] || "$python" -m pip download --quiet --no-deps -d "$scratch/torch" "torch==$version" 2>/dev/null
    {
        echo "torch==$version \\"
        echo "torch==$version" | UV_FIND_LINKS='' compile --no-deps --universal --format pylock.toml - | sed 's/}, {/\n/g' |
            sed -nE '/linux/d; s/.* sha256 = "([0-9a-f]+)".*/    --hash=sha256:\1 \\/p'
        echo "    $("$python" -m pip hash "$scratch/torch/torch-$version+"* | tail -n 1)"
    } >"$scratch/all"
    awk -v all="$scratch/all" '
        /^torch==/ { while ((getline line <all) > 0) print line; own = 1; next }
        own && /^    --hash/ { next }
        { own = 0; print }' "$1" >"$scratch/torch.txt"
    mv "$scratch/torch.txt" "$1"
}

export UV_FIND_LINKS=${PIP_FIND_LINKS:-}
for list; do
    source=${list%.txt}.in
    sed '/^[^#]/,$d' "$list" >"$scratch/list"
    if [ -e "$source" ]; then
        sed -nE 's/^([A-Za-z0-9._-]+==[^ ;]+).*/\1/; s/^torch==.*/&+cpu/; /^[A-Za-z]/p' "$list" >"$scratch/pins.txt"
        compile "$source" -o "$scratch/pins.txt" >/dev/null
    else
        compile --no-deps --no-annotate "$list" >"$scratch/pins.txt"
    fi
    torch "$scratch/pins.txt"
    cat "$scratch/list" "$scratch/pins.txt" >"$list"
done
