#!/bin/bash
# format.sh CLANG_FORMAT [--check]: lays out the C sources as .clang-format says; with --check only tells which are not laid
# out so, and which lines have more than 120 columns.
set -euo pipefail
tool=$1 mode=${2:-}
cd "$(dirname "$0")/.."
sources() { find src include tools tests fuzz lab examples bench -name '*.[ch]' -o -name '*.def' -o -name '*.cpp' -o -name '*.cu'; }
if [ "$mode" != --check ]; then
    sources | grep -v '\.def$' | xargs "$tool" -i
    exit 0
fi
status=0
sources | grep -v '\.def$' | xargs "$tool" --dry-run --Werror || status=1
long=$(sources | LC_ALL=C.UTF-8 xargs grep -nP '^.{121,}' || true)
[ -z "$long" ] || { echo "more than 120 columns: $long"; status=1; }
exit "$status"
