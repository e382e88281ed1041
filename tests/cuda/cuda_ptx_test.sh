#!/bin/bash
# Compiles the GPU kernels as device code: clang makes PTX of them, which the emulation runs too, without any
# toolkit. Every row of kernels.def is an entry, and nothing is left for a linker. No product is fused with a sum,
# except in roots and quotients. If ptxas can be found (PTXAS, or of the Python index, or in the path), it assembles the
# PTX for each architecture in PTX_ARCHITECTURES, as the build does. The table that the build makes of the results must
# hold every byte.
# (make check leaves it out.)
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need clang
make_scratch
cd "$source_dir"
compile() { # source folder, output
    clang @cmake/device_code.options -ffp-contract="${3:-off}" -Iinclude "-I$1" -S -o "$2" "$1/device/cuda/code/kernels.cu" >"$scratch/log" 2>&1
}
fused() { grep -cE '\b(fma|mad)\.(rn|rz|rm|rp)' "$1"; }
ptx=$scratch/kernels.ptx made=$build_dir/tests/cuda/every.ptx
if [ -e "$made" ] && [ -z "$(find src include -newer "$made" -type f -print -quit)" ]; then
    cp "$made" "$ptx" # by the build of test_cuda_every, in the same way
else
    compile src "$ptx"
fi || { grep -E 'error' "$scratch/log" | head; fail "the kernels do not compile as device code"; }
# An instruction of machine code has 16 bytes. Budgets hold for the compilers that the first line names.
budgets=bench/gpu_kernels.csv
check_budgets() { # cubin for 9.0
    local made
    made="$(clang --version | sed -nE 's/.*clang version ([0-9]+).*/clang \1/p') and ptxas $("$ptxas" --version | sed -nE 's/.*release ([0-9.]+),.*/\1/p')"
    readelf -SW "$1" 2>/dev/null | sed -nE 's/^ *\[ *[0-9]+\] \.text\.halfstep_cuda_fused_(\w+) +PROGBITS +\w+ +\w+ +(\w+).*/\1 \2/p' |
        while read -r name size; do echo "$name,$((16#$size / 16))"; done | sort >"$scratch/counts"
    [ "$(wc -l <"$scratch/counts")" -eq "$fused" ] || fail "$(wc -l <"$scratch/counts") of $fused fused kernels in the machine code"
    if [ "${GPU_BUDGETS:-}" = write ]; then
        { echo "# $made"; cat "$scratch/counts"; } >"$budgets"
        exit
    elif [ "# $made" != "$(head -1 "$budgets")" ]; then
        echo "     made by $made, the budgets by others: not compared"
        return
    fi
    join -t, -a1 "$scratch/counts" <(tail -n +2 "$budgets" | sort) >"$scratch/both"
    awk -F, '!$3 || $2 > $3 * 1.03 {print $1 ": " $2 " instructions, " ($3 ? $3 : "none") " allowed"; bad = 1} END {exit bad}' "$scratch/both" >"$scratch/over" ||
        fail "$(head -3 "$scratch/over") (GPU_BUDGETS=write records what is meant)"
    echo "ok   no fused kernel has more instructions than its budget"
}
# Machine code has fused multiply-adds only inside divisions, reciprocals and roots. Without these it has none.
check_sums() {
    local instructions=(lab/gpu_instructions.py --tools "$build_dir" --fused)
    sed -E 's/\bdiv\.rn\.f(32|64)/mul.rn.f\1/; s/\b(sqrt|rcp)\.rn\.f(32|64)/abs.f\2/; s/\bfma\.rn\.f32 ([^,]+, [^,]+), [^,]+,/add.rn.f32 \1,/' "$ptx" >"$scratch/sums.ptx"
    ! sed -E 's/(rcp|sqrt)\.approx//' "$scratch/sums.ptx" | grep -qE '\b(div|sqrt|rcp)\.[a-z.]*f(32|64)' || fail "divisions or roots of another kind"
    "$ptxas" -arch=sm_90 --fmad=false -o "$scratch/sums" "$scratch/sums.ptx"
    python3 "${instructions[@]}" "$scratch/sums" >"$scratch/log" 2>&1 || fail "$(head -3 "$scratch/log")"
    echo "ok   machine code has no fused multiply-add beyond those of divisions and roots"
    python3 "${instructions[@]}" "$cubin" >"$scratch/log" && fail "those of divisions and roots are not found"
    echo "ok   which are found"
}
# Takes the rows from the preprocessor, which combines the rows of fused.def with every rule.
rows() {
    printf '#define KERNEL(name, shape) halfstep_cuda_##name\n#define KERNEL_SUM KERNEL\n#define KERNEL_ACCESS KERNEL\n#include "device/cuda/code/kernels.def"\n' |
        cc -E -P -Isrc -x c - | grep -oE 'halfstep_cuda_[a-z0-9_]+'
}
rows | sort >"$scratch/rows"
sed -nE 's/.*\.visible \.entry ([a-z0-9_]+).*/\1/p' "$ptx" | sort >"$scratch/entries"
entries=$(wc -l <"$scratch/entries")
[ "$entries" -gt 50 ] || fail "$entries entries"
diff "$scratch/rows" "$scratch/entries" || fail "other entries than rows of kernels.def"
! grep -q '^\.extern \.func' "$ptx" || fail "undefined: $(grep -A3 '^\.extern \.func' "$ptx" | tr '\n' ' ')"
# Roots, quotients and the packing of bytes are written as instructions, between comments (src/vec/cuda.h).
awk -v blocks="$scratch/blocks" '/begin inline asm/ {inside = 1; block = ""; next} /end inline asm/ {inside = 0; print block >blocks; next}
    inside {gsub(/%[a-z]+[0-9]+/, "%"); gsub(/^[ \t]+/, ""); block = block $0 " "; next} {print}' "$ptx" >"$scratch/outside.ptx"
