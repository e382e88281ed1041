#!/bin/bash
# pins.sh [LIST...]: writes the hashes of all files of every version into lists of Python packages, into all of the tree if none is named.
# A list NAME.txt beside NAME.in is made of it: what NAME.in names, and what that draws in. It keeps its versions while they fit;
# to change one, change it in NAME.txt. Other lists are complete by hand: a line NAME==VERSION each. The machine's pip must find the CPU
# build of torch, by PIP_FIND_LINKS, which gets a hash beside the files of the index.
#
# pins.sh --lock FILE LIST PYTHON ARGUMENT...: writes such a list into FILE, which is not part of the tree, for a version of Python. LIST
# says what is asked for, and on its line "# date: YYYY-MM-DD" a day: files that the index got after it do not count. Does nothing if FILE
# is newer than LIST. Arguments go to uv.
set -eu
export LC_ALL=C # ranges such as [A-Z] and the order of sort follow the language otherwise
cd "$(dirname "$0")/.."
lock=
if [ "${1:-}" = --lock ]; then
    lock=$2 asked=$3 python_version=$4
    shift 4
    [ ! "$lock" -nt "$asked" ] || exit 0
    date=$(sed -nE 's/^# date: (20[0-9]{2}-[0-9]{2}-[0-9]{2})$/\1/p' "$asked")
    [ -n "$date" ] || { echo "pins.sh: $asked has no line '# date: YYYY-MM-DD'" >&2 && exit 1; }
fi
[ -n "$lock" ] || [ $# != 0 ] || set -- $(git ls-files '*requirements.txt' 'scripts/pins/*.txt')
bash scripts/venv.sh build/pins scripts/pins/uv.txt
python=build/pins/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# compile ARGUMENT...: runs uv for a version of Python, else for the oldest that the lists of the tree are used with.
compile() {
    "$python" -m uv pip compile --no-progress --no-header --generate-hashes --python-version "${python_version:-3.11}" "$@" 2>"$scratch/log" ||
        { cat "$scratch/log" >&2 && return 1; }
}

# torch FILE: gives torch in a list the hashes of the CPU build and of the index's files for other systems. pip would take the index's
# file for Linux, a CUDA build, before a file without a known hash.
torch() {
    local version
    version=$(sed -nE 's/^torch==([0-9.]+)\+.*/\1/p' "$1")
    if [ -z "$version" ]; then
        [ -n "$lock" ] || ! grep '^torch==' "$1" >/dev/null || { echo "pins.sh: pip offers no CPU build of torch; set PIP_FIND_LINKS to a folder or page that has it" >&2 && exit 1; }
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
if [ -n "$lock" ]; then
    if ! compile --no-annotate --exclude-newer "$date" "$@" "$asked" >"$scratch/lock.txt" 2>"$scratch/said"; then
        grep -q "missing an upload date" "$scratch/said" || { cat "$scratch/said" >&2 && exit 1; }
        echo "pins.sh: the index has no dates of its files; the versions that $asked names count alone" >&2
        compile --no-annotate "$@" "$asked" >"$scratch/lock.txt"
    fi
    torch "$scratch/lock.txt"
    mv "$scratch/lock.txt" "$lock"
    exit 0
fi
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
