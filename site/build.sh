#!/bin/bash
# build.sh [FOLDER]: makes the site in FOLDER, build/site if not given. It needs the environment of scripts/venv.sh in build/venv, and
# the built library and program. A warning, a link or an anchor that leads nowhere, and a page that loads from another host are errors.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
build=${HALFSTEP_BUILD:-$root/build}
folder=$(realpath -m "${1:-$build/site}")
export HALFSTEP_LIBRARY=${HALFSTEP_LIBRARY:-$build/libhalfstep.so} HALFSTEP_IO_LIBRARY=${HALFSTEP_IO_LIBRARY:-$build/libhalfstep_io.so}
export HALFSTEP_PROGRAM=${HALFSTEP_PROGRAM:-$build/halfstep} PYTHONPATH=$root/python PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore
# The theme's makers print an advertisement of another program without this.
export NO_MKDOCS_2_WARNING=1
export PATH=$build/venv/bin:$PATH
cd "$root"
"$build/venv/bin/python" -m mkdocs build --strict --config-file site/mkdocs.yml --site-dir "$folder"
"$build/venv/bin/python" site/check.py "$folder"
