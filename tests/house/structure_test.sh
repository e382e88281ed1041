#!/bin/bash
# Checks rules of the sources beside the order of rooms (architecture_test.sh): where hardware may be named, which
# symbols are exported, which functions are never called.
. "$(dirname "$0")/../tools/lib.sh"
need cc nm
cd "$source_dir"
[ -e "$build_dir/libhalfstep.so" ] || fail "$build_dir/libhalfstep.so is not built"
failures=0

# judge WHAT OFFENCES: fails if there are OFFENCES. Each line breaks the rule WHAT.
judge() {
    if [ -n "$2" ]; then
        echo "FAIL $1"
        echo "$2" | sed 's/^/     /'
        failures=$((failures + 1))
    else
        echo "ok   $1"
    fi
}
# sources FOLDER...: prints the C files. having PATTERN FILE...: prints matching lines, also if there are no files.
sources() {
    for folder; do
        [ ! -d "$folder" ] || find "$folder" -name '*.[ch]' -o -name '*.[ch]pp'
    done
}
having() { grep -nE -- "$@" /dev/null || true; }
except() { grep -vE -- "$1" || true; }

hardware='__(x86_64|i386|amd64|SSE|AVX|F16C|FMA|ARM|aarch64|arm|CUDA|NVCC|HIP)|_M_(X64|IX86|ARM)|HSTEP_HAVE_'
hardware_homes='^src/(vec|device/cuda)/|^src/kernels/dispatch\.c$'
judge "#if on hardware only in src/vec, src/device/cuda and src/kernels/dispatch.c" \
    "$(having "^ *# *(if|ifdef|ifndef|elif).*($hardware)" $(sources src tools include | except "$hardware_homes"))"
judge "intrinsics and CUDA headers likewise" \
    "$(having '# *include *<([a-z]+intrin|arm_neon|cpuid|cuda[a-z_]*)\.h>' $(sources src tools | except "$hardware_homes"))"

judge "rules include no format" "$(having '# *include.*formats/' $(sources src/rules))"
# prepare.c and tables.c take prologues and rows from the headers of rules and formats, in scalars. A format sees what it may say about an
# instruction set.
judge "only kernels.c, prepare.c and tables.c see a vector header" \
    "$(having '# *include *(HSTEP_VEC_HEADER|"vec/.*\.h)' $(sources src | except '^src/(kernels/kernels|decide/prepare|tables/tables)\.c$|^src/device/cuda/|^src/vec/') |
        except 'vec/root_code\.h')"
judge "examples include the public headers only" \
    "$(having '# *include *"(base|vec|formats|rules|tables|kernels|decide|device|handle|io)/' $(sources examples bench | except '^examples/skeleton_'))"
judge "only document.c, which looks at every result, sees jansson" \
    "$(having '# *include *<jansson\.h>|\bjson_(object|array|pack|string|integer|real|dump|load)' $(sources tools src | except '^tools/common/document\.c$' ))"

judge "no fused multiply-add" "$(having '\b(v_fma|fmaf?)\(|_mm[0-9]*_(mask_)?f?n?m(add|sub)_p[sd]|vfm[as]q?_' $(sources src))"
judge "the library does not print, exit or abort" \
    "$(having '\b(printf|puts|perror|exit|abort|assert)\(|fprintf\(std(out|err)|# *include *<assert\.h>' $(sources src))"

# The first comment of a long file says why it is long. A short file must not say so.
lengths=
for file in $(git ls-files '*.c' '*.h' '*.py' 2>/dev/null | except '^(include|tests/python)/'); do
    lines=$(wc -l <"$file") says=$(head -n 60 "$file" | tr '*\n' '  ' | tr -s ' ' | grep -ciE '(over|longer than) 500 lines' || true)
    [ "$lines" -le 500 ] || [ "$says" != 0 ] || lengths="$lengths$file: $lines lines, and does not say why"$'\n'
    [ "$lines" -gt 500 ] || [ "$says" = 0 ] || lengths="$lengths$file: $lines lines, and says it is longer"$'\n'
done
judge "files over 500 lines say why" "$lengths"

# Folders may have any name, and a clone any setting of line ends. tests/house/checkout_test.sh builds there.
judge "custom commands are quoted for the shell (VERBATIM)" "$(awk '
    /add_custom_(command|target)\(/ { text = ""; depth = 0; line = FNR }
    line { text = text $0; depth += gsub(/\(/, "(") - gsub(/\)/, ")") }
    line && depth <= 0 { if (text ~ /COMMAND / && text !~ /VERBATIM/) print FILENAME ":" line; line = 0 }' CMakeLists.txt cmake/*.cmake)"
judge "patterns of file(GLOB) begin with sources_here" "$(having '^ *file\(GLOB' CMakeLists.txt cmake/*.cmake | except ' "\$\{sources_here\}/')"
judge "recipes of the Makefile quote folders" "$(having '(^|[^"/])\$\((BUILD|PREFIX)\)' Makefile)"
judge "Git changes no line ends" "$(git ls-files --eol 2>/dev/null | awk '!/attr\/(text=auto eol=lf|-text)/ || ($1 ~ /crlf|mixed/ && !/attr\/-text/)')"

# A build file must not keep a second list.
isas=$(sed -nE 's/^ISA\( *([a-z0-9_]+).*/\1/p' src/vec/isas.def | grep -v '^scalar$' | paste -sd '|')
[ -n "$isas" ] || fail "src/vec/isas.def has no rows"
judge "instruction sets are listed in isas.def only" \
    "$(having "\b($isas)\b" CMakeLists.txt cmake/*.cmake CMakePresets.json Makefile scripts/*.*)"

exported() { nm -D --defined-only "$1" | awk '$2 != "A" { print $3 }' | sed 's/@.*//' | sort; }
for library in libhalfstep libhalfstep_io; do
    [ -e "$build_dir/$library.so" ] || continue
    judge "$library.so exports the functions that tests/golden/abi.txt lists, nothing else" \
        "$(diff <(awk -v l="$library" '$1 == "function" && $3 == l { print $2 }' tests/golden/abi.txt | sort) <(exported "$build_dir/$library.so"))"
done
judge "linked symbols begin with halfstep_ or hstep_" \
    "$(nm --defined-only --extern-only "$build_dir/libhalfstep.a" | awk 'NF == 3 { print $3 }' | except '^(halfstep|hstep)_')"

[ "$failures" = 0 ] || fail "$failures rules are broken"
