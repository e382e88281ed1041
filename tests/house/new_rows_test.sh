#!/bin/bash
# Tests new rows of the tables in a copy of the sources. Rows that the kernels could not serve do not compile, with a
# message that names the row. Formats whose scales are single bytes (F8_E8M0, F8_E4M3) need a header and a row and
# nothing else. Rows anywhere in the tables neither remove nor change a promised case.
# (make check leaves it out.)
# (make test-all runs it.)
. "$(dirname "$0")/../tools/lib.sh"
need cc
make_scratch
cp -r "$source_dir/src" "$source_dir/include" "$scratch"
cd "$scratch"

# refused FILE EDIT TEXT: edits the file with a sed script, and checks that the tables do not compile and that a message
# has TEXT.
refused() {
    cp "$1" saved
    sed -i "$2" "$1"
    ! cmp -s "$1" saved || fail "the edit $2 changes nothing of $1"
    cc -std=c11 -D_GNU_SOURCE -Iinclude -Isrc -fsyntax-only src/tables/tables.c >log 2>&1 && fail "a row compiles that should not: $1 with $2"
    grep -q "$3" log || { cat log; fail "no message says '$3'"; }
    cp saved "$1"
    echo "ok   $1 with $2 does not compile: $3"
}
# Tests the row of a format and the row of a rule. The message has the name.
refused_format() { refused "src/formats/$1.h" "/^#define $1_ROW/,+1$2" "$3"; }
refused_rule() { refused "src/rules/$1.h" "$2" "$1: $3"; }
for block in 16 48 96 512 0; do
    refused_format int8 "s/block = 32/block = $block/" "int8: blocks have 32, 64, 128 or 256 elements"
done
refused_format int8 's/ROWS, I8, BF16/ROWS, I8, I16/' HSTEP_SCALE_I16
refused_format int8 's/ROWS, I8/COLUMNS, I8/' COLUMNS
refused_format int8 's/code_bits = 8/code_bits = 5/' "int8: codes in blocks have 8, 6 or 4 bits"
refused_format int8 's/I8, BF16/I16, BF16/' "int8: codes in blocks are stored in bytes"
refused_format int8 's/SIGNED | NONNEG/SIGNED | WEIGHT/' "int8: blocks store neither weights nor gradients"
refused_format int8 's/stochastic = 1/stochastic = 2/' "int8: stochastic is 0 or 1"
refused_format int8 's/root = 2/root = 3/' "int8: the root of a grid is 0, 1 or 2"
refused_format int8 's/, root = 2//' 'arguments'
refused_format int8 's/root = 2/roots = 2/' int8_root
refused_format fp8_lamb16 's/root = 0/root = 1/' "fp8-lamb16: the scale of a whole tensor knows no grid"
refused_format fp8_lamb16 's/1 << 30/256/' "fp8-lamb16: the block of a whole tensor has 1 << 30 elements"
refused_format fp8_lamb16 's/F32,/BF16,/' "fp8-lamb16: the scale of a whole tensor is an F32"
refused_format bf16_ecc8 's/I8,/I32,/' "bf16-ecc8: a second plane has 8 or 16 bits"
refused_format bf16_sr 's/BF16, NONE/U8, NONE/' "bf16-sr: codes of single elements have 16 or 32 bits"
refused_format bf16_sr 's/stochastic = 1/stochastic = 2/' "bf16-sr: stochastic is 0 or 1"
refused_format bf16_sr 's/WEIGHT | SIGNED/64 | SIGNED/' "bf16-sr: roles are"
refused_format int8_ecc4 's/WEIGHT/WEIGHT | SIGNED/' "int8-ecc4: packed formats are for weights"
refused_format int8_ecc4 's/U8, U8/U8, NONE/' "int8-ecc4: error codes of a packed format have 4 bits, in bytes"
refused_format int8_ecc4 's/steps = 16/steps = 32/' "int8-ecc4: a scale of a packed format has 1 to 16 steps"
refused_format int8_sr 's/stochastic = 1/stochastic = 0/' "int8-sr: packed formats are written with random bits"
refused_format bf16 's/NONE,/I8,/' "bf16: gradients have no second plane"
refused src/formats/formats.def 's/^FORMAT(16,/FORMAT(17,/' FORMAT_ID_17
refused_rule lion 's/lion_constants }/lion_constants = HSTEP_MAX_SCALARS + 1 }/' "more constants than HSTEP_MAX_SCALARS"
refused_rule lion 's/ELEMENTWISE,/FACTORED(1, 0),/' "FACTORED(n, ...) has n states"
refused_rule lion 's/^    HYPER(beta1/    OPTIONAL("beta1", ROWS, "rows") \\\n&/' "only MATRIX may have an OPTIONAL state over rows"
refused_rule muon 's/OPTIONAL("normalize_rows", ROWS/OPTIONAL("normalize_rows", COLUMNS/' "only MATRIX may have an OPTIONAL state over rows"
refused_rule lion 's/RULE("lion"/RULE("lion-of-more-than-23-characters"/' "names have 1 to 23 characters"
refused_rule lion 's/CAUTIOUS(LION_DECAY)/CAUTIOUS(lion_constants)/' "CAUTIOUS names a constant of another rule"
refused_rule lamb 's/NOT_CAUTIOUS([^)]*)/CAUTIOUS(LAMB_DECAY)/' "CAUTIOUS is for rules whose update no sum comes before"
refused_rule rmsprop 's/^    STATE(NONNEG, "square_avg".*/&\n STATE(SIGNED, "a") STATE(SIGNED, "b") STATE(SIGNED, "c") STATE(SIGNED, "d") \\/' "more states than HALFSTEP_MAX_STATES"
refused src/rules/rules.def 's/RULE(4, lion)/RULE(3, lion)/' RULE_ID_3

