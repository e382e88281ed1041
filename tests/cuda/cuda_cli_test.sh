#!/bin/bash
# Tests the program without a GPU, and on the fake one of tests/cuda/fake. A missing thing is reported in one line, and
# the bits are those of every machine.
. "$(dirname "$0")/../tools/lib.sh"
need python3
halfstep=$build_dir/halfstep
fake=$build_dir/tests/cuda/fake
[ -x "$halfstep" ] || skip "$halfstep is not built"
[ -e "$fake/libcuda.so.1" ] || skip "$fake/libcuda.so.1 is not built"
make_scratch
cd "$scratch"

# expect PATTERN ARGUMENT...: checks that the exit status is 1, and that stderr is one line that matches.
expect() {
    local pattern=$1 got=0
    shift
    "$halfstep" "$@" >out 2>err || got=$?
    [ "$got" = 1 ] && [ "$(wc -l <err)" = 1 ] && [ ! -s out ] || fail "halfstep $*: exit $got: $(cat err)"
    grep -qE -- "$pattern" err || fail "halfstep $*: $(cat err) does not match $pattern"
}
export LD_LIBRARY_PATH=$fake${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
FAKE_CUDA_DEVICES=0 expect 'verify: cuda: cuInit: CUDA_ERROR_NO_DEVICE .*CUDA_VISIBLE_DEVICES' verify --device cuda
FAKE_CUDA_DRIVER=11040 expect 'bench: cuda: the NVIDIA driver supports CUDA 11.4; it must support 12.0' bench --device cuda
grep -q '^HALFSTEP_CUDA:[A-Z]*=ON' "$build_dir/CMakeCache.txt" ||
    HALFSTEP_CUDA_IMAGE='' expect 'this build of halfstep has no device code: install clang' verify --device cuda
HALFSTEP_CUDA_IMAGE=$scratch/none expect 'none cannot be read' verify --device cuda
expect "unknown device 'tpu'; known: cpu, cuda, cuda:N" verify --device tpu
expect 'unknown GPU number 3; the driver shows 1' bench --device cuda:3
echo "ok   what is missing is said in one line"

export HALFSTEP_CUDA_IMAGE=$fake/image XDG_CACHE_HOME=$scratch/cache
FAKE_CUDA_DEVICES=2 "$halfstep" info >info
grep -q 'cuda:1, Fake GPU 1, compute capability 9.0, 3 multiprocessors, 1.1 GB' info || fail "info does not show the GPUs"
grep -q 'CUDA 12.0 or newer is needed, 12.8 found' info || fail "info does not show the drivers"
FAKE_CUDA_DEVICES=2 "$halfstep" info --json >info.json
python3 -c 'import json; c = json.load(open("info.json"))["cuda"]; assert len(c["gpus"]) == 2 and c["minimum_driver"] == 12000, c' ||
    fail "info --json does not show the GPUs"
FAKE_CUDA_COMPUTE=75 "$halfstep" info >info
grep -q 'none: Fake GPU 0 has compute capability 7.5' info || fail "info does not say why a GPU is of no use"
code=$(sed -n 's/^device code  *//p' info)
"$halfstep" plan --params 1e6 >plan
[ -n "$code" ] && grep -qF "Device code for GPUs: $code." plan || fail "plan does not say for which GPUs there is code: $code"
echo "ok   info shows drivers and GPUs, and plan what there is code for"

"$halfstep" bench --device cuda --params 65536 --tensors 4 --rounds 2 --recipes adamw/bf16-sr/int8,lamb/f32 >bench
[ "$(grep -cE '^(adamw/bf16-sr/int8|lamb/f32)' bench)" = 4 ] || fail "bench --device cuda: $(cat bench)"
echo "ok   bench runs on the device"
"$halfstep" verify --device cuda --every 97 >verify || fail "verify --device cuda --every 97: $(cat verify)"
grep -qE '^ok: ([0-9]+) of \1 cases give the promised bits \(cuda\)$' verify || fail "verify --device cuda --every 97: $(cat verify)"
echo "ok   one golden case of 97 has its bits there"
FAKE_CUDA_LOSE=$(grep '^KERNEL' "$source_dir/src/device/cuda/code/kernels.def" | grep -n '(update,' | cut -d: -f1)
export FAKE_CUDA_LOSE
! HALFSTEP_DEVICE_CHECK=always "$halfstep" bench --device cuda --params 65536 --tensors 4 --recipes lion/f32/f32 >out 2>err ||
    fail "bench steps on a GPU with wrong bits"
grep -q 'cuda gives wrong bits .*; run .halfstep verify --device cuda --json' err || fail "bench --device cuda: $(cat err)"
! "$halfstep" verify --device cuda --every 97 >verify || fail "verify does not find a kernel that does nothing"
grep -q '^FAILED: ' verify || fail "verify --device cuda: $(cat verify)"
unset FAKE_CUDA_LOSE
echo "ok   bench refuses a GPU with wrong bits, and verify finds them"
FAKE_CUDA_FAULT=5 expect 'CUDA_ERROR_ILLEGAL_ADDRESS' verify --device cuda
echo "ok   a fault of the device ends in one line"
