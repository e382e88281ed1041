#!/bin/bash
# ptxas.sh FOLDER: prints the path of ptxas, the assembler of device code, which it installs from the Python index into FOLDER where it is not there
# yet. The version is the last whose machine code drivers of CUDA 12 load, as those of 13 do. Several may call it at the same time.
set -eu
folder=$1 version=12.9.86
ptxas() { find "$folder" -path '*/bin/ptxas' -print -quit 2>/dev/null; }
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
if [ ! -e "$folder/$version" ]; then
    rm -rf "$folder"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    if ! { python3 -m venv "$folder" &&
        "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps "nvidia-cuda-nvcc-cu12==$version"; } >"$log" 2>&1; then
        tail -n 3 "$log" >&2
        rm -rf "$folder"
        exit 1
    fi
    [ -n "$(ptxas)" ] || { echo "nvidia-cuda-nvcc-cu12 $version holds no ptxas" >&2; exit 1; }
    touch "$folder/$version"
fi
ptxas
