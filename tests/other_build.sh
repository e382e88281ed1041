#!/bin/bash
# other_build.sh FOLDER "PROGRAMS" CMAKE-ARGUMENTS...: configures, builds and tests this tree again in FOLDER.
# PROGRAMS are those that the build cannot do without.
folder=$1 needs=$2
shift 2
. "$(dirname "$0")/lib.sh"
need $needs

cd "$source_dir"
cmake -S . -B "$folder" "$@"
cmake --build "$folder" --parallel "${HALFSTEP_BUILD_JOBS:-1}"

# ThreadSanitizer cannot map its shadow on kernels that randomise addresses by more bits than it knows.
run=
case "$*" in
*tsan*) setarch "$(uname -m)" -R true 2>/dev/null && run="setarch $(uname -m) -R" ;;
esac
cd "$folder"
$run ctest --output-on-failure --no-tests=error
