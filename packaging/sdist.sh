#!/bin/bash
# sdist.sh BUILD: installs the sdist in BUILD/dist without network, clang and ptxas, steps with it, and notes what was shown. It needs
# wheels.sh before it and the Python environment of the tests, BUILD/venv.
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
build=$(cd "$1" && pwd)
work=$build/packaging/sdist
fail() {
    echo "FAIL $*" >&2
    exit 1
}
set_note() { python3 "$source/packaging/results.py" set "$build/packaging/results" sdist "$@"; }
bash "$source/scripts/venv.sh" "$build/packaging/venv" packaging/requirements.txt
bash "$source/scripts/venv.sh" "$build/venv"
mapfile -t sdists < <(find "$build/dist" -name 'halfstep-*[0-9].tar.gz')
[ ${#sdists[@]} = 1 ] || fail "$build/dist holds ${#sdists[@]} sdists; make wheels makes one"
sdist=${sdists[0]}
set_note result= ran=

# Nothing but these is in the path.
rm -rf "$work"
mkdir -p "$work/bin"
for program in sh env uname gcc as ld; do
    ln -s "$(command -v "$program")" "$work/bin/"
done
ln -s "$build/packaging/venv/bin/cmake" "$build/packaging/venv/bin/ninja" "$work/bin/"
unshare -rn true || fail "this machine gives no network namespace (unshare -rn)"
# install [NAME=VALUE...]: installs without network.
install() {
    unshare -rn env -i HOME="$work" PATH="$work/bin" "$@" "$build/packaging/venv/bin/python" -m pip install --no-cache-dir -v \
        --disable-pip-version-check --no-build-isolation --no-index --no-deps --target "$work/target" "$sdist" >"$work/log" 2>&1
}

! install CC="$work/none" && grep -q 'halfstep needs a C compiler' "$work/log" || fail "without a compiler: see $work/log"
set_note ran="refused without a C compiler by a sentence that says what to install"
SECONDS=0
install || { tail -n 40 "$work/log" >&2; fail "the sdist cannot be installed"; }
seconds=$SECONDS
run() { PYTHONPATH=$work/target OMP_NUM_THREADS=1 "$build/venv/bin/python" "$@"; }
cd "$work"
run -m halfstep info >info
grep -q "^library  *$work/target/halfstep/" info || fail "another library: $(grep '^library' info)"
grep -q '^device code  *machine code for compute capability' info || fail "no machine code for GPUs: $(grep '^device code' info)"
run "$source/packaging/first_steps.py" "$work/states"
set_note ran="installed without network, clang or ptxas; steps of torch" result=✓
echo "ok   $(basename "$sdist") installed in $seconds s on $(nproc) cores, and stepped"
