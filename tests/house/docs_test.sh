#!/bin/bash
# Checks that README.md is one screen, and that every rule and storage format of the tables is where users look for it: the defaults in docs/differences.md, the formats in docs/choosing.md, their bytes in docs/formats.md.
# (scripts/generate.py makes the lists of rules and classes; tests/python/docs/test_documents.py runs the code of documents.)
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

[ "$(wc -l <README.md)" -le 120 ] || fail "README.md has more than 120 lines: it is one screen"
wide=$(LC_ALL=C.UTF-8 grep -nP '^.{121,}' README.md || true)
[ -z "$wide" ] || fail "README.md has more than 120 columns: $wide"
echo "ok   README.md is one screen"
