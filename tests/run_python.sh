#!/bin/bash
# run_python.sh SCRIPT: runs a Python test in the environment that tests/python_package.sh made: under pytest if it has test
# functions, else by itself.
script=$1
. "$(dirname "$0")/lib.sh"
[ -e "$build_dir/venv/halfstep.installed" ] || skip "the Python package is not installed (ctest -R python_package says why)"

# The installed package is tested, with its own library. Tests run side by side, so each has one thread; what torch.compile
# and DeepSpeed compile stays in the build folder, and they look for ninja on the path.
unset HALFSTEP_LIBRARY PYTHONPATH
export HALFSTEP_BUILD=$build_dir
export OMP_NUM_THREADS=1 PATH="$build_dir/venv/bin:$PATH"
export TORCHINDUCTOR_CACHE_DIR="$build_dir/inductor" TORCH_EXTENSIONS_DIR="$build_dir/torch_extensions"
if grep -qE '^ *def test_' "$script"; then
    set -- -m pytest -q -rs -p no:cacheprovider "$script"
else
    set -- "$script"
fi
exec "$build_dir/venv/bin/python" "$@"
