#!/bin/sh
# Prints the results of random_stats.sh as a Markdown table: random_table.sh LOG...; exits 1 if a test failed.
# First runs are counted. "weak, cleared" are weak ones that a repetition with another seed did not confirm.
set -eu
echo '| generator | strand | p-values | passed | weak, cleared | weak three times | failed |'
echo '|---|---|---|---|---|---|---|'
status=0
for log in "$@"; do
    name=$(basename "$log" .log)
    awk -F'|' -v generator="${name%-*}" -v kind="${name#*-}" '
        # A test may print several p-values with one ntuple: the n-th of a run belongs to the n-th of its repetition.
        { run = $1 "|" $2; place = $2 "|" $3 "|" $4 "|" ++seen[run "|" $3 "|" $4]
          if (!(place in total)) { order[++places] = place; firsts[place] = $8 }
          total[place]++
          if ($8 != "PASSED") bad[place]++
          if ($8 == "FAILED") failed[place] = 1 }
        END {
          for (k = 1; k <= places; k++) {
            p = order[k]
            if (failed[p]) f++
            else if (total[p] >= 3 && bad[p] == total[p]) w3++
            else if (firsts[p] != "PASSED") w++
            else ok++
          }
          printf "| %s | %s | %d | %d | %d | %d | %d |\n", generator, kind, places, ok, w, w3, f
          exit f + w3 > 0 || places == 0
        }' "$log" || status=1
done
exit $status
