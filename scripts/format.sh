#!/bin/bash
# format.sh [--check]: lays out the C sources as .clang-format says, and Python as pyproject.toml says, with clang-format and ruff
# from PATH. With --check only tells which are not laid out so, which lines of C have more than 120 columns, and what ruff finds.
set -euo pipefail
cd "$(dirname "$0")/.."
sources() { find src include tools tests fuzz lab examples bench -name '*.[ch]' -o -name '*.def' -o -name '*.[ch]pp' -o -name '*.cu'; }
if [ "${1:-}" != --check ]; then
    sources | grep -v '\.def$' | xargs clang-format -i
    ruff check --no-cache --quiet --fix --select I .
    ruff format --no-cache --quiet .
    exit 0
fi
status=0
sources | grep -v '\.def$' | xargs clang-format --dry-run --Werror || status=1
long=$(sources | LC_ALL=C.UTF-8 xargs grep -nP '^.{121,}' || true)
[ -z "$long" ] || { echo "more than 120 columns: $long"; status=1; }
ruff format --no-cache --check . || status=1
ruff check --no-cache --output-format concise . || status=1
exit "$status"
