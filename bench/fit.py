#!/usr/bin/env python3
"""Compares peaks that halfstep.fit predicts with those of real steps on the processor.

    python bench/fit.py                     # six models, twelve choices each, as a markdown table
    python bench/fit.py --models qwen3,vit --choices 3
    python bench/fit.py --models more       # two models that the code was not fixed beside

A choice is a recipe, with or without gradient release, with or without checkpointing. A real peak
is the memory of weights, buffers and states, and the most that torch.profiler sees beside them in
the third step. diffusers is needed for its model only. Exits with 1 if a model fails, or if a
prediction is further off than 5 %, or 10 % with 8-bit weights.
"""

import argparse
import itertools
import os
import subprocess
import sys
import warnings

RECIPES = ("adamw/bf16-sr/int8", "adamw/f32/f32", "adamw/int8-ecc4/int8")
CHOICES = list(itertools.product(RECIPES, (False, True), (False, True)))
SIX = ("llama", "qwen3", "moe", "gpt2", "vit", "unet")
MORE = ("mistral", "bert")
#: of torch alone, for the tests
SMALL = ("text", "pictures")
#: share of the real peak that a prediction may be off, without and with 8-bit weights
WITHIN, WITHIN_PACKED = 0.05, 0.10
_TEXT = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2000,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def model_of(name, checkpointing, whole=False):
    """Returns a small model, and a step of a batch for it. `whole`: its weights are to be fp32,
    which torch's grouped products on a processor do not take."""
    if name in SMALL:
        return plain(name == "text", checkpointing)
    import torch
    import transformers as t

    experts = {}
    if name == "llama":
        config, cls = t.LlamaConfig(**_TEXT), t.LlamaForCausalLM
    elif name == "qwen3":
        config, cls = t.Qwen3Config(**_TEXT, head_dim=64), t.Qwen3ForCausalLM
    elif name == "moe":
        config = t.Qwen3MoeConfig(
            **_TEXT, head_dim=64, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
        )
        cls, experts = (
            t.Qwen3MoeForCausalLM,
            {"experts_implementation": "batched_mm" if whole else "grouped_mm"},
        )
    elif name == "gpt2":
        config = t.GPT2Config(
            n_embd=256, n_layer=4, n_head=4, vocab_size=2000, bos_token_id=1, eos_token_id=2
        )
        cls = t.GPT2LMHeadModel
    elif name == "vit":
        config = t.ViTConfig(
            hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=3,
            image_size=96, patch_size=8,
        )  # fmt: skip
        cls = t.ViTForImageClassification
    elif name == "mistral":
        config, cls = t.MistralConfig(**_TEXT, sliding_window=64), t.MistralForCausalLM
    elif name == "bert":
        few = {key: value for key, value in _TEXT.items() if key != "num_key_value_heads"}
        config, cls = t.BertConfig(**few), t.BertForMaskedLM
    elif name == "unet":
        return diffusion(checkpointing)
    model = cls._from_config(config, dtype=torch.bfloat16, **experts)
    if checkpointing:
        model.activation_checkpointing_enable()

    def step(model):
        if name == "vit":
            dtype = next(model.parameters()).dtype
            given = {"pixel_values": torch.zeros(4, 3, 96, 96, dtype=dtype)}
            given["labels"] = torch.zeros(4, dtype=torch.long)
        else:
            ids = torch.zeros(2, 128, dtype=torch.long)
            given = {"input_ids": ids, "labels": ids}
        model(**given).loss.backward()

    return model.train(), step


