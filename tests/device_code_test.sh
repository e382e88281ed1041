#!/bin/bash
# Rules, formats, random words, exact sums and the functions that prepare constants compile as code of a device too, to the last function: clang
# makes PTX of all of them, without any toolkit. A static table, or a function that only a host may call, fails here.
# (make check leaves it out.)
. "$(dirname "$0")/lib.sh"
need clang
make_scratch
cd "$source_dir"
compile() {
    clang -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib -ffp-contract=off -Iinclude "-I$1" -std=c++17 -O1 -S \
        -o "$scratch/device.ptx" tests/rows/device_code.cu >"$scratch/log" 2>&1
}
compile src || { grep -E 'error' "$scratch/log" | head; fail "something does not compile as device code"; }
entries=$(grep -c '^\.visible \.entry' "$scratch/device.ptx")
rows=$(grep -cE '^(ELEMENT_FORMAT|BLOCK_FORMAT) *\(' src/formats/formats.def)
rules=$(grep -cE '^RULE\(' src/rules/rules.def)
[ "$entries" -eq $((rows + 2 * rules + 2)) ] || fail "$entries entries for $rows formats and $rules rules"
echo "ok   $rows formats and $rules rules are device code"
# The test can fail: a prepare function for hosts alone.
cp -r src "$scratch"
sed -i 's/HSTEP_INLINE void lion_prepare/static inline void lion_prepare/' "$scratch/src/rules/lion.h"
! compile "$scratch/src" && grep -q "no matching function for call to 'lion_prepare'" "$scratch/log" || fail "a function of the host alone passes"
echo "ok   a function of the host alone does not pass"
