#!/bin/bash
# ptxas.sh FOLDER: prints the path of ptxas, the assembler of device code, which it installs from the Python index into FOLDER where
# it is not there yet. Several may call it at the same time.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
bash "$here/venv.sh" "$1" scripts/pins/ptxas.txt >&2 || exit 1
ptxas=$(find "$1" -path '*/bin/ptxas' -print -quit)
[ -n "$ptxas" ] || { echo "scripts/pins/ptxas.txt names a package without ptxas" >&2; exit 1; }
echo "$ptxas"
