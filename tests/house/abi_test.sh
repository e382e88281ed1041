#!/bin/bash
# Holds the libraries' ABI to that of the last release (its tag), of which tests/golden/abi.txt is the list. Lines may be added at any
# time. A line that changes or goes raises HALFSTEP_ABI and is a release note. (test_typing.py holds the list to the headers.)
. "$(dirname "$0")/../tools/lib.sh"
need cc clang python3
cd "$source_dir"
make_scratch
list=tests/golden/abi.txt

python3 tests/house/abi.py >"$scratch/headers" || fail "tests/house/abi.py cannot read the headers"
python3 tests/house/abi.py --program >"$scratch/layout.c"
cc -std=c11 -Wall -Wextra -Werror -Iinclude "$scratch/layout.c" -o "$scratch/layout" || fail "cc has another layout than clang"
echo "ok   the headers have $(wc -l <"$scratch/headers") lines: $("$scratch/layout")"

# If this commit is a release, the one before it counts.
[ ! -e .git ] || git rev-parse --quiet --verify HEAD >/dev/null || fail "git cannot read this checkout"
tag=$(git describe --tags --abbrev=0 --match 'v[0-9]*' HEAD^ 2>/dev/null || true)
if [ -z "$tag" ]; then
    echo "ok   no release to compare with"
else
    git show "$tag:$list" >"$scratch/old"
    python3 tests/house/abi.py --since "$scratch/old" || fail "programs that were built with $tag break: restore these lines, or raise
     HALFSTEP_ABI and say so in CHANGELOG.md"
    echo "ok   nothing breaks programs that were built with $tag"
fi

# since STATUS WHAT SED-SCRIPT: fails unless a small list that the script changes gives the status after the list as it is.
cat >"$scratch/small" <<'L'
abi 2
constant MOST 16
structure sized 24
member sized.struct_size 0 4 uint32_t
member sized.kind 4 4 int32_t
member sized.name 8 8 const char *
member sized.last 16 4 int32_t
structure pair 16
member pair.first 0 8 void *
member pair.second 8 4 int32_t
member pair.reserved 12 4 int32_t
function make library int (sized *)
L
since() {
    local status=0
    sed -E "$3" "$scratch/small" >"$scratch/new"
    ! cmp -s "$scratch/small" "$scratch/new" || fail "'$3' changes nothing"
    python3 tests/house/abi.py --since "$scratch/small" "$scratch/new" >"$scratch/said" || status=$?
    [ "$status" = "$1" ] || fail "$2: status $status, not $1: $(cat "$scratch/said")"
}
since 0 "a new function" '$a function more library void (void)'
since 0 "a new constant and a new structure" '$a constant LEAST 1\nstructure other 8\nmember other.x 0 8 double'
since 0 "a structure that grew" 's/(sized) 24/\1 32/; $a member sized.more 24 8 void *'
since 0 "a member in place of a reserved one" 's/(pair\.)reserved/\1third/'
since 1 "a member in padding" '$a member sized.more 20 4 int32_t'
since 1 "a member in the middle" 's/(sized) 24/\1 32/; s/(sized\.last) 16/\1 24/; $a member sized.more 16 8 void *'
since 1 "a structure that shrank" 's/(sized) 24/\1 16/; /sized\.last/d'
since 1 "a structure without struct_size that grew" 's/(pair) 16/\1 24/; $a member pair.more 16 8 double'
since 1 "a member of another type" 's/(sized\.kind 4 4) int32_t/\1 float/'
since 1 "a function that is gone" '/function make/d'
since 1 "a function of another type" 's/(make library) int/\1 void/'
since 1 "a constant of another value" 's/(MOST) 16/\1 17/'
since 1 "an older number" 's/abi 2/abi 1/'
since 0 "anything under a new number" 's/abi 2/abi 3/; /function make/d; s/(sized\.last) 16/\1 20/'
echo "ok   changes that break programs are told from additions"
