#!/bin/bash
# Checks that rules, formats, random words, exact sums and the functions that prepare constants also compile as device
# code, to the last function. clang makes PTX of all of them, and AMD's code as hipcc would (which is clang), without
# any toolkit. A static table, a function that only a host may call, or a word of CUDA fails here.
# (make check leaves it out.)
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need clang
make_scratch
cd "$source_dir"
# compile cuda|hip FOLDER: compiles the sources of the folder as device code.
compile() {
    local target="-nocudainc -nocudalib --cuda-gpu-arch=sm_80"
    [ "$1" = cuda ] || target="-nogpuinc -nogpulib --offload-arch=gfx90a"
    # shellcheck disable=SC2086
    clang -x "$1" --cuda-device-only $target -ffp-contract=off -Iinclude "-I$2" -std=c++17 -O1 -S -o "$scratch/device.s" \
        tests/rows/device_code.cu >"$scratch/log" 2>&1
}
rows=$(grep -cE '^FORMAT\(' src/formats/formats.def)
rules=$(grep -cE '^RULE\(' src/rules/rules.def)
# check LANGUAGE ENTRY: checks that one line of the assembly matches for each entry.
check() {
    compile "$1" src || { grep -E 'error' "$scratch/log" | head; fail "something does not compile as device code ($1)"; }
    entries=$(grep -cE "$2" "$scratch/device.s")
    [ "$entries" -eq $((rows + 2 * rules + 2)) ] || fail "$entries entries for $rows formats and $rules rules ($1)"
    echo "ok   $rows formats and $rules rules are device code ($1)"
}
check cuda '^\.visible \.entry'
targets="cuda"
if clang --print-targets | grep -q amdgcn; then
    check hip '^[[:space:]]*\.amdhsa_kernel '
    targets="cuda hip"
else
    echo "     hip: this clang makes no code for AMD's GPUs"
fi

# change RULE FROM TO: makes a copy of the sources with a changed rule.
cp -r src "$scratch"
change() {
    cp "src/rules/$1.h" "$scratch/src/rules/$1.h"
    sed -i "s/$2/$3/" "$scratch/src/rules/$1.h"
    ! cmp -s "src/rules/$1.h" "$scratch/src/rules/$1.h" || fail "src/rules/$1.h has no $2"
}
# Shows that the test can fail: with a prepare function for hosts only, and with a rule in CUDA's own words.
change lion 'HSTEP_INLINE void lion_prepare' 'static inline void lion_prepare'
for target in $targets; do
    ! compile "$target" "$scratch/src" && grep -q "no matching function for call to 'lion_prepare'" "$scratch/log" ||
        fail "a function of the host alone passes ($target)"
done
echo "ok   a function of the host alone does not pass"
if [ "$targets" != cuda ]; then
    change lion '^HSTEP_INLINE void lion_prepare' 'HSTEP_INLINE int lion_thread(void) { return __nvvm_read_ptx_sreg_tid_x(); }\n&'
    compile cuda "$scratch/src" || fail "CUDA's own words do not pass as CUDA: $(grep error "$scratch/log" | head -3)"
    ! compile hip "$scratch/src" || fail "what only CUDA has passes as HIP"
    echo "ok   what only CUDA has does not pass as HIP"
fi
