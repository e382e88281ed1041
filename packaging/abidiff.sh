#!/bin/bash
# abidiff.sh BUILD [TAG]: compares the libraries of this tree with those of TAG by abidiff, which reads their debug information. TAG is
# the last release before this commit if not given. Fails if programs that were built with TAG could misbehave and HALFSTEP_ABI has not
# risen. tests/house/abi_test.sh judges the list of the headers; this judges what was compiled.
set -eu
cd "$(dirname "$0")/.."
folder=$1/abi
tag=${2:-$(git describe --tags --abbrev=0 --match 'v[0-9]*' HEAD^ 2>/dev/null || true)}
[ -n "$tag" ] || { echo "abidiff: there is no release to compare with yet"; exit 0; }
bash scripts/setup.sh packages
abi() { sed -n 's/^#define HALFSTEP_ABI *//p' "$1/include/halfstep.h"; }

rm -rf "$folder/old" "$folder/old-build"
mkdir -p "$folder/old"
git archive "$tag" | tar x -C "$folder/old"
if [ "$(abi .)" -gt "$(abi "$folder/old")" ]; then
    echo "abidiff: HALFSTEP_ABI is $(abi .), and was $(abi "$folder/old") in $tag: nothing built then loads this library"
    exit 0
fi

# Public functions and structures are the same in every build, so the quickest one will do.
compile() {
    cmake -S "$1" -B "$folder/$2" -DCMAKE_BUILD_TYPE=Debug -DHALFSTEP_ISAS=scalar -DHALFSTEP_CUDA=OFF -DHALFSTEP_TOOLS=OFF \
        -DHALFSTEP_TESTS=OFF -DHALFSTEP_IO=ON &&
        cmake --build "$folder/$2" --parallel "$(nproc)" --target halfstep halfstep_io
}
for pair in "$folder/old old-build" ". new-build"; do
    # shellcheck disable=SC2086
    compile $pair >"$folder/log" 2>&1 || { tail -n 30 "$folder/log" >&2; echo "abidiff: $pair does not build" >&2; exit 1; }
done

# Structures say their size in struct_size, so that they may grow at the end.
cat >"$folder/growth" <<'S'
[suppress_type]
  type_kind = struct
  name_regexp = ^halfstep_
  has_data_member_inserted_at = end
S
status=0
for library in libhalfstep libhalfstep_io; do
    abidiff --no-added-syms --suppressions "$folder/growth" --headers-dir1 "$folder/old/include" --headers-dir2 include \
        "$folder/old-build/$library.so" "$folder/new-build/$library.so" || status=$?
    [ "$status" = 0 ] || { echo "abidiff: $library breaks what was built with $tag: restore it, or raise HALFSTEP_ABI" >&2; exit 1; }
    echo "ok   $library breaks nothing that was built with $tag"
done
