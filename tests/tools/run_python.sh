#!/bin/bash
# run_python.sh [all | ARGUMENT...]: runs the Python tests with pytest, one process a core, in the environment of tests/packages/python_package.sh.
# Without an argument it runs what `make test` runs. `all` runs the rest, which is marked "all" and left to `make test-all`.
# Other arguments go to pytest: run_python.sh tests/python/rules/test_ema.py, or run_python.sh tests/python/rules/test_ema.py::test_copies.
user_locale=${LC_ALL-}
. "$(dirname "$0")/lib.sh"
if [ -n "$user_locale" ]; then export LC_ALL=$user_locale; else unset LC_ALL; fi
[ -e "$build_dir/venv/halfstep.installed" ] || skip "the Python package is not installed (ctest -R python_package says why)"
cd "$source_dir"
case "${1:-}" in
"") set -- -n "$(nproc)" --max-worker-restart 0 -m "not all" tests/python ;;
all) set -- -n "$(nproc)" --max-worker-restart 0 -m all tests/python ;;
esac

# Files and tests run in their own order, or in a random one that a number chooses.
order=(-p no:randomly)
[ -z "${HALFSTEP_TEST_ORDER:-}" ] || order=(-p randomly --randomly-seed="$HALFSTEP_TEST_ORDER")

# The installed package is tested, with its own library. Each process has one thread, because tests run side by side. The caches of
# torch.compile and DeepSpeed stay in the build folder; both look for ninja on the path.
unset HALFSTEP_LIBRARY PYTHONPATH
export HALFSTEP_SOURCE=$source_dir HALFSTEP_BUILD=$build_dir
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$build_dir/venv/bin:$PATH"
export TORCHINDUCTOR_CACHE_DIR="$build_dir/inductor" TORCH_EXTENSIONS_DIR="$build_dir/torch_extensions"
exec "$build_dir/venv/bin/python" -m pytest -q -rfEs -p no:cacheprovider "${order[@]}" "$@"
