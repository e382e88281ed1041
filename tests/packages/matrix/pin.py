"""Prints the list of an environment of scripts/matrix.sh. It has what this Python's pip takes from
the index for a torch and other packages, all pinned with hashes.

    python3.9 tests/packages/matrix/pin.py torch==2.6.0 pytest numpy safetensors \
        >tests/packages/matrix/torch-2.6.0-python-3.9.txt
"""

import json
import os
import subprocess
import sys

wanted = sys.argv[1:]
pip = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--quiet"]
# Neither a pip.conf nor what is installed decides which torch is taken.
report = subprocess.run(
    [*pip, "--ignore-installed", "--only-binary", ":all:", "--report", "-", *wanted],
    env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
    stdout=subprocess.PIPE,
    check=True,
)
print("# Written by tests/packages/matrix/pin.py", *wanted)
for item in json.loads(report.stdout)["install"]:
    about, digest = item["metadata"], item["download_info"]["archive_info"]["hash"]
    print(f"{about['name']}=={about['version']} \\\n    --hash={digest.replace('=', ':')}")
