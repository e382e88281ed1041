#!/bin/bash
# Compiles and runs the program on the first page of halfstep.h, the blocks of docs/c.md, and the two trainers of
# docs/guides/c-trainer.md. Checks that links of pages for C lead to files of a checkout. Checks that every rule and
# storage format of the tables is where users look for it: the defaults in docs/differences.md, the formats in
# docs/choosing.md, their bytes in docs/formats.md. (scripts/generate.py makes the lists of rules and classes.)
. "$(dirname "$0")/../tools/lib.sh"
cd "$source_dir"
failures=0

# named FILE TEXT WHAT: checks that FILE contains TEXT.
named() {
    grep -qF -- "$2" "$1" && return
    echo "FAIL $1 lacks $2 of the $3 (docs/adding.md)"
    failures=$((failures + 1))
}

rules=$(sed -nE 's/^RULE\([0-9]+, ([a-z0-9_]+)\)$/\1/p' src/rules/rules.def | while read -r rule; do
    sed -nE 's/^ *RULE\("([^"]+)".*/\1/p' "src/rules/$rule.h"
done)
formats=$(sed -nE 's/^FORMAT\( *([0-9]+) *, *([a-z0-9_]+)\)/\1 \2/p' src/formats/formats.def | while read -r id prefix; do
    sed -nE "s/^#define ${prefix}_ROW \"([^\"]+)\".*/\1 $id/p" "src/formats/$prefix.h"
done)
[ -n "$rules" ] && [ "$(wc -l <<<"$formats")" = "$(grep -c "^FORMAT(" src/formats/formats.def)" ] || fail "rules.def has no rows, or a format has none"
while read -r name; do
    named docs/differences.md "\`$name\`" "rule '$name'"
done <<<"$rules"
while read -r name id; do
    named docs/choosing.md "\`$name\`" "format '$name'"
    named docs/formats.md "| \`$name\` | $id |" "format '$name'"
done <<<"$formats"
[ "$failures" = 0 ] || fail "$failures places do not know a rule or a format"
echo "ok   $(wc -l <<<"$rules") rules and $(wc -l <<<"$formats") formats are in the documents"

need cc
make_scratch
sed -n '/^ \* This header is the manual/,/^ \*   }$/p' include/halfstep.h | sed -e 1,2d -e 's/^ \*$//' -e 's/^ \*   //' >"$scratch/first.c"
[ "$(wc -l <"$scratch/first.c")" -le 25 ] || fail "the program on the first page of halfstep.h has more than 25 lines"
cc -std=c11 -Wall -Wextra -Werror -Iinclude "$scratch/first.c" -o "$scratch/first" -L"$build_dir" -lhalfstep -lm -pthread ||
    fail "the program on the first page of halfstep.h does not compile"
result=$(LD_LIBRARY_PATH="$build_dir" "$scratch/first") || fail "the program on the first page of halfstep.h ends with an error"
awk -v w="$result" 'BEGIN { exit !(w > 0.5 && w < 1.2) }' || fail "the program on the first page of halfstep.h prints '$result', not a weight near 1"
echo "ok   the program on the first page of halfstep.h: $result"

# The blocks of C in docs/c.md save an optimizer and its weight, and load both.
if [ -e "$build_dir/libhalfstep_io.so" ]; then
    cat >"$scratch/saves.c" <<C
#include <halfstep_io.h>
#include <stdio.h>
#include <stdlib.h>
int main(void)
{
    static float w[4096];
    void *weights[] = {w};
    uint64_t step = 7;
    halfstep_optimizer *opt;
    int32_t index;
    halfstep_tensor t = {sizeof t, .name = "w", .gradient = "f32", .ndim = 2, .rows = 64, .row_length = 64};
    if (halfstep_create(NULL, &opt) || halfstep_add_group(opt, "adamw", &index)) return 2;
    if (halfstep_add_tensor(opt, &t, &index) || halfstep_allocate_states(opt)) return 2;
$(awk '/^```/ { inside = $0 == "```c"; if (inside) print "    w[5] = " (n++ ? 0 : 3) ";"; next } inside { print "    " $0 }' docs/c.md)
    halfstep_destroy(opt);
    return code || w[5] != 3;
}
C
    cc -std=c11 -Wall -Wextra -Werror -Iinclude "$scratch/saves.c" -o "$scratch/saves" -L"$build_dir" -lhalfstep_io -lhalfstep ||
        fail "the blocks of docs/c.md do not compile"
    log=$(cd "$scratch" && LD_LIBRARY_PATH="$build_dir" ./saves 2>&1) || fail "the blocks of docs/c.md load nothing: $log"
    [ -e "$scratch/run/checkpoint-7" ] || fail "the blocks of docs/c.md save no checkpoint"
    echo "ok   the program in docs/c.md saves and loads"
fi

# The trainer with the library prints the losses of the page, in fp32 those of the trainer without it. A run that ends
# and goes on has the bits of one that does not.
if [ -e "$build_dir/libhalfstep_io.so" ]; then
    guide=docs/guides/c-trainer.md trainer=$scratch/trainer
    mkdir -p "$trainer/whole" "$trainer/halves" "$trainer/f32"
    awk -v folder="$trainer" '/^```/ { file = match($0, /title="[^"]*"/) ? folder "/" substr($0, RSTART + 7, RLENGTH - 8) : ""; next }
                              file { print >file }' "$guide"
    flags="-std=c11 -Wall -Wextra -Werror -Wpedantic -Wno-missing-field-initializers"
    # shellcheck disable=SC2086
    cc $flags "$trainer/before.c" -o "$trainer/before" -lm &&
        cc $flags -Iinclude "$trainer/after.c" -o "$trainer/after" -L"$build_dir" -lhalfstep_io -lhalfstep ||
        fail "the trainers of $guide do not compile"
    export LD_LIBRARY_PATH="$build_dir"
    losses=$(awk '/^\$/ { inside = $2 == "./before"; next } /^```/ { inside = 0 } inside' "$guide")
    [ "$(wc -l <<<"$losses")" = 3 ] || fail "$guide has no three losses"
    # near FIRST SECOND MOST: checks that the losses of two runs differ by no more than MOST.
    near() {
        paste <(echo "$1") <(echo "$2") | awk -v most="$3" '
            { d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || d > most) bad = 1 } END { exit bad || NR != 3 }'
    }
    near "$losses" "$("$trainer/before")" 2e-6 || fail "before.c of $guide prints other losses"
    near "$losses" "$(cd "$trainer/f32" && ../after adamw/f32)" 2e-6 || fail "after.c of $guide prints other losses in fp32"
    near "$losses" "$(cd "$trainer/whole" && ../after)" 2e-3 || fail "after.c of $guide does not train in BF16"
    (cd "$trainer/halves" && ../after adamw/bf16-sr/int8 100 && ../after) >"$trainer/out" || fail "after.c of $guide does not go on: $(cat "$trainer/out")"
    [ "$(wc -l <"$trainer/out")" = 3 ] || fail "after.c of $guide does not begin where it was: $(cat "$trainer/out")"
    for file in model optimizer; do
        cmp "$trainer/whole/run/$file.safetensors" "$trainer/halves/run/$file.safetensors" || fail "after.c of $guide goes on with other bits"
    done
    echo "ok   the trainers in $guide have one loss, and go on with the same bits"
fi

for page in docs/c.md docs/start/first-c-program.md docs/guides/c-trainer.md; do
    while read -r link; do
        [ -e "$(dirname "$page")/$link" ] || fail "$page has a link to $link, which no checkout has"
    done < <(grep -oE '\]\([^)#:]+' "$page" | cut -c 3-)
done
echo "ok   links of pages for C lead to files"

[ "$(wc -l <README.md)" -le 120 ] || fail "README.md has more than 120 lines: it is one screen"
wide=$(LC_ALL=C.UTF-8 grep -nP '^.{121,}' README.md || true)
[ -z "$wide" ] || fail "README.md has more than 120 columns: $wide"
echo "ok   README.md is one screen"
