#!/bin/bash
# Holds the libraries' ABI to tests/golden/abi.txt, which lists it, and that list to the list of the last release (its
# tag). Lines may be added at any time. A line that changes or goes raises HALFSTEP_ABI and is a release note.
. "$(dirname "$0")/lib.sh"
need cc clang python3
cd "$source_dir"
make_scratch
list=tests/golden/abi.txt

python3 tests/abi.py >"$scratch/headers" || fail "tests/abi.py cannot read the headers"
diff "$list" "$scratch/headers" || fail "the headers differ from $list (>): 'make generate' writes it. A line that changes or
     goes breaks programs that are built already: restore it, or raise HALFSTEP_ABI and say so in CHANGELOG.md"
python3 tests/abi.py --program >"$scratch/layout.c"
cc -std=c11 -Wall -Wextra -Werror -Iinclude "$scratch/layout.c" -o "$scratch/layout" || fail "cc has another layout than clang"
echo "ok   the headers have the $(wc -l <"$list") lines of $list: $("$scratch/layout")"

# If this commit is a release, the one before it counts.
[ ! -e .git ] || git rev-parse --quiet --verify HEAD >/dev/null || fail "git cannot read this checkout"
tag=$(git describe --tags --abbrev=0 --match 'v[0-9]*' HEAD^ 2>/dev/null || true)
if [ -z "$tag" ]; then
    echo "ok   no release to compare with"
else
    git show "$tag:$list" >"$scratch/old"
    python3 tests/abi.py --since "$scratch/old" || fail "programs that were built with $tag break: restore these lines, or raise
     HALFSTEP_ABI and say so in CHANGELOG.md"
    echo "ok   nothing breaks programs that were built with $tag"
fi

# since WHAT STATUS SED-SCRIPT: fails unless a list that the script makes of ours, as an older one, gives the status.
since() {
    local status=0
    sed -E "$3" "$list" >"$scratch/old"
    ! cmp -s "$scratch/old" "$list" || fail "'$3' changes nothing in $list"
    python3 tests/abi.py --since "$scratch/old" >"$scratch/said" || status=$?
    [ "$status" = "$2" ] || fail "$1: status $status, not $2: $(cat "$scratch/said")"
}
size=$(sed -nE 's/^structure halfstep_call ([0-9]+)$/\1/p' "$list")
since "a new function" 0 '/^function halfstep_abi /d'
since "a new constant and a new callback" 0 '/^(constant HALFSTEP_MAX_SPLIT|callback halfstep_task) /d'
since "a structure that grew" 0 "/^member halfstep_call\.ahead /d; s/^(structure halfstep_call) .*/\1 $((size - 8))/"
since "a member in place of a reserved one" 0 's/^(member halfstep_slot_info\.)precise /\1reserved2 /'
since "a member in padding" 1 '/^member halfstep_save_options\.prune_if /d'
since "a structure that shrank" 1 "s/^(structure halfstep_call) .*/\1 $((size + 8))/"
since "a structure without struct_size that grew" 1 's/^(structure halfstep_ahead) .*/\1 8/'
since "a function that is gone" 1 '$a function halfstep_gone libhalfstep void (void)'
since "a function of another type" 1 's/^(function halfstep_abi libhalfstep) int32_t/\1 int64_t/'
since "a member that moved" 1 's/^(member halfstep_call\.tensor) 8/\1 12/'
since "an error code of another value" 1 's/^(constant HALFSTEP_ERROR_IO) .*/\1 -1/'
since "anything under a new number" 0 's/^abi .*/abi 0/; $a function halfstep_gone libhalfstep void (void)'
echo "ok   changes that break programs are told from additions"
