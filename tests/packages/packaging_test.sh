#!/bin/bash
# Tests what packages are made and checked with: lists of Python packages have hashes, nothing is downloaded in another way, and
# packaging/check.py refuses wheels that are broken. (make check leaves it out)
. "$(dirname "$0")/../tools/lib.sh"
need git python3
cd "$source_dir"
make_scratch

# unpinned FILE...: prints what lists of Python packages do not pin: a requirement without ==, or without a hash.
unpinned() {
    awk '
        function finish() { if (name != "" && !hashes) print file ": " name " has no hash"; name = "" }
        FNR == 1 { finish(); file = FILENAME }
        /^ *(#|$)/ { next }
        /^[^ ]/ {
            finish(); name = $1; hashes = 0
            if (name !~ /^[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z,]+\])?==[0-9][A-Za-z0-9.]*$/) print file ": " name " is no version of a package"
        }
        { for (i = 1; i <= NF; i++) hashes += $i ~ /^--hash=sha256:[0-9a-f]+$/ && length($i) == 78 }
        END { finish() }' "$@"
}
mapfile -t lists < <(git ls-files '*requirements*.txt' 'scripts/pins/*.txt')
[ ${#lists[@]} -ge 7 ] || fail "found only the lists ${lists[*]}"
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

# Lists of trainers and of the matrix get their hashes when they are used (scripts/pins.sh --lock), so they need a date and versions.
mapfile -t asked < <(git ls-files 'tests/trainers/*/requirements.in' tests/packages/matrix/environments.txt)
[ ${#asked[@]} -ge 7 ] || fail "found only ${asked[*]}"
for list in "${asked[@]}"; do
    [ "$(grep -cE '^# date: 20[0-9]{2}-[0-9]{2}-[0-9]{2}$' "$list")" = 1 ] || fail "$list has no line '# date: YYYY-MM-DD'"
    found=$(grep -vE '^(#|[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*$|[0-9.]+ torch==[0-9.]+ pytest)' "$list" || true)
    [ -z "$found" ] || fail "$list asks for a package without its version: $found"
done
echo "ok   ${#asked[@]} lists that are locked on demand have a date, and versions"

# downloads FILE...: prints commands that fetch something, but for pip with hashes, without an index or without network. A file may
# have a function pip of its own, of which the definition counts.
downloads() {
    awk '
        FNR == 1 { own = command = "" }
        /^ *(#|$)/ { next }
        /^pip\(\)/ { own = 1 }
        { command = command $0 }
        sub(/\\$/, "", command) { next }
        command ~ /(^|[^a-z_])(curl|wget|git clone .*(:\/\/|@)[^ ]*|urlopen|urlretrieve|requests\.get|FetchContent_(Declare|Populate)|ExternalProject_Add|hf_hub_download|snapshot_download)([^a-z_]|$)|file\(DOWNLOAD/ { bad = 1 }
        command ~ /-m pip |bin\/pip |-m["\047], *["\047]pip["\047]/ && command !~ /pip["\047, ]+(hash|freeze|list|check|index)/ { bad = 1 }
        command ~ /(^|[^a-z_-])pip3? +(install|download|wheel) / && !own { bad = 1 }
        bad && command !~ /--require-hashes|--no-index|unshare -rn|FetchContent_Declare\([a-z]+ SOURCE_DIR / { print FILENAME ":" FNR ": " command }
        { bad = 0; command = "" }' "$@"
}
# Files that fetch on purpose, each with its reason.
purpose='^(
packaging/try\.sh|         what the pip of a user does, with the newest torch
tests/packages/packaging_test\.sh|   its own patterns
scripts/pins\.sh|           hashes of what they fetch go into lists
scripts/venv\.sh|            tested below
bench/install\.py|           its measure
tests/python/[a-z]+/test_(files_of_others|integrations|publishing)\.py|  error texts that say what to install
)$'
purpose=$(echo "$purpose" | sed 's/ .*//' | tr -d '\n' | sed 's/|)/)/')
mapfile -t scripts < <(git ls-files '*.sh' '*.cmake' '*CMakeLists.txt' Makefile '.ci/*' 'scripts/*.py' 'packaging/*' 'tests/*.py' 'lab/*.py' 'bench/*.py' '.github/*' |
    grep -vE "$purpose")
found=$(downloads "${scripts[@]}")
[ -z "$found" ] || fail "fetched without a hash: $found"
for line in "curl -O x" "wget x" "git clone https://example.org/x" "pip install torch" "python -m pip download torch" "[python, '-m', 'pip', 'install', 'x']" "file(DOWNLOAD x y)" \
    "FetchContent_Declare(x URL y)" "ExternalProject_Add(x)"; do
    echo "$line" >"$scratch/script"
    [ -n "$(downloads "$scratch/script")" ] || fail "'$line' is not noticed as a download"
done
echo "ok   scripts fetch Python packages by these lists, and nothing else but Debian packages"

# venv.sh with a python3 that writes down what it is asked for, and whether a list has torch. Its pip offers torch in $OFFERED.
mkdir -p "$scratch/bin"
cat >"$scratch/bin/python3" <<'P'
#!/bin/bash
words=$*
case "$words" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*" index versions torch"*) echo "Available versions: $OFFERED" ;;
*" -r "*) echo "${words##* install } $(grep -c '^torch==' "${*: -1}")" >>"$CALLS" ;;
*) echo "${words##* install }" >>"$CALLS" ;;
esac
P
chmod +x "$scratch/bin/python3"
export CALLS=$scratch/calls
torch=$(sed -nE 's/^torch==([0-9.]+).*/\1/p' tests/python/requirements.txt)
hashed='--require-hashes --no-deps --no-build-isolation -r'
# asked OFFERED LINE...: fails unless venv.sh asks pip for the lines, patterns, where pip offers these versions of torch.
asked() {
    rm -rf "$CALLS" "$scratch/venv"
    OFFERED=$1 PATH=$scratch/bin:$PATH bash scripts/venv.sh "$scratch/venv" 2>"$scratch/log" || fail "venv.sh: $(cat "$scratch/log")"
    [ "$(wc -l <"$CALLS")" = $(($# - 1)) ] && printf '^%s$\n' "${@:2}" | paste -d '\n' - "$CALLS" |
        while read -r pattern && read -r line; do [[ "$line" =~ $pattern ]] || exit 1; done ||
        fail "where pip offers torch $1, venv.sh asks for: $(cat "$CALLS")"
}
if [ "$(uname -s)" = Linux ]; then
    asked "$torch+cpu, $torch" "$hashed .*/pins/build.txt 0" "$hashed .*/requirements.txt 1"
    [ ! -s "$scratch/log" ] || fail "venv.sh says $(cat "$scratch/log")"
    asked "$torch" "$hashed .*/pins/build.txt 0" "torch==$torch" "$hashed .* 0"
    grep -q "no CPU build of torch $torch" "$scratch/log" || fail "venv.sh does not say that it installs a torch without a hash"
    echo "ok   all is installed by hashes, but torch where pip offers only the index's CUDA build, which is said"
fi

python=$build_dir/venv/bin/python
[ -x "$python" ] || skip "there is no environment of Python (ctest -R python_package says why)"
"$python" tests/packages/broken_wheels.py --library "$build_dir"
