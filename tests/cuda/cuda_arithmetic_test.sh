#!/bin/bash
# Compares roots and quotients of the GPU's code, translated and run on the processor, with the processor's own: a 64th
# of what lab/gpu_arithmetic.py compares, spread over all exponents. The numbers are in the range of the fast ways and
# beyond it (src/vec/cuda_roots.h).
# (make check leaves it out.)
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need clang python3
python=python3
[ ! -e "$build_dir/venv/halfstep.installed" ] || python=$build_dir/venv/bin/python
"$python" -c 'import numpy' 2>/dev/null || skip "$python has no numpy"
cmake --build "$build_dir" --target cuda_arithmetic >/dev/null || fail "the target cuda_arithmetic"
cd "$source_dir"
"$python" lab/gpu_arithmetic.py --translated "$build_dir/tests/cuda/libarithmetic.so" --part "${1:-64}" ||
    fail "some roots or quotients differ"
