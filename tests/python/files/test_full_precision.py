"""Tests halfstep.full_precision_state_dict, which gives the full precision of a split format's
weights."""

from collections.abc import Mapping

import pytest
import torch
from conftest import named, run, set_gradients
from torch import nn

import halfstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inside = nn.Linear(40, 24)
        self.norm = nn.BatchNorm1d(24)
        self.embedding = nn.Embedding(10, 24)
        self.head = nn.Linear(24, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.to(torch.bfloat16)


def trained(**options):
    model = Net()
    opt = halfstep.AdamW(model.named_parameters(), lr=1e-4, **options)
    run(opt, model, 0, 4)
    return model, opt


@pytest.mark.parametrize("weights", ["bf16-sr", "bf16-kahan", "bf16-ecc8", "bf16-ecc16"])
def test_weights_are_those_of_the_optimizer(weights):
    model, opt = trained(weights=weights)
    found = halfstep.full_precision_state_dict(model, opt)
    assert list(found) == list(model.state_dict())
    for name, p in model.named_parameters():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], opt.read_weight(p))
    differs = any(not torch.equal(found[name], p.float()) for name, p in model.named_parameters())
    assert differs == (weights != "bf16-sr")
    assert found["head.weight"] is found["embedding.weight"]
    assert (
        found["norm.running_mean"].dtype == torch.float32
        and found["norm.num_batches_tracked"].dtype == torch.int64
    )
    Net().float().load_state_dict(found)


def test_one_at_a_time():
    model, opt = trained(weights="bf16-kahan")
    lazy = halfstep.full_precision_state_dict(model, opt, lazy=True)
    whole = halfstep.full_precision_state_dict(model, opt)
    assert isinstance(lazy, Mapping) and not isinstance(lazy, dict) and len(lazy) == len(whole)
    assert all(torch.equal(value, whole[name]) for name, value in lazy.items())
    assert lazy["inside.weight"] is not lazy["inside.weight"]  # nothing is kept


def test_several_optimizers_and_none_of_ours():
    model = Net()
    named = list(model.named_parameters())
    opts = [
        halfstep.AdamW(named[:2], weights="bf16-kahan"),
        halfstep.Lion(named[2:], weights="bf16-ecc8"),
    ]
    set_gradients(dict(named), 0)
    for opt in opts:
        opt.step()
    found = halfstep.full_precision_state_dict(model, opts)
    assert torch.equal(found[named[0][0]], opts[0].read_weight(named[0][1])) and torch.equal(
        found[named[3][0]], opts[1].read_weight(named[3][1])
    )
    with pytest.raises(TypeError, match="not one of halfstep's"):
        halfstep.full_precision_state_dict(model, torch.optim.AdamW(model.parameters()))


def saved_by_transformers(folder, weights, **sizes):
    """Trains a model and saves it in fp32. Returns model and optimizer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        **sizes,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    opt = halfstep.AdamW(model.named_parameters(), lr=1e-5, weights=weights)
    run(opt, model, 0, 3)
    model.save_pretrained(folder, state_dict=halfstep.full_precision_state_dict(model, opt))
    return model, opt


def test_from_pretrained_reads_what_was_trained(tmp_path):
    model, opt = saved_by_transformers(tmp_path, "bf16-ecc16", num_key_value_heads=2)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    for (name, p), (other, q) in zip(model.named_parameters(), again.named_parameters()):
        assert name == other and torch.equal(q, opt.read_weight(p)), name


def test_save_pretrained(tmp_path):
    """transformers saves the weights of the split format in fp32."""
    model, opt = saved_by_transformers(tmp_path, "bf16-kahan", tie_word_embeddings=True)
    from safetensors.torch import load_file

    found, params = load_file(tmp_path / "model.safetensors"), named(model)
    assert set(found) == set(params)
    for name, p in params.items():
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name], opt.read_weight(p)), name
    assert any(not torch.equal(found[name], p.float()) for name, p in params.items())
