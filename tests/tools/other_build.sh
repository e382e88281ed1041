#!/bin/bash
# other_build.sh FOLDER "PROGRAMS" CMAKE-ARGUMENTS...: configures, builds and tests this tree again in FOLDER. The build needs PROGRAMS.
folder=$1 needs=$2
shift 2
. "$(dirname "$0")/lib.sh"
need $needs

cd "$source_dir"
case "$*" in
*asan* | *tsan*)
    # Plain C and the widest vectors that run here show what a sanitizer can see.
    widest=$("$build_dir/halfstep" info --json | sed -n 's/^ *"isa": "\(.*\)",$/\1/p')
    set -- "$@" "-DHALFSTEP_ISAS=scalar;$widest"
    ;;
esac
cmake -S . -B "$folder" "$@"
cmake --build "$folder" --parallel "${HALFSTEP_BUILD_JOBS:-1}"

# ThreadSanitizer cannot map its shadow on kernels that randomise addresses by more bits than it knows.
run=
case "$folder" in
*/tsan) setarch "$(uname -m)" -R true 2>/dev/null && run="setarch $(uname -m) -R" ;;
esac
cd "$folder"
$run ctest --output-on-failure --no-tests=error
