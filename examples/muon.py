#!/usr/bin/env python3
"""Trains a small language model with experts by one optimizer: Muon for matrices, AdamW for the
rest.

    python examples/muon.py                     # data/demo.txt, half a minute on one core
    python examples/muon.py --data FILE --steps 500 --coefficients polar-express

The model is a transformer over bytes, made of plain torch modules. The weights of all experts of a
layer are one parameter of shape [experts, rows, columns]. The same model is trained twice from the
same weights, with the same batches: by halfstep.Muon with `adamw`, and by halfstep.AdamW alone.
Weights are BF16 and states int8, so a parameter takes 4 bytes beside its gradient and less."""

import argparse
import copy
import math
import os
import time

import torch
from torch import nn
from torch.nn import functional

import halfstep

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "data", "demo.txt")


class Experts(nn.Module):
    """Perceptrons of which each token takes the two that a router gives the most weight."""

    def __init__(self, width, experts, taken=2):
        super().__init__()
        self.taken = taken
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(2 * width))

    def forward(self, x):
        most, which = self.router(x).softmax(-1).topk(self.taken, dim=-1)
        share = torch.zeros(*x.shape[:-1], len(self.up), dtype=x.dtype)
        share = share.scatter(-1, which, most / most.sum(-1, keepdim=True))
        # All experts compute all tokens, which is simple, and quick enough at this size.
        inner = functional.gelu(torch.einsum("btw,emw->btem", x, self.up))
        return torch.einsum("btem,ewm,bte->btw", inner, self.down, share)


class Block(nn.Module):
    """A layer: causal attention and experts, each after a norm."""

    def __init__(self, width, heads, experts):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.experts = Experts(width, experts)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    """Returns the logits of the next byte at every place of a window."""

    def __init__(self, width, depth, heads, experts, context):
        super().__init__()
        self.embed, self.embed_places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts) for _ in range(depth))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        x = self.embed(x) + self.embed_places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def train(model, optimizer, text, options):
    """Trains the model. Returns the mean loss of the last tenth of the steps, in nat per byte."""
    batches = torch.Generator().manual_seed(options.seed)
    # One schedule for both rules: each group falls from its own rate to a tenth of it.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: 0.1 + 0.45 * (1 + math.cos(math.pi * i / options.steps))
    )
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=batches)
        window = text[starts[:, None] + torch.arange(options.context + 1)].long()
        logits = model(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, options.steps // 10) :]
    return sum(last) / len(last)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=DEMO, help="a file of text (data/demo.txt)")
    parser.add_argument("--coefficients", help="a published list, such as polar-express")
    for name, initial in (
        *(("steps", 120), ("batch", 8), ("context", 64), ("seed", 0)),
        *(("width", 64), ("depth", 2), ("heads", 4), ("experts", 4)),
    ):
        parser.add_argument(f"--{name}", type=int, default=initial, help=f"({initial})")
    options = parser.parse_args(arguments)
    with open(options.data, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    torch.manual_seed(options.seed)
    shape = options.width, options.depth, options.heads, options.experts, options.context
    start = Model(*shape).to(torch.bfloat16)
    common = {"states": "int8", "clip_norm": 1.0, "seed": 1}
    muon = {"lr": 0.05, "weight_decay": 0.01, "adamw": {"lr": 3e-3, "betas": (0.9, 0.95)}}
    if options.coefficients:
        muon["ns_coefficients"] = options.coefficients
    results = {}
    for name, make in (
        ("Muon with AdamW", lambda p: halfstep.Muon(p, **muon, **common)),
        ("AdamW alone", lambda p: halfstep.AdamW(p, lr=3e-3, betas=(0.9, 0.95), **common)),
    ):
        model = copy.deepcopy(start)
        optimizer = make(model.named_parameters())
        if not results:
            print("\n".join(repr(optimizer).splitlines()[:5]), end="\n\n")
        began = time.perf_counter()
        results[name] = train(model, optimizer, text, options)
        seconds = time.perf_counter() - began
        print(f"{name}: {results[name]:.3f} nat per byte, {seconds:.1f} s", flush=True)
    return results


if __name__ == "__main__":
    main()
