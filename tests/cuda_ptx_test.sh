#!/bin/bash
# The kernels of src/cuda as device code: clang makes PTX of the very source that the emulation runs, without any
# toolkit. Every row of kernels.def is an entry, nothing is left for a linker, and no product is fused with a sum; where
# ptxas is at hand (PTXAS, or in the path), it assembles them for each architecture in PTX_ARCHITECTURES.
# (make check leaves it out.)
. "$(dirname "$0")/lib.sh"
need clang
make_scratch
cd "$source_dir"
compile() { # source folder, output
    clang -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib -Xclang -target-feature -Xclang +ptx74 \
        -ffp-contract="${3:-off}" -Iinclude "-I$1" -std=c++17 -O2 -Wno-everything -S -o "$2" "$1/cuda/kernels.cu" >"$scratch/log" 2>&1
}
fused() { grep -cE '\b(fma|mad)\.(rn|rz|rm|rp)' "$1"; }
ptx=$scratch/kernels.ptx
compile src "$ptx" || { grep -E 'error' "$scratch/log" | head; fail "the kernels do not compile as device code"; }
rows=$(grep -cE '^KERNEL(_SUM|_ACCESS)?\(' src/cuda/kernels.def)
entries=$(grep -c '\.visible \.entry' "$ptx")
[ "$entries" -eq "$rows" ] || fail "$entries entries for $rows rows of kernels.def"
for name in $(sed -nE 's/^KERNEL(_SUM|_ACCESS)?\(([a-z_]+),.*/\2/p' src/cuda/kernels.def); do
    grep -q "\.visible \.entry halfstep_cuda_$name(" "$ptx" || fail "no entry halfstep_cuda_$name"
done
! grep -q '^\.extern \.func' "$ptx" || fail "undefined: $(grep -A3 '^\.extern \.func' "$ptx" | tr '\n' ' ')"
[ "$(fused "$ptx")" -eq 0 ] || fail "$(fused "$ptx") fused multiply-adds"
# Without a rounding of their own, ptxas might fuse them.
! grep -qE '\b(mul|add|sub)\.f(32|64)' "$ptx" || fail "$(grep -cE '\b(mul|add|sub)\.f(32|64)' "$ptx") operations without a rounding"
! grep -qE '(div|sqrt)\.approx|\.ftz' "$ptx" || fail "approximate or flushing instructions"
echo "ok   $entries kernels are device code, without a fused multiply-add"
# The test can fail: with contraction there are some.
compile src "$scratch/contracted.ptx" fast && [ "$(fused "$scratch/contracted.ptx")" -gt 0 ] || fail "contraction is not noticed"
echo "ok   contraction is noticed"
ptxas=${PTXAS:-$(command -v ptxas)}
[ -n "$ptxas" ] || { echo "     no ptxas: not assembled"; exit 0; }
for architecture in ${PTX_ARCHITECTURES:-sm_80 sm_90}; do
    "$ptxas" "-arch=$architecture" -o "$scratch/kernels.cubin" "$ptx" >"$scratch/log" 2>&1 || { head -5 "$scratch/log"; fail "ptxas for $architecture"; }
    echo "ok   assembled for $architecture: $(stat -c %s "$scratch/kernels.cubin") bytes"
done
