"""Makes models of transformers without weights, and a training step of each."""

import copy
import os

import torch


def _need(package):
    try:
        return __import__(package)
    except ImportError:
        raise ValueError(
            f"this needs the package {package}: pip install {package}; halfstep.fit(model, step)"
            " takes any module"
        ) from None


def model_of(path, sequence, checkpointing=False, lora=None):
    """Returns a model on `meta` that a folder, a config.json or a config describes, and step(model,
    batch). Mixtures of experts compute all experts of a layer at once, because a trace cannot ask
    which are hit. Only adapters of PEFT train if `lora`, their rank, is given."""
    if isinstance(path, (str, os.PathLike)) and not os.path.isfile(
        os.path.join(path, "config.json") if os.path.isdir(path) else path
    ):
        raise ValueError(
            f"{path!r} is neither a folder with a config.json nor such a file; fetch the model's"
            " config.json, whose weights are not needed"
        )
    transformers = _need("transformers")
    with torch.device("meta"):
        try:  # models without experts refuse the option, and note it in their config before
            model = _made(transformers, path, experts_implementation="grouped_mm")
        except (TypeError, ValueError):
            model = _made(transformers, path)
        config = model.config
        if lora is not None:
            peft = _need("peft")
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=lora, target_modules="all-linear", lora_dropout=0.0)
            )
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    return model.train(), _step_of(model, config, sequence)


def _made(transformers, path, **options):
    config = copy.deepcopy(path)  # transformers writes into it
    if isinstance(path, (str, os.PathLike)):
        config = transformers.AutoConfig.from_pretrained(path)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    make = transformers.AutoModelForCausalLM.from_config
    if names:
        make = getattr(transformers, names[0])._from_config
    return make(config, dtype=torch.bfloat16, **options)


def _step_of(model, config, sequence):
    """Returns a training step by what the model takes: tokens, or pictures with labels."""
    kind = getattr(model, "main_input_name", "input_ids")
    most = getattr(config, "max_position_embeddings", None)
    if kind == "input_ids" and most is not None and sequence > most:
        raise ValueError(f"--sequence {sequence} is more than the {most} tokens of this model")

    def tokens(model, batch):
        where = next(model.parameters()).device
        ids = torch.zeros(batch, sequence, dtype=torch.long, device=where)
        model(input_ids=ids, labels=ids).loss.backward()

    def pictures(model, batch):
        size = config.image_size
        high, wide = size if isinstance(size, (list, tuple)) else (size, size)
        like = next(p for p in model.parameters() if p.is_floating_point())
        shape, where = (batch, config.num_channels, high, wide), like.device
        values = torch.zeros(shape, dtype=like.dtype, device=where)
        labels = torch.zeros(batch, dtype=torch.long, device=where)
        model(pixel_values=values, labels=labels).loss.backward()

    if kind not in ("input_ids", "pixel_values"):
        raise ValueError(
            f"{type(model).__name__} takes {kind!r}, for which there is no step here; call"
            " halfstep.fit(model, step) with a step of your own"
        )
    return tokens if kind == "input_ids" else pictures
