#!/bin/bash
# The Python package as its users get it: this tree becomes an sdist, the sdist a wheel, what is in the wheel is judged, and
# it is installed into the virtual environment that the Python tests run in.
. "$(dirname "$0")/lib.sh"
need python3 cmake readelf
make_scratch
installed=$build_dir/venv/halfstep.installed
rm -f "$installed"
status=0
bash "$source_dir/scripts/venv.sh" "$build_dir/venv" || status=$?
[ "$status" = 0 ] || exit "$status"
python=$build_dir/venv/bin/python
unset HALFSTEP_LIBRARY PYTHONPATH
version=$(sed -n 's/^#define HALFSTEP_VERSION_[A-Z]* *//p' "$source_dir/include/halfstep.h" | paste -sd .)

(cd "$source_dir" && "$python" -c 'import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])' "$scratch") \
    >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the sdist cannot be made"; }
tar xzf "$scratch/halfstep-$version.tar.gz" -C "$scratch" || fail "no sdist of version $version: $(ls "$scratch")"
for file in docs/python.md examples/finetune.py README.md CHANGELOG.md; do
    [ -s "$scratch/halfstep-$version/$file" ] || fail "the sdist lacks $file"
done
echo "ok   sdist"

# Into a folder that stays, where only what differs is replaced: then the next build compiles only that.
tree=$build_dir/wheel/sdist
mkdir -p "$tree"
(cd "$tree" && find . -type f) | while read -r file; do
    [ -e "$scratch/halfstep-$version/$file" ] || rm "$tree/$file"
done
(cd "$scratch/halfstep-$version" && find . -type f) | while read -r file; do
    cmp -s "$scratch/halfstep-$version/$file" "$tree/$file" && continue
    mkdir -p "$(dirname "$tree/$file")"
    cat "$scratch/halfstep-$version/$file" >"$tree/$file"
done
CMAKE_BUILD_PARALLEL_LEVEL=2 "$python" -m pip wheel --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --config-settings=build-dir="$build_dir/wheel/build" -w "$scratch/wheel" "$tree" >"$scratch/log" 2>&1 ||
    { cat "$scratch/log"; fail "the wheel cannot be made from the sdist"; }

wheel=$(echo "$scratch"/wheel/*)
[ "$(basename "$wheel")" = "halfstep-$version-py3-none-linux_$(uname -m).whl" ] || fail "the wheel is called $wheel"
"$python" - "$wheel" "$source_dir/python" "halfstep-$version.dist-info" <<'P' || fail "the wheel does not hold what it should"
import pathlib
import sys
import zipfile

wheel, source, info = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = {n for n in archive.namelist() if not n.startswith(info + "/")}
    links = [i.filename for i in archive.infolist() if i.external_attr >> 28 == 0xA]
    wanted = {p.relative_to(source).as_posix() for p in pathlib.Path(source).rglob("*.py*")
              if p.suffix in (".py", ".pyi")} | {"halfstep/libhalfstep.so", "halfstep/py.typed"}
    assert "halfstep/__init__.pyi" in wanted
    assert names == wanted, f"missing {sorted(wanted - names)}, not expected {sorted(names - wanted)}"
    assert not links, links
    assert f"{info}/licenses/LICENSE" in archive.namelist(), "no licence"
P
echo "ok   wheel"

"$python" -m pip install --disable-pip-version-check --quiet --no-index --no-deps --force-reinstall "$wheel" \
    >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the wheel cannot be installed"; }
# -I: neither the environment nor the working folder has a say.
library=$(cd "$scratch" && "$python" -I -c 'import halfstep, halfstep._abi as abi; print(abi.version(), abi.path)') ||
    fail "import halfstep"
case "$library" in
"$version $build_dir/venv/"*/halfstep/libhalfstep.so) library=${library#* } ;;
*) fail "loaded $library" ;;
esac
needed=$(readelf -d "$library" | sed -nE 's/.*(NEEDED|RPATH|RUNPATH)[^[]*\[(.*)\]/\1 \2/p' |
    grep -vE '^NEEDED (lib(c|m|pthread|dl)\.so|ld-linux)' || true)
[ -z "$needed" ] || fail "the library in the wheel has $needed"
echo "ok   installed, imported; the library needs the C library alone"
touch "$installed"