[ "$(fused "$scratch/outside.ptx")" -eq 0 ] || fail "$(fused "$scratch/outside.ptx") fused multiply-adds"
# PTX has no parameter of a function at an address in a register, which clang makes of a vector that is passed by value.
by_register() { awk '/\.func/ {inside = 1} /\.entry/ {inside = 0} inside && /ld\.param.*\[%r/' "$1" | head -1; }
[ -z "$(by_register "$ptx")" ] || fail "a function reads a parameter by a register:$(by_register "$ptx")"
# Instructions without an explicit rounding might be fused by ptxas.
! grep -qE '\b(mul|add|sub)\.f(32|64)' "$ptx" || fail "$(grep -cE '\b(mul|add|sub)\.f(32|64)' "$ptx") operations without a rounding"
! grep -qE '\.approx|\.full|\.ftz' "$scratch/outside.ptx" || fail "approximate or flushing instructions"
sort -u "$scratch/blocks" >"$scratch/kinds"
tr ';' '\n' <"$scratch/kinds" | sed -E 's/^ *(\{ *)?//' | grep -E '\bfma\.|\.approx|\.full|\.ftz' | sort -u >"$scratch/allowed"
diff "$scratch/allowed" - <<'PTX' || fail "other estimates, or other sums within products, than those of roots, quotients and codes"
fma.rn.f32 %, e, y, %
fma.rn.f32 %, e, y, s
fma.rn.f32 e, e, s, %
fma.rn.f32 e, s, %, %
fma.rn.f32 e, s, y, 0f3F800000
fma.rn.f32 u, y, u, 0f37800000
fma.rn.f32 y, y, e, y
rcp.approx.ftz.f32 y, %
rsqrt.approx.ftz.f32 y, %
sqrt.approx.ftz.f32 y, y
PTX
# Each function that has an estimate also has an exact form, of one number or of four. A power of two over a small
# scale is exact without one, and codes have theirs outside (src/vec/cuda.h).
of_estimates() { awk -v one="$1" -v two="$2" '{print gsub(one, "") " " gsub(two, "")}' "$scratch/kinds" | sort -u | tr '\n' ','; }
[ "$(of_estimates 'rcp[.]approx' 'div[.]rn')" = "0 0,1 0,1 1,4 4," ] || fail "quotients without their exact way: $(of_estimates 'rcp[.]approx' 'div[.]rn')"
[ "$(of_estimates 'rsqrt[.]approx[.]ftz[.]f32 y' 'sqrt[.]rn')" = "0 0,1 1,4 4," ] || fail "roots without their exact way: $(of_estimates 'rsqrt[.]approx[.]ftz[.]f32 y' 'sqrt[.]rn')"
echo "ok   $entries kernels are device code, without a fused multiply-add but in roots and quotients"
python3 lab/gpu_arithmetic.py --compile >"$scratch/log" 2>&1 || fail "$(tail -1 "$scratch/log")"
echo "ok   what compares a GPU's roots and quotients takes those of the kernels"
# Shows that the test can fail: with contraction there are fused multiply-adds.
mkdir -p "$scratch/device/cuda/code"
echo 'extern "C" __attribute__((global)) void contracted(float *x) { x[0] = x[1] * x[2] + x[3]; }' >"$scratch/device/cuda/code/kernels.cu"
compile "$scratch" "$scratch/contracted.ptx" fast && [ "$(fused "$scratch/contracted.ptx")" -gt 0 ] || fail "contraction is not noticed"
echo "ok   contraction is noticed"
# The translator of the tests refuses what it does not know.
printf '.version 7.4\n.target sm_80\n.visible .entry one(\n.param .u64 one_0\n)\n{\n.reg .f32 %%f<3>;\n%s;\nret;\n}\n' \
    'sin.approx.f32 %f1, %f2' >"$scratch/unknown.ptx"