# Adds four formats and a rule, none of them at an end of its table. "e5m2" is part of another name, serves second
# moments only, and is the only new format of its geometry. -O1 is enough, because only bits matter.
cp "$source_dir/tests/rows/mx8.h" "$source_dir/tests/rows/nv8.h" src/formats
sed 's/nv8/e5m2/g; s/NV8/E5M2/g; s/ ROWS,/ FLAT,/; s/= SIGNED | NONNEG/= NONNEG/' src/formats/nv8.h >src/formats/e5m2.h
sed 's/bf16_\(decode\|encode\|apply\|ROW\)/twin_\1/; s/ENCODING(bf16)/ENCODING(twin)/; s/BF16_H/TWIN_H/; s/ROW "bf16"/ROW "twin"/; s/SIGNED | NONNEG/SIGNED/' \
    src/formats/bf16.h >src/formats/twin.h
cp "$source_dir/examples/skeleton_rule.h" src/rules/skeleton.h
cp "$source_dir/tests/rows/factored.h" "$source_dir/tests/rows/estimate.h" src/rules
sed -i 's|^#include "formats/int8.h"|&\n#include "formats/mx8.h"\n#include "formats/nv8.h"\n#include "formats/e5m2.h"\n#include "formats/twin.h"|' \
    src/formats/formats.h
sed -i -e 's/^FORMAT(2,/FORMAT(93, twin)\n&/' -e 's/^FORMAT(17,/FORMAT(90, mx8)\nFORMAT(91, nv8)\nFORMAT(92, e5m2)\n&/' src/formats/formats.def
sed -i 's|^#include "rules/sgd.h"|&\n#include "rules/skeleton.h"\n#include "rules/factored.h"\n#include "rules/estimate.h"|' src/rules/rules.h
sed -i 's|^RULE(2, |RULE(90, skeleton)\nRULE(91, factored)\nRULE(92, estimate)\n&|' src/rules/rules.def
have= objects=
while IFS='|' read -r isa processor flags; do
    [ "$processor" = any ] || [ "$processor" = "$(uname -m)" ] || continue
    # shellcheck disable=SC2086
    cc -std=c11 -O1 $flags -ffp-contract=off -fno-math-errno -D_GNU_SOURCE -Iinclude -Isrc -DHSTEP_ISA="$isa" \
        -DHSTEP_VEC_HEADER="\"vec/$isa.h\"" -c src/kernels/kernels.c -o "kernels_$isa.o" >"log_$isa" 2>&1 ||
        { cat "log_$isa"; fail "kernels.c with new rows, for $isa"; }
    have="$have -DHSTEP_HAVE_$isa=1" objects="$objects kernels_$isa.o"
done < <(sed -nE 's/^ISA\( *([a-z0-9_]+) *, *([a-z0-9_]+) *, *"([^"]*)" *\)/\1|\2|\3/p' src/vec/isas.def)
for program in driver golden rules; do
    # shellcheck disable=SC2046,SC2086
    cc -std=c11 -O1 -ffp-contract=off -fno-math-errno -D_GNU_SOURCE -Iinclude -Isrc -I"$source_dir" -I"$source_dir/tools" $have \
        $(find src -name '*.c' ! -name kernels.c) $objects \
        "$source_dir/tests/rows/$program.c" -o $program -lm -ldl -pthread >log 2>&1 || { cat log; fail "the library with new rows"; }
done
./driver mx8 nv8 || fail "new formats do not work"
./rules || fail "vectors over rows and columns, or sums over all tensors"
./golden "$source_dir/tests/golden/hashes.txt" mx8 nv8 e5m2 twin signum || fail "new rows take promised cases away"
