#!/bin/bash
# Tests completion and the manual page, which are made of the tables that --help prints. Every option is there, and bash
# offers what the program takes.
. "$(dirname "$0")/../tools/lib.sh"
halfstep=$build_dir/halfstep
[ -x "$halfstep" ] || skip "$halfstep is not built"
make_scratch
cd "$scratch"
commands=$("$halfstep" --help | sed -nE 's/^  ([a-z]+) +[a-z].*/\1/p' | grep -v '^halfstep$')
"$halfstep" man >page
options=0
for command in $commands; do
    kinds=$("$halfstep" complete "$command" '' | grep -E '^(lm|mnist)$' || true)
    for kind in ${kinds:-none}; do
        words=$command
        [ "$kind" = none ] || words="$command $kind"
        # Takes the page from the heading of this command to the next heading.
        sed -n "/^\.SS halfstep $words /,/^\.SS halfstep /p" page | sed 's/\\-/-/g; s/\\f[BIR]//g' >part
        "$halfstep" complete $words -- >offered || fail "complete $words --"
        for option in $("$halfstep" $words --help | sed -nE 's/^  (--[a-z0-9-]+).*/\1/p'); do
            grep -qE -- "^$option( |\$)" part || fail "the manual page lacks $option of $words"
            grep -qx -- "$option" offered || fail "completion lacks $option of $words"
            options=$((options + 1))
        done
    done
done
[ "$options" -gt 80 ] || fail "only $options options were looked at"
echo "ok   $options options are in the manual page and are completed"
if command -v groff >/dev/null; then
    groff -man -Tascii -ww page >shown 2>warnings || fail "groff"
    [ ! -s warnings ] || fail "groff warns: $(head -3 warnings)"
    grep -q 'halfstep train lm' shown || fail "the page shows nothing"
    echo "ok   groff takes it without a warning"
fi

# offered WORD...: prints what bash offers for the last word, with the script that the program prints.
offered() {
    PATH=$build_dir:$PATH bash -c '
        eval "$(halfstep completion bash)"
        compopt() { :; }
        COMP_WORDS=(halfstep "$@") COMP_CWORD=$#
        _halfstep
        printf "%s\n" "${COMPREPLY[@]}"' _ "$@"
}
expect() { # what has to be offered, all of it in one line, and the words
    local wanted=$1
    shift
    [ "$(offered "$@" | paste -sd ' ')" = "$wanted" ] || fail "halfstep $*: $(offered "$@" | paste -sd ' '), not $wanted"
}
expect 'train' tr
expect 'lm mnist' train ''
expect 'mnist' train m
expect '--recipes' compare lm --rec
expect "$("$halfstep" info | sed -nE 's,^  (adam[^ ]*) .*,\1/,p' | paste -sd ' ')" train lm --recipe adam
expect 'adamw/bf16-ecc8 adamw/bf16-ecc16' train lm --recipe adamw/bf16-ecc
expect 'adamw/int8-sr adamw/int8-ecc4' train lm --recipe adamw/int
expect 'int8-sr int8-ecc4' convert a b --to int
expect 'adamw/bf16-sr/int8 adamw/bf16-sr/int6 adamw/bf16-sr/int4' train lm --recipe adamw/bf16-sr/int
expect '' train lm --data ''
expect '' train lm --data one ''
expect '--steps' train lm --data one two --step
expect 'constant cosine' train lm --data one --steps 3 --schedule co
expect '' nonsense --x
echo "ok   bash completes commands, options, choices and recipes"
for shell in bash zsh fish; do
    "$halfstep" completion "$shell" >script
    grep -q 'halfstep complete' script || fail "completion $shell"
    ! command -v "$shell" >/dev/null || "$shell" -n script || fail "$shell does not take its script"
done
! "$halfstep" completion tcsh >out 2>err || fail "completion tcsh"
grep -q "unknown shell 'tcsh'; known: bash, zsh, fish" err || fail "completion tcsh: $(cat err)"
echo "ok   scripts for three shells"
