#!/bin/bash
# Tests what packages are made and checked with: lists of Python packages have hashes, nothing is downloaded in another way or
# at run time, and packaging/check.py refuses wheels that are broken. (make check leaves it out)
. "$(dirname "$0")/lib.sh"
need git python3 nm
cd "$source_dir"
make_scratch

# unpinned FILE...: prints what lists of Python packages do not pin: a requirement without ==, or without a hash.
unpinned() {
    awk '
        function finish() { if (name != "" && !hashes) print file ": " name " has no hash"; name = "" }
        FNR == 1 { finish(); file = FILENAME }
        /^ *(#|$)/ { next }
        /^ +--hash=sha256:[0-9a-f]+( \\)?$/ && length($1) == 78 { hashes++; next }
        { finish(); name = $1; hashes = 0 }
        !/^[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z,]+\])?==[0-9][A-Za-z0-9.]*( ; .*)?( \\)?$/ { print file ": " $0 " is no version of a package" }
        END { finish() }' "$@"
}
mapfile -t lists < <(git ls-files '*requirements*.txt' 'scripts/pins/*.txt')
[ ${#lists[@]} -ge 8 ] || fail "found only the lists ${lists[*]}"
found=$(unpinned "${lists[@]}")
[ -z "$found" ] || fail "$found; scripts/pins.sh writes hashes"
hash=$(printf '%064d' 0)
for line in "name" "name>=1 --hash=sha256:$hash" "name==1" "name==1 --hash=md5:$hash" "https://example.org/name.whl" "-r other.txt"; do
    printf 'first==1.0 \\\n    --hash=sha256:%s\n' "$hash" >"$scratch/list.txt"
    [ -z "$(unpinned "$scratch/list.txt")" ] || fail "a good list is refused: $(unpinned "$scratch/list.txt")"
    echo "${line/ --/$' \\\n    --'}" >>"$scratch/list.txt"
    [ -n "$(unpinned "$scratch/list.txt")" ] || fail "'$line' is not noticed in a list"
done
for list in "${lists[@]}"; do
    [ ! -e "${list%.txt}.in" ] && continue
    for name in $(sed -nE 's/^([A-Za-z0-9._-]+).*/\1/p' "${list%.txt}.in"); do
        grep -qiE "^$(echo "$name" | sed 's/[-_.]/[-_.]/g')==" "$list" || fail "$list lacks $name; scripts/pins.sh makes it of ${list%.txt}.in"
    done
done
echo "ok   every version in ${#lists[@]} lists of Python packages has hashes"

# downloads FILE...: prints lines that fetch something, but for pip with hashes or without an index.
downloads() {
    grep -HnE '\b(curl|wget|git clone|urlopen|urlretrieve|requests\.get|FetchContent|ExternalProject|hf_hub_download|snapshot_download)\b|file\(DOWNLOAD|pip3?["'"'"', ]+(install|download)' "$@" |
        grep -vE -- '--require-hashes|--no-index|^[^:]*:[0-9]+: *#' || true
}
# Files that fetch on purpose, each with its reason.
purpose='^(
packaging/try\.sh|         what the pip of a user does, with the newest torch
tests/packaging_test\.sh|   its own patterns
scripts/pins\.sh|           hashes of what it fetches go into the lists
tests/python/test_(files_of_others|integrations)\.py|  error texts that say what to install
)$'
purpose=$(echo "$purpose" | sed 's/ .*//' | tr -d '\n' | sed 's/|)/)/')
mapfile -t scripts < <(git ls-files '*.sh' '*.cmake' '*CMakeLists.txt' Makefile '.ci/*' 'scripts/*.py' 'packaging/*' 'tests/*.py' 'lab/*.py' 'bench/*.py' '.github/*' |
    grep -vE "$purpose")
found=$(downloads "${scripts[@]}")
[ -z "$found" ] || fail "fetched without a hash: $found"
for line in "curl -O x" "wget x" "git clone x" "pip install torch" "python -m pip download torch" "[python, '-m', 'pip', 'install', 'x']" "file(DOWNLOAD x y)"; do
    echo "$line" >"$scratch/script"
    [ -n "$(downloads "$scratch/script")" ] || fail "'$line' is not noticed as a download"
done
echo "ok   scripts fetch Python packages by these lists, and nothing else but Debian packages"

found=$(git grep -nE '^ *(import|from) (urllib|http|socket|requests|ssl|ftplib|huggingface_hub|subprocess)\b' python || true)
[ -z "$found" ] || fail "the Python package reaches a network, or another program: $found"
found=
for file in libhalfstep.so libhalfstep_io.so halfstep; do
    [ ! -e "$build_dir/$file" ] || found="$found$(nm -D --undefined-only "$build_dir/$file" | awk '{ print $2 }' |
        grep -E '^(socket|connect|getaddrinfo|system|popen|exec[lv].*|v?fork|posix_spawnp?)(@|$)' | sed "s/^/ $file: /" || true)"
done
[ -z "$found" ] || fail "the library or the program reaches a network, or another program: $found"
echo "ok   nothing that is installed reaches a network, or starts another program"

python=$build_dir/venv/bin/python
[ -x "$python" ] || skip "there is no environment of Python (ctest -R python_package says why)"
"$python" tests/packaging/broken_wheels.py --library "$build_dir"
