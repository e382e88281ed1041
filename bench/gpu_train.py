#!/usr/bin/env python3
"""Trains language models on a GPU: a large one under a hard limit of memory, and small ones beside
fp32.

    python bench/gpu_train.py limit                     full fine-tuning steps of 6.7 billion
                                                        parameters in 24 GB, and of 14 billion in
                                                        int8-ecc4: peak, tokens a second
    python bench/gpu_train.py ladder --data TEXT        fp32 against int8 and int4 states for 10, 40
                                                        and 120 million parameters: losses
    python bench/gpu_train.py ladder --minutes 10       as many steps as that allows, the same in
                                                        all recipes of a size
    python bench/gpu_train.py limit --device cpu --width 64 --depth 2 --context 32 --vocab 256
                                                        without a GPU, to see that everything runs

`limit` trains a Llama-shaped model of plain modules with activation checkpointing. Its first
weights are random. The whole process may hold --memory bytes of the GPU. torch's allocator gets
what the context and device code leave of them. A peak above them is an error.

`ladder` trains the model of bench/trainer_torch.py from the same weights on the same batches in
each recipe. Matrix products take BF16 in all of them. Losses are of text that no step has seen.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import math
import os
import sys
import time

import torch

BENCH = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, BENCH)
import gpu  # noqa: E402
import trainer_torch  # noqa: E402

import halfstep  # noqa: E402

TEXT = os.path.join(BENCH, os.pardir, "data", "demo.txt")
#: of `limit`: what is printed, and the optimizer of named parameters. A name with QUANTIZED has its
#: weights so, in a model that is larger by the GROWTH of width and heads, and of depth
QUANTIZED, GROWTH = "int8-ecc4", (5 / 4, 11 / 8)
WAYS = {
    "bf16-sr/int4 released": lambda named: halfstep.optimizer(
        "adamw/bf16-sr/int4", named, lr=1e-5, gradient_release=True
    ),
    "StateStreaming bf16-sr/int8 released": lambda named: halfstep.StateStreaming(
        named, "adamw/bf16-sr/int8", lr=1e-5, gradient_release=True
    ),
    f"StateStreaming {QUANTIZED}/int8 released": lambda named: halfstep.StateStreaming(
        named, f"adamw/{QUANTIZED}/int8", lr=1e-5, gradient_release=True
    ),
    "torch.optim.AdamW, BF16": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-5),
}
#: of `ladder`: width, depth, heads, rate
LADDER = {"10 M": (384, 6, 6, 1e-3), "40 M": (640, 8, 10, 8e-4), "120 M": (1024, 10, 16, 6e-4)}
RECIPES = ("adamw/f32/f32", "adamw/bf16-sr/int8", "adamw/bf16-sr/int4")


class Checkpointed(torch.nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return torch.utils.checkpoint.checkpoint(self.layer, *inputs, use_reentrant=False)


def model_of(shape, device, dtype, seed, checkpointed=False, quantized=None):
    """Makes the model with normal weights where it will lie, so that no copy of a large one exists
    elsewhere. `quantized` is a format of 8-bit weights."""
    with torch.device("meta"):
        model = trainer_torch.Llama(shape).to(dtype)
    if quantized:
        halfstep.nn.quantize_(model, quantized)
    if checkpointed:
        model.model.layers = torch.nn.ModuleList(
            [Checkpointed(layer) for layer in model.model.layers]
        )
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02, generator=generator) if p.dim() > 1 else p.fill_(1)
    model.rotation = tuple(table.to(device) for table in trainer_torch.rotation_tables(shape))
    return model


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def held():
    """Returns the bytes of the GPU that are taken, by anybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


# ---- A large model under a limit -----------------------------------------------------------------


