# Sourced by the test scripts. Says where things are, and what happens if something is absent.
set -eu
source_dir=${HALFSTEP_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
build_dir=${HALFSTEP_BUILD:-$source_dir/build}
# A make that runs this script must not pass its job server to the builds in here.
unset MAKEFLAGS MFLAGS MAKELEVEL
# awk, sort and sed count and sort as in the C locale, whatever the user's. The program asks for no locale.
export LC_ALL=C
script_words=$(printf ' %q' "$0" "$@")

fail() {
    echo "FAIL $*"
    printf '     reproduce: HALFSTEP_BUILD=%q bash%s\n' "$build_dir" "$script_words"
    exit 1
}

skip() {
    if [ "${CI:-}" = true ]; then
        fail "$* (skipped outside CI)"
    fi
    echo "skipped: $*"
    exit 77
}

need() {
    for program; do
        command -v "$program" >/dev/null || skip "$program is not installed"
    done
}

# Makes a folder that is removed when the script ends.
make_scratch() {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
}