def plain(text, checkpointing):
    """Returns a small model of torch: layers with attention for text, or of convolutions."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            if text:
                self.norm, self.qkv = nn.LayerNorm(128), nn.Linear(128, 384)
                self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
            else:
                self.norm, self.mix = nn.GroupNorm(8, 64), nn.Conv2d(64, 64, 3, padding=1)

        def forward(self, x):
            if not text:
                return x + F.silu(self.mix(self.norm(x)))
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2)
            return x + self.down(F.gelu(self.up(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Embedding(1000, 128) if text else nn.Conv2d(3, 64, 3, padding=1)
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.head = nn.Linear(128 if text else 64, 1000)

        def forward(self, x, labels):
            x = self.first(x)
            for layer in self.layers:
                again = torch.utils.checkpoint.checkpoint
                x = again(layer, x, use_reentrant=False) if checkpointing else layer(x)
            return F.cross_entropy(self.head(x if text else x.mean((2, 3))).flatten(0, -2), labels)

    def step(model):
        x = torch.zeros(2, 96, dtype=torch.long)
        if not text:
            x = torch.zeros(4, 3, 24, 24, dtype=model.head.bias.dtype)
        model(x, torch.zeros(192 if text else 4, dtype=torch.long)).backward()

    return Model().to(torch.bfloat16), step


def diffusion(checkpointing):
    """Returns a small U-Net of diffusers with attention."""
    import diffusers
    import torch

    model = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(64, 128), layers_per_block=1, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=64,
    ).to(torch.bfloat16)  # fmt: skip
    if checkpointing:
        model.enable_gradient_checkpointing()

    def step(model):
        dtype = next(model.parameters()).dtype
        noise, text = torch.zeros(2, 4, 16, 16, dtype=dtype), torch.zeros(2, 8, 64, dtype=dtype)
        found = model(noise, torch.zeros(2, dtype=torch.long), encoder_hidden_states=text).sample
        (found - noise).square().mean().backward()

    return model.train(), step


def quantized(model):
    """Gives a model 8-bit weights: its linear layers, and embeddings that are tied with them."""
    import torch

    import halfstep

    tied = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    return halfstep.nn.quantize_(model, "int8-ecc4", where=lambda m, _: id(m.weight) in tied)


def tensors(model, opt):
    from halfstep._tensors.sharding import stored

    yield from map(stored, [*model.parameters(), *model.buffers()])
    for state in opt.state.values():
        yield from (value for value in state.values() if hasattr(value, "untyped_storage"))


def measured(model, step, recipe, release):
    """Returns the peak of the third step."""
    import torch

    import halfstep

    opt = halfstep.optimizer(
        recipe, model.named_parameters(), lr=1e-5, gradient_release=release, threads=1
    )
    for _ in range(2):
        step(model)
        opt.step()
        opt.zero_grad()
    pieces = (t.untyped_storage() for t in tensors(model, opt))
    held = {piece.data_ptr(): piece.nbytes() for piece in pieces}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step(model)
        opt.step()
        opt.zero_grad()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return sum(held.values()) + max(now)


def one(name, recipe, release, checkpointing):
    """Returns the predicted and the real peak of a model in a choice, and where it is predicted."""
    import torch

    import halfstep

    torch.manual_seed(0)
    model, step = model_of(name, checkpointing, "f32/" in recipe)
    if "f32/" in recipe:
        model.float()
    if "ecc4" in recipe:
        quantized(model)
    rows = halfstep.fit(model, step, recipes=recipe, device="cpu").rows
    row = next(row for row in rows if row.way == ("release" if release else "in place"))
    return row.peak, measured(model, step, recipe, release), row.place


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="six", help="six, more, small, or names separated by commas"
    )
    parser.add_argument("--choices", help="numbers from 0 to 11, separated by commas")
    given = parser.parse_args()
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2":
        # oneDNN packs weights for AMX into memory that other processors do not take
        surroundings = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, *sys.argv], env=surroundings, check=False).returncode
    warnings.simplefilter("ignore")
    choices = range(len(CHOICES))
    if given.choices:
        choices = [int(n) for n in given.choices.split(",")]
    named = {"six": SIX, "more": MORE, "small": SMALL}
    failed = False
    print("| model | recipe | release | checkpointing | predicted, MB | real, MB | off, % | at |")
    print("|---|---|---|---|---:|---:|---:|---|")
    for name in named.get(given.models) or given.models.split(","):
        for choice in choices:
            recipe, release, checkpointing = CHOICES[choice]
            try:
                predicted, real, place = one(name, recipe, release, checkpointing)
            except (ImportError, RuntimeError, ValueError) as error:
                failed = True
                print(f"{name}: {error}", file=sys.stderr)
                break
            off = predicted / real - 1
            failed |= abs(off) > (WITHIN_PACKED if "ecc4" in recipe else WITHIN)
            print(
                f"| {name} | `{recipe}` | {'yes' if release else ''} |"
                f" {'yes' if checkpointing else ''} | {predicted / 1e6:.2f} | {real / 1e6:.2f} |"
                f" {100 * off:+.2f} | {place} |",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
