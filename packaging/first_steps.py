"""Steps by the package that is installed, with states in memory and in the file that is named."""

import gc
import sys

import torch

import halfstep


def train(steps, **options):
    """Returns a weight after some more steps than the file of states, if any, has."""
    torch.manual_seed(1)  # of which optimizers draw their own seed
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 4096, dtype=torch.bfloat16).view(64, 64))
    opt = halfstep.optimizer("adamw/bf16-sr/int8", [("weight", weight)], lr=1e-3, **options)
    for _ in range(steps):
        weight.grad = weight.detach() * 0.5
        opt.step()
    return weight


train(2, store=sys.argv[1])
gc.collect()  # which closes the file
if not torch.equal(train(5), train(3, store=sys.argv[1])) or torch.equal(train(5), train(4)):
    sys.exit("5 steps in memory do not give the bits of 2 and 3 with states in a file")
print("5 steps, and 2 and 3 with states in a file: the same bits")
