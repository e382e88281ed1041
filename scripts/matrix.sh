#!/bin/bash
# matrix.sh BUILD [--keep] [NAME...]: tries the wheel in BUILD/dist with other torches and Pythons. Each row of
# tests/packages/matrix/environments.txt is an environment, torch-VERSION-python-VERSION; NAME is one, or the first part of several
# ("torch-2.6"). An environment takes up to 8 GB and is removed when it was tried, unless --keep. Makes the wheel if there is none.
set -eu
cd "$(dirname "$0")/.."
build=$(mkdir -p "$1" && cd "$1" && pwd)
shift
keep=
[ "${1:-}" != --keep ] || { keep=yes && shift; }
folder=$build/matrix
results=$build/packaging/results
mkdir -p "$folder"

# The oldest goes first and the others follow from the newest down, so that checkpoints go both ways: each environment resumes
# those of all before it.
rows=tests/packages/matrix/environments.txt
mapfile -t all < <(sed -nE 's/^([0-9.]+) torch==([0-9.]+) .*/torch-\2-python-\1/p' $rows | { read -r oldest && echo "$oldest" && tac; })
names=()
for word in "${@:-torch-}"; do
    found=()
    for name in "${all[@]}"; do
        [[ "$name" != "$word"* ]] || found+=("$name")
    done
    [ "${#found[@]}" != 0 ] || { echo "unknown environment '$word'; known: ${all[*]}" >&2 && exit 2; }
    names+=("${found[@]}")
done
[ $# != 0 ] || rm -rf "$folder/runs"

wheel_of() { find "$build/dist/" -name "halfstep-*-py3-none-*linux*$(uname -m).whl" ! -name '*musl*' 2>/dev/null; }
[ -n "$(wheel_of)" ] || bash packaging/wheels.sh "$build" "$(grep -oE "^manylinux[^,]*_$(uname -m)" packaging/platforms.csv)"
wheel=$(wheel_of)

# Prints the program of a Python version, looked for in pyenv's folder and in PATH.
python_of() {
    local program
    for program in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python"$1" $(type -ap "python$1"); do
        if "$program" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$1" 2>/dev/null; then
            echo "$program"
            return
        fi
    done
    return 1
}

note() { python3 packaging/results.py set "$results" "$@"; }

# Runs a command without network and with a home and a working folder that are empty and must stay so.
enclosed() {
    local empty=$folder/empty outside=()
    ! unshare -rn true 2>/dev/null || outside=(unshare -rn)
    rm -rf "$empty" && mkdir "$empty"
    (cd "$empty" && HOME=$empty OMP_NUM_THREADS=1 "${outside[@]}" "$@") || return 1
    [ -z "$(ls -A "$empty")" ] || { echo "FAIL $* left in its home or working folder: $(ls -A "$empty")" && return 1; }
}

# Makes the environment, or prints why it cannot be made.
install() {
    local name=$1 program
    # Packages of the row, a line each, below the date.
    sed -nE "/^# date/p; s/^${name##*-} (torch==$(cut -d- -f2 <<<"$name") .*)/\1/p" $rows | sed '/^#/!s/ /\n/g' >"$folder/$name.in"
    program=$(python_of "${name##*-}") || { echo "this machine has no Python ${name##*-} with venv" && return 1; }
    [ "$(df --output=avail -B 1G "$folder" | tail -n 1)" -ge 12 ] || { echo "less than 12 GB of disk are free" && return 1; }
    # A machine's own pip.conf may cap torch.
    "$program" -m venv "$folder/$name" &&
        PIP_FIND_LINKS= bash scripts/pins.sh --lock "$folder/$name.txt" "$folder/$name.in" "${name##*-}" --only-binary :all: >"$folder/log" 2>&1 &&
        PIP_CONSTRAINT=/dev/null "$folder/$name/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes \
            --only-binary :all: --cache-dir "$folder/cache" -r "$folder/$name.txt" >"$folder/log" 2>&1 ||
        { tail -n 1 "$folder/log" && return 1; }
}

# Tries the wheel in the environment and notes what was shown.
try() {
    local name=$1 python=$folder/$1/bin/python seconds
    rm -rf "$folder/runs/$name"
    seconds=$(python3 bench/install.py "$python" "$build/dist") && echo "     $seconds" || return 1
    export HALFSTEP_MATRIX=$folder/runs HALFSTEP_MATRIX_NAME=$name
    enclosed "$python" -I -B -m pytest -q -rs -p no:cacheprovider -c "$PWD/pyproject.toml" "$PWD/tests/packages/matrix" | tee "$folder/log"
    [ "${PIPESTATUS[0]}" = 0 ] || return 1
    enclosed "$python" -I -B -m halfstep info >/dev/null && enclosed "$python" -I -B -m halfstep plan 7B >/dev/null &&
        enclosed "$python" -I -B -m halfstep verify || return 1
    note "$name" ran="$(tail -n 1 "$folder/log" | grep -oE '[0-9]+ passed' | sed 's/passed/tests/')" \
        && note "$name" ran="checkpoints of $(($(find "$folder/runs" -name hashes.json | wc -l) - 1)) other environments resumed" \
        && note "$name" ran="\`verify\`" result="✓"
}

status=0
tried=0
missing=()
for name in "${names[@]}"; do
    echo "== $name"
    version=${name#torch-}
    note "$name" package="torch ${version%%-*}, Python ${name##*-}" built="wheel $(basename "$wheel" | cut -d- -f5 | cut -d. -f1)" ran= result=
    [ -e "$folder/$name/bin/python" ] || rm -rf "${folder:?}/$name"
    if reason=$(install "$name"); then
        tried=$((tried + 1))
        if ! try "$name"; then
            status=1
            note "$name" result="fails"
            echo "     reproduce: bash scripts/matrix.sh $build --keep $name"
        fi
    else
        missing+=("$name: $reason")
        note "$name" result="not run: $reason"
    fi
    [ -n "$keep" ] || rm -rf "${folder:?}/$name"
done
[ -n "$keep" ] || rm -rf "$folder/cache"
[ "${#missing[@]}" = 0 ] || printf 'not run: %s\n' "${missing[@]}"
[ "$tried" != 0 ] || status=1
exit $status
