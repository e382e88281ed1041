#!/bin/bash
# release.sh TAG [DIST]: fails unless this tree is the release TAG: the tag is v and the version of include/halfstep.h, CHANGELOG.md has its
# section with a date, CITATION.cff has that date. With DIST, a folder of packages, fails unless it has all wheels and the sdist of this
# version; writes their hashes to DIST/SHA256SUMS. Prints the section of CHANGELOG.md, the notes of the release, on stdout.
set -eu
export LC_ALL=C # ranges such as [A-Z] and the order of sort follow the language otherwise
fail() {
    echo "release.sh: $*" >&2
    exit 1
}
[ $# = 1 ] || [ $# = 2 ] || fail "usage: release.sh TAG [DIST]"
tag=$1 dist=
[ $# = 1 ] || dist=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
version=$(sed -n 's/^#define HALFSTEP_VERSION_[A-Z]* *//p' include/halfstep.h | paste -sd .)
[ "$tag" = "v$version" ] || fail "the tag is $tag, and include/halfstep.h has the version $version; tag v$version, or change the header"
head=$(grep -m 1 '^## ' CHANGELOG.md)
day=$(sed -nE "s/^## ${version//./\\.}, ([0-9]{4}-[0-9]{2}-[0-9]{2})$/\1/p" <<<"$head")
[ -n "$day" ] || fail "CHANGELOG.md begins with '$head'; write '## $version, YYYY-MM-DD' with the date of the release"
grep -qx "version: $version" CITATION.cff || fail "CITATION.cff has another version than $version"
grep -qx "date-released: $day" CITATION.cff || fail "CITATION.cff lacks the line 'date-released: $day'"

if [ -n "$dist" ]; then
    expected=$(
        echo "halfstep-$version.tar.gz"
        tail -n +2 packaging/platforms.csv | cut -d, -f1 | sed "s/.*/halfstep-$version-py3-none-&.whl/"
    )
    found=$(cd "$dist" && find . -name '*.whl' -o -name 'halfstep-*.tar.gz' | sed 's|^\./||')
    different=$(diff <(sort <<<"$expected") <(sort <<<"$found")) ||
        fail "$dist has not the wheels of packaging/platforms.csv and the sdist (<: missing, >: too many): $different"
    (cd "$dist" && find . -type f ! -name SHA256SUMS | sed 's|^\./||' | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)
fi
awk '/^## / { n++ } n == 1 && !/^## /' CHANGELOG.md
