#!/bin/bash
# Checks that the line of docs/c.md for building the core library without a build system works as printed.
# (make check leaves it out.)
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need cc
make_scratch
line=$(sed -n 's/^ *\$\{0,1\} *\(cc .*find src .*\)$/\1/p' "$source_dir/docs/c.md" | head -1)
[ -n "$line" ] || fail "docs/c.md has no line that begins with cc and compiles what find finds in src"
echo "$line"
cp -R "$source_dir/include" "$source_dir/src" "$scratch"
cd "$scratch"
bash -c "$line" || fail "that line"
for option in -ffast-math -Ofast; do
    ! bash -c "$line $option -fsyntax-only" 2>err || fail "that line with $option"
    grep -q "halfstep needs IEEE's arithmetic" err || fail "that line with $option: $(head -n 3 err)"
done
library=$(ls ./*.so | head -1)
cat >main.c <<'C'
#include <halfstep.h>
#include <stdio.h>
int main(void)
{
    float w[40] = {0}, g[40];
    void *weights[1] = {w};
    const void *gradients[1] = {g};
    halfstep_optimizer *optimizer;
    int32_t group, index;
    halfstep_tensor t = {sizeof t};
    for (int i = 0; i < 40; i++) g[i] = 1;
    t.name = "w";
    t.ndim = 2;
    t.rows = 1;
    t.row_length = 40;
    t.gradient = "f32";
    if (halfstep_create(NULL, &optimizer) || halfstep_add_group(optimizer, "adamw/f32/f32", &group)) return 1;
    t.group = group;
    if (halfstep_add_tensor(optimizer, &t, &index) || halfstep_allocate_states(optimizer)) return 2;
    if (halfstep_step(optimizer, weights, gradients)) return 3;
    printf("%s %g\n", halfstep_isa(), w[39]);
    halfstep_destroy(optimizer);
    return !(w[39] < 0);
}
C
cc -Iinclude main.c -o main "$library" -lm -pthread || fail "linking with $library"
LD_LIBRARY_PATH=. ./main || fail "exit status $?"
echo "ok   library built by hand"
