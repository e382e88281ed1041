"""Small models and comparisons for the tests of trainers, which run in several environments."""

import os

import documents
import torch
from torch import nn

ROOT = os.environ.get("HALFSTEP_SOURCE") or os.path.join(
    os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir
)
#: a recipe with codes, scales, error codes and random bits
OPTIONS = {"weights": "bf16-ecc8", "states": "int8", "seed": 5}
#: a recipe that computes what torch's own optimizer computes
EXACT = {"weights": "f32", "states": "f32"}


def blocks(title, language):
    """Returns the code blocks of a language in a section of docs/frameworks.md."""
    return [block.text for block in documents.blocks("docs/frameworks.md", language, title)]


def tiny(seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)).to(dtype)


def language_model(seed=0, dtype=torch.bfloat16):
    """Returns a Llama of transformers with 64 words and one layer."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


class Words(torch.utils.data.Dataset):
    """48 sentences of 16 random words."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def bits(tensor):
    """Returns the bytes of a tensor's elements in the order of its indices, whatever its layout."""
    flat = tensor.detach().contiguous().reshape(-1)
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
    )


def plain(value):
    """Returns a copy without identity: tensors become their bits."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def states(opt):
    """Returns what steps change: state_dict()'s "state"."""
    return stepped(opt.state_dict()["state"])


def stepped(state):
    """Returns the "state" of a dictionary, comparable with ==, but for hashes of weights."""
    return {
        p: {k: v for k, v in s.items() if k != "weight.hashes"} for p, s in plain(state).items()
    }


def same(one, other):
    """Compares models and optimizers, or lists of them, bit for bit."""
    (model, opt), (model2, opt2) = one, other
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names and names == [name for name, p in model2.named_parameters() if p.requires_grad]
    for name in names:
        assert bits(model.get_parameter(name)) == bits(model2.get_parameter(name)), name
    assert states(opt) and states(opt) == states(opt2)


def goes_on(model, opt, path):
    """Checks that an optimizer which begins from a trainer's checkpoint has the states of `opt`,
    whose run wrote it."""
    import halfstep

    def held(optimizer, p):
        local = {k: getattr(v, "to_local", lambda v=v: v)() for k, v in optimizer.state[p].items()}
        return plain(local)

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    other = halfstep.AdamW(named, states_from=str(path), **OPTIONS)
    assert other.param_groups[0]["group_steps"] == opt.param_groups[0]["group_steps"] > 0
    for name, p in named:
        assert held(other, p) == held(opt, p) != {}, name
