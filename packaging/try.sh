#!/bin/bash
# try.sh DIST [PYTHON]: installs the wheel of this machine from the folder DIST, and the newest torch of the index, in a fresh
# environment. Then checks the bits of every rule and trains a step. For the systems that `make test-packages` cannot run: macOS, Windows.
set -eu
dist=$(cd "$1" && pwd)
python=${2:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$python" -m venv environment
case $(uname -s) in
MINGW* | MSYS* | CYGWIN*) dist=$(cygpath -w "$dist") python=environment/Scripts/python ;;
*) python=environment/bin/python ;;
esac
# pip chooses the wheel by this machine's tags, and fails if there is none.
"$python" -m pip install --disable-pip-version-check --quiet --no-index --no-deps --find-links "$dist" halfstep
"$python" -m pip install --disable-pip-version-check --quiet torch numpy
"$python" -m halfstep info
"$python" -m halfstep verify
"$python" - <<'P'
import torch

import halfstep

model = torch.nn.Linear(512, 512, dtype=torch.bfloat16)
before = model.weight.detach().clone()
opt = halfstep.optimizer("adamw/bf16-sr/int8", model.named_parameters(), lr=1e-2)
model(torch.ones(8, 512, dtype=torch.bfloat16)).square().mean().backward()
opt.step()
assert not torch.equal(model.weight, before), "the step changed no weight"
print("ok   a step")
P