def train_limited(way, shape, given):
    """Returns {"peak": bytes of the GPU, "tokens": a second, "losses": of the first and the last
    step}."""
    on_gpu = given.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    quantized = QUANTIZED if QUANTIZED in way else None
    model = model_of(shape, given.device, torch.bfloat16, 1, checkpointed=True, quantized=quantized)
    optimizer = WAYS[way](list(model.named_parameters()))
    text, losses, begun = trainer_torch.Text(TEXT, shape, 1), [], 0.0
    for step in range(given.steps):
        if step == 2:  # states are made, kernels loaded
            synchronize(given.device)
            begun = time.perf_counter()
        loss = model(text.batch(step)[0].to(given.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize(given.device)
    seconds = time.perf_counter() - begun
    peak = held() + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved() if on_gpu else 0
    return {
        "peak": peak,
        "tokens": (given.steps - 2) * shape.batch * shape.context / seconds,
        "losses": [float(losses[0]), float(losses[-1])],
    }


def limit(given):
    usual = trainer_torch.Shape(
        given.width, given.depth, given.heads, given.context, given.batch, given.vocab
    )
    larger = dataclasses.replace(
        usual,
        width=int(given.width * GROWTH[0]),
        heads=int(given.heads * GROWTH[0]),
        depth=int(given.depth * GROWTH[1]),
    )
    total = torch.cuda.mem_get_info()[1] if given.device == "cuda" else 0
    if total:
        # Device code and contexts are there before the limit is set, so that it holds for
        # everything.
        p = torch.nn.Parameter(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16))
        warm = halfstep.optimizer("adamw/bf16-sr/int4", [p])
        p.grad = torch.ones_like(p)
        warm.step()
        (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
        del p, warm
        gc.collect()
        torch.cuda.empty_cache()
        outside = held() - torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((given.memory - outside) / total)
        print(
            f"{torch.cuda.get_device_name()}; limit {given.memory / 1e9:.1f} GB, of which"
            f" {outside / 1e9:.2f} GB are context and device code"
        )
    print(f"batches of {usual.batch} x {usual.context} tokens\n")
    print(
        "| way | billion parameters | peak, GB | tokens a second | loss, first and last of so many"
        " steps |\n|---|---:|---:|---:|---|"
    )
    failed, found = False, []
    for way in [way for way in WAYS if given.only in way]:
        shape = larger if QUANTIZED in way else usual
        try:
            row = train_limited(way, shape, given)
            text = (
                f"{row['peak'] / 1e9:.2f} | {row['tokens']:.0f} | {row['losses'][0]:.3f},"
                f" {row['losses'][1]:.3f} of {given.steps}"
            )
            failed = failed or row["peak"] > given.memory or not math.isfinite(row["losses"][1])
            found.append({"way": way, "parameters": shape.params, **row})
        except torch.OutOfMemoryError:
            text = "out of memory | | "
            failed = failed or "torch" not in way
        print(f"| {way} | {shape.params / 1e9:.2f} | {text} |", flush=True)
        gc.collect()
        if total:
            torch.cuda.empty_cache()
    return failed, found


# ---- Small models beside fp32 --------------------------------------------------------------------


def train_small(recipe, shape, rate, given):
    """Returns the loss on text that was not trained on, and the seconds."""
    low = "bf16" in recipe
    model = model_of(shape, given.device, torch.float32, given.seed)
    if low:
        model = model.to(torch.bfloat16)
    optimizer = halfstep.optimizer(
        recipe,
        model.named_parameters(),
        lr=rate,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        clip_norm=1.0,
        seed=given.seed,
    )
    text = trainer_torch.Text(given.data, shape, given.seed)

    def loss_of(batch):
        with torch.autocast(given.device, torch.bfloat16, enabled=not low):
            return model(batch[0].to(given.device))

    begun = time.perf_counter()
    for step in range(given.steps):
        at = (step + 1) / given.steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(20 * at, 0.1 + 0.45 * (1 + math.cos(math.pi * at)))
        loss_of(text.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(given.device)
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        losses = [float(loss_of(batch)) for batch in text.evaluation(given.evaluation)]
    return sum(losses) / len(losses), seconds


def steps_within(minutes, shape, rate, given):
    """Returns how many steps each recipe of a size can take, if all sizes share the minutes
    evenly. At least two."""
    given.steps = 10 if minutes else 2
    seconds = train_small(RECIPES[0], shape, rate, given)[1] / given.steps
    runs = len(RECIPES) * given.seeds * sum(given.only in name for name in LADDER)
    return max(2, int(60 * minutes / runs / seconds))


def ladder(given):
    print(
        "| parameters | recipe | steps | seconds | loss | beside fp32"
        " |\n|---|---|---:|---:|---:|---:|"
    )
    found = []
    for (name, (width, depth, heads, rate)), given.seed in itertools.product(
        LADDER.items(), range(1, given.seeds + 1)
    ):
        if given.only not in name:
            continue
        shape, first = trainer_torch.Shape(width, depth, heads, given.context, given.batch), None
        if given.minutes is not None:
            given.steps = steps_within(given.minutes, shape, rate, given)
        for recipe in RECIPES:
            loss, seconds = train_small(recipe, shape, rate, given)
            first = loss if first is None else first
            found.append(
                {
                    "parameters": shape.params,
                    "recipe": recipe,
                    "steps": given.steps,
                    "seconds": seconds,
                    "loss": loss,
                    "gap": loss - first,
                }
            )
            print(
                f"| {shape.params / 1e6:.1f} M | `{recipe}` | {given.steps} | {seconds:.0f} |"
                f" {loss:.4f} | {loss - first:+.4f} |",
                flush=True,
            )
            gc.collect()
            if given.device == "cuda":
                torch.cuda.empty_cache()
    return not all(math.isfinite(row["loss"]) for row in found), found


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="limit|ladder")
    one = commands.add_parser("limit", help="a large model under a limit of memory")
    one.add_argument("--memory", type=float, default=24e9, help="bytes of the GPU (default: 24e9)")
    for name, value in (
        ("width", 4096),
        ("depth", 32),
        ("heads", 32),
        ("context", 1024),
        ("batch", 1),
        ("vocab", 32000),
        ("steps", 6),
    ):
        one.add_argument("--" + name, type=int, default=value)
    two = commands.add_parser("ladder", help="small models beside fp32")
    two.add_argument("--data", default=TEXT, help="a text (default: data/demo.txt)")
    for name, value in (
        ("context", 256),
        ("batch", 32),
        ("steps", 1000),
        ("evaluation", 8),
        ("seeds", 1),
    ):
        two.add_argument("--" + name, type=int, default=value)
    two.add_argument("--minutes", type=float, help="in place of --steps")
    for part in (one, two):
        part.add_argument("--only", default="", help="what a way's or a size's name contains")
        part.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
        part.add_argument("--json", help="write the results to a file as well")
    given = parser.parse_args(arguments)
    why = gpu.no_gpu(torch) if given.device == "cuda" else None
    if why:
        sys.exit(f"gpu_train.py: {why}; --device cpu runs everything on the processor")
    failed, found = {"limit": limit, "ladder": ladder}[given.command](given)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
            file.write("\n")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
