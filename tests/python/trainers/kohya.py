"""Does what sd-scripts and musubi-tuner do with an optimizer, without either: they are no packages.

Written from what their sources did on 2026-11-27 (sd-scripts library/optimizer.py and
train_network.py, musubi-tuner training/trainer_base.py). The network is a small one with two
groups, as a text encoder and a U-Net are, each with its own learning rate.
"""

import argparse
import ast
import importlib
import shlex

import torch
from common import tiny
from torch import nn

TRAINERS = ("sd-scripts", "musubi-tuner")


def parse(line):
    """Returns the options of a command line."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--optimizer_type", default="AdamW")
    parser.add_argument("--optimizer_args", nargs="*", default=[])
    parser.add_argument("--learning_rate", type=float, default=2e-6)
    parser.add_argument("--text_encoder_lr", type=float)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--fused_backward_pass", action="store_true")
    parser.add_argument("--full_bf16", action="store_true")
    parser.add_argument("--mixed_precision", default="no")
    return parser.parse_args(shlex.split(line))


def class_and_options(trainer, args):
    """Returns the class that --optimizer_type names, and the options of --optimizer_args."""
    name = args.optimizer_type.lower()
    if args.fused_backward_pass and name != "adafactor":
        raise ValueError("fused_backward_pass is for --optimizer_type=Adafactor")
    options = {}
    for given in args.optimizer_args:
        key, value = given.split("=")
        options[key] = ast.literal_eval(value)
    # Such names need the other package, which is not asked about a path with a dot.
    if name.endswith("8bit"):
        importlib.import_module("bitsandbytes")
    elif name.endswith("schedulefree") and trainer == "sd-scripts":
        importlib.import_module("schedulefree")
    module, _, cls = args.optimizer_type.rpartition(".")
    return getattr(importlib.import_module(module or "torch.optim"), cls), options


def network(dtype=torch.float32):
    return nn.ModuleDict({"text": tiny(1, dtype), "unet": tiny(2, dtype)})


def loss_of(network, step):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
    x = x.to(next(network.parameters()).dtype)
    return (network["unet"](network["text"](x)) - 1).float().pow(2).mean()


def groups_of(network, args):
    rates = {"text": args.text_encoder_lr or args.learning_rate, "unet": args.learning_rate}
    return [{"params": list(network[k].parameters()), "lr": lr} for k, lr in rates.items()]


def train(trainer, line, folder=None, save=None, resume=False, steps=6):
    """Trains, saves the state to a folder after the step `save`, or goes on from there. Returns the
    network, the optimizer, the log and the weights that were sampled at each step."""
    import accelerate

    args = parse(line)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    # musubi-tuner loads a network in its dtype; sd-scripts casts one whose optimizer is made.
    dtype = torch.bfloat16 if args.full_bf16 else torch.float32
    net = network(dtype if trainer == "musubi-tuner" else torch.float32)
    cls, options = class_and_options(trainer, args)
    optimizer = plain = cls(groups_of(net, args), lr=args.learning_rate, **options)
    net.to(dtype)
    swap = {mode: lambda: None for mode in ("train", "eval")}
    schedule_free = args.optimizer_type.lower().endswith("schedulefree")
    if hasattr(optimizer, "train"):
        optimizer.train()
        if trainer == "musubi-tuner" or schedule_free:
            swap = {mode: getattr(optimizer, mode) for mode in swap}
    # Under such a name the scheduler is one that does nothing.
    factor = 1.0 if schedule_free else 0.5
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor, 2)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    first = 0
    if resume:
        accelerator.load_state(str(folder))
        first = save
        swap["train"]()
    logs, samples = [], []
    for step in range(first, steps):
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, step))
            if accelerator.sync_gradients and args.max_grad_norm != 0.0:
                accelerator.clip_grad_norm_(net.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        if accelerator.sync_gradients:
            swap["eval"]()
            samples.append({name: p.detach().clone() for name, p in net.named_parameters()})
            if step + 1 == save and not resume:
                accelerator.save_state(str(folder))
            swap["train"]()
        log = {"lr": scheduler.get_last_lr()}
        if args.optimizer_type.lower().endswith("prodigy"):
            log["d*lr"] = [g["d"] * g["lr"] for g in scheduler.optimizers[-1].param_groups]
        logs.append(log)
    return net, plain, logs, samples
