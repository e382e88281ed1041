#!/usr/bin/env python3
"""Fine-tunes a language model on the CPU whose optimizer's states do not fit into memory.

    python examples/offload.py                  # states in offload.states, 0.6 GB on the disk
    python examples/offload.py --steps 40       # goes on from there, bit for bit
    python examples/offload.py --in-memory      # without a file: ends at the limit
    python examples/offload.py --weights FILE --width 1024 --depth 24 --memory 1G    # torch.save()d

--memory is a hard limit on what the process may allocate beside Python and torch: the kernel
refuses more (RLIMIT_DATA). Weights, activations and the pieces of states that pass by must fit.
gradient_release steps each layer in the backward pass, so gradients of all layers never exist at
once. To limit a whole process instead, start it in a memory cgroup:

    systemd-run --user --scope -p MemoryMax=400M python examples/offload.py --memory 10G

The file is the checkpoint. It has the weights too, so a killed run goes on with the next step."""

import argparse
import os
import resource

import torch
from finetune import DEMO, Model, loss_of

import halfstep


def bytes_of(text):
    """Returns the bytes that "160M" or "2G" says."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    return int(float(text[:-1]) * (1 << unit)) if unit else int(text)


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", default=DEMO, help="text to learn")
    add("--weights", help="a state_dict() of Model(width, depth, heads, context), by torch.save()")
    add("--width", type=int, default=512)
    add("--depth", type=int, default=8)
    add("--heads", type=int, default=8)
    add("--context", type=int, default=64)
    add("--batch", type=int, default=4)
    add("--steps", type=int, default=20, help="steps in all, those before included")
    add("--lr", type=float, default=1e-4)
    add("--recipe", default="adamw/bf16-kahan/f32", help="10 bytes a parameter are in the file")
    add("--memory", type=bytes_of, default="230M", help="hard limit beside Python and torch")
    add("--store", default="offload.states", help="the file")
    add("--in-memory", action="store_true", help="keep the states in memory")
    return parser.parse_args()


def limit_memory(more, text):
    """Lets the process allocate so many bytes more, and no others. A first step of a tiny model
    makes torch load what it loads late."""
    tiny = Model(16, 1, 1, 8)
    optimizer = halfstep.AdamW(tiny.parameters())
    loss_of(tiny, text, torch.arange(2), 8).backward()
    optimizer.step()
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + more, held + more))


def main():
    options = read_options()
    with open(options.data, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    limit_memory(options.memory, text)
    model = Model(options.width, options.depth, options.heads, options.context)
    if options.weights:
        model.load_state_dict(torch.load(options.weights, mmap=True, weights_only=True))
    parameters = sum(p.numel() for p in model.parameters())
    store = None if options.in_memory else options.store
    optimizer = halfstep.optimizer(
        options.recipe, model.named_parameters(), lr=options.lr, gradient_release=True, store=store
    )
    for step in range(optimizer.param_groups[0].get("group_steps", 0), options.steps):
        batches = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=batches)
        loss = loss_of(model, text, starts, options.context)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: {loss.item():.4f} nat per byte", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    where = "in memory" if options.in_memory else f"{os.path.getsize(store) / 1e6:.0f} MB on disk"
    print(f"{parameters / 1e6:.1f} M parameters, states {where}; process {peak / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