! python3 tests/cuda/translate.py "$scratch/unknown.c" "$scratch/unknown.ptx" >"$scratch/log" 2>&1 &&
    grep -q 'line 8: one: instruction sin.approx.f32$' "$scratch/log" || fail "an unknown instruction: $(cat "$scratch/log")"
echo "ok   an unknown instruction is refused by name"
echo 'struct four { unsigned x[4]; }; static __attribute__((device, noinline)) unsigned of(int i, struct four v) { return v.x[i] + v.x[3]; }
extern "C" __attribute__((global)) void passed(unsigned *x) { struct four v = {{x[0], x[1], x[2], x[3]}}; x[4] = of(x[5] & 3, v); }' >"$scratch/device/cuda/code/kernels.cu"
compile "$scratch" "$scratch/passed.ptx" && [ -n "$(by_register "$scratch/passed.ptx")" ] || fail "a vector that is passed by value is not noticed"
echo "ok   a vector that is passed by value is noticed"
ptxas=${PTXAS:-$(bash scripts/ptxas.sh "$build_dir/ptxas" 2>/dev/null || command -v ptxas || true)}
images=
if [ -n "$ptxas" ]; then
    for architecture in ${PTX_ARCHITECTURES:-90}; do
        cubin=$scratch/kernels.$architecture
        "$ptxas" -v "-arch=sm_$architecture" --fmad=false -o "$cubin" "$ptx" >"$scratch/log" 2>&1 || { head -5 "$scratch/log"; fail "ptxas for $architecture"; }
        fused=$(grep -c 'halfstep_cuda_fused_' "$scratch/rows")
        # Stack is reserved for every thread of a GPU. In a fused kernel it would be memory traffic in the loop over tiles.
        python3 lab/gpu_resources.py --check "$scratch/log" >"$scratch/needs" || fail "for $architecture: $(head -3 "$scratch/needs")"
        [ "$(cat "$scratch/needs")" = "$entries kernels" ] || fail "for $architecture: $(cat "$scratch/needs") of $entries"
        sed -E '/entry function .halfstep_cuda_update/,/stack frame/s/[0-9]+ bytes stack/9999 bytes stack/; s/, [0-9]+ bytes cumulative stack size//' "$scratch/log" >"$scratch/worse"
        ! python3 lab/gpu_resources.py --check "$scratch/worse" >/dev/null || fail "9,999 bytes of stack are not noticed"
        echo "ok   assembled for $architecture: $(stat -c %s "$cubin") bytes"
        [ "$architecture" != 90 ] || { check_budgets "$cubin" && check_sums; }
        images="$images$architecture=$cubin;"
    done
else
    echo "     no ptxas: not assembled"
fi
cat >"$scratch/check.c" <<'C'
#include <stdio.h>
#include <stdlib.h>
#include "device/cuda/driver/images.h"
#include "device/cuda/driver/unpack.h"
int main(int argc, char **argv)
{
    for (const struct hstep_cuda_image *i = hstep_cuda_images; i->bytes; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s.%d", argv[1], i->compute);
        void *data = malloc(i->bytes);
        FILE *file = fopen(path, "wb");
        if (hstep_unpack(data, i->bytes, i->data, i->packed)) return 1;
        fwrite(data, 1, i->bytes, file);
        fclose(file);
        free(data);
    }
    return argc != 2;
}
C
images="${images}0=$ptx"
cmake -D "FOLDER=$scratch/images" -D "PACK=$images" -P cmake/images.cmake
cmake -D "FOLDER=$scratch/images" -D "OUTPUT=$scratch/images.c" -P cmake/images.cmake
cc -std=c11 -O2 -Isrc -o "$scratch/embedded" "$scratch/images.c" "$scratch/check.c" src/device/cuda/driver/unpack.c
"$scratch/embedded" "$scratch"/unpacked || fail "an image cannot be unpacked"
for image in ${images//;/ }; do
    cmp -s "${image#*=}" "$scratch/unpacked.${image%%=*}" || fail "the image for ${image%%=*} is not what was embedded"
    # A library has five, of about one size, beside 3 MB of its own, and may have 12 MB.
    size=$(stat -c %s "$scratch/images/$(basename "${image#*=}").xz")
    [ "$size" -lt 1800000 ] || fail "the image for ${image%%=*} has $size bytes when it is packed"
    echo "ok   the image for ${image%%=*} is embedded in $size bytes, and unpacked (0: PTX)"
done
