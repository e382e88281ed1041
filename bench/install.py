"""Prints how many seconds pass from `pip install halfstep` to the first step, in an environment
that has torch and not yet halfstep. What torch takes by itself is listed apart. Its first optimizer
takes seconds, because it imports torch's compiler.

    install.py PYTHON FOLDER    the environment's Python, and the folder of the wheels
"""

import json
import subprocess
import sys
import time

FIRST_STEP = """
import time
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
model = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16)
model(torch.ones(8, 1024, dtype=torch.bfloat16)).square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1)
times.append(time.perf_counter())
import halfstep
times.append(time.perf_counter())
halfstep.optimizer("adamw/bf16-sr/int8", model.named_parameters(), lr=1e-4).step()
times.append(time.perf_counter())
print([b - a for a, b in zip(times, times[1:])])
"""


def measure(python, folder):
    """Returns seconds by part."""
    start = time.perf_counter()
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links"]
        + [folder, "--only-binary", ":all:", "halfstep"],
        check=True,
    )
    install = time.perf_counter() - start
    out = subprocess.run([python, "-I", "-c", FIRST_STEP], check=True, stdout=subprocess.PIPE)
    parts = "import torch", "torch's first gradient and optimizer", "import halfstep", "first step"
    return {"pip install": install, **dict(zip(parts, json.loads(out.stdout)))}


if __name__ == "__main__":
    found = measure(*sys.argv[1:])
    ours = sum(found[part] for part in ("pip install", "import halfstep", "first step"))
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found.items())
    print(f"{ours:.1f} s from pip install to the first step beside torch ({parts})")
