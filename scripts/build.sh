#!/bin/bash
# build.sh FOLDER JOBS CMAKE-ARGUMENTS...: configures and builds into FOLDER, quietly where all goes well.
set -eu
folder=$1 jobs=$2
shift 2
cd "$(dirname "$0")/.."
# An inherited job server belongs to a make that does not run this build.
unset MAKEFLAGS MFLAGS MAKELEVEL

[ -e "$folder/halfstep" ] || echo "==> Building halfstep in $folder" >&2
mkdir -p "$folder"
if ! cmake -G "Unix Makefiles" -S . -B "$folder" -DCMAKE_TARGET_MESSAGES=OFF -DHALFSTEP_TOOLS=ON -DHALFSTEP_IO=ON "$@" >"$folder/configure.log" 2>&1; then
    cat "$folder/configure.log" >&2
    exit 1
fi
[ -e "$folder/halfstep" ] || sed -n 's/^-- \(Device code for GPUs\)/    \1/p' "$folder/configure.log" >&2
exec cmake --build "$folder" --parallel "$jobs" -- --no-print-directory -s
