"""Who goes on exactly with another number of ranks: the table of docs/differences.md, "Shards".

    python bench/reshard.py [--json]

Each optimizer steps a small model of fully_shard() (FSDP2; gloo, on processors) with prescribed
gradients, which are cut as its parameters are. Asked is whether the weights after 6 steps have the
bits of

    sharded    one process, on 2 ranks whose shards are even
    uneven     one process, on 3 ranks, whose shards are not
    resume     the run on 2 ranks, saved by torch.distributed.checkpoint after 3 steps and gone on
               with on 2
    2 to 4     the same, gone on with on 4 ranks
    4 to 1     the run on 4 ranks, saved after 3 steps and gone on with on 1

Compilers are off (TORCHDYNAMO_DISABLE=1), which changes no claim that is looked at here. It needs
the packages of tests/python/requirements.txt.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(
    0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "tests", "python")
)
from ranks import Pool

STEPS = 6
#: name -> dtype of the parameters
OPTIMIZERS = {
    "torch AdamW, fp32": torch.float32,
    "torch AdamW, bf16": torch.bfloat16,
    "optimi AdamW, bf16 kahan": torch.bfloat16,
    "torchao AdamW8bit, fp32": torch.float32,
    "torchao AdamW8bit, bf16 stochastic": torch.bfloat16,
    "flashoptim FlashAdamW, bf16 not quantized": torch.bfloat16,
    "halfstep adamw/f32/f32": torch.float32,
    "halfstep adamw/bf16-sr/int8": torch.bfloat16,
    "halfstep adamw/bf16-kahan/bf16-sr": torch.bfloat16,
    "halfstep adamw/bf16-ecc8/int4": torch.bfloat16,
}
QUESTIONS = {
    "sharded": (2, None),
    "uneven": (3, None),
    "resume": (2, 2),
    "2 to 4": (2, 4),
    "4 to 1": (4, 1),
}


def make(name, model):
    params = list(model.named_parameters())
    plain = [p for _, p in params]
    package = name.split()[0]
    if package == "halfstep":
        import halfstep

        return halfstep.optimizer(name.split()[1], params, lr=1e-2, weight_decay=0.1, seed=0)
    if package == "torch":
        return torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1)
    if package == "optimi":
        import optimi

        return optimi.AdamW(plain, lr=1e-2, weight_decay=0.1, kahan_sum=True)
    if package == "torchao":
        from torchao.optim import AdamW8bit

        return AdamW8bit(
            plain, lr=1e-2, weight_decay=0.1, bf16_stochastic_round="stochastic" in name
        )
    import flashoptim

    # Its quantized states are made on GPUs alone.
    return flashoptim.FlashAdamW(plain, lr=1e-2, weight_decay=0.1, quantize=False)


def build(name, size):
    """Makes the model, cut over all ranks if there are several."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 66)
    ).to(OPTIMIZERS[name])
    if size:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model


def steps(model, opt, first, last):
    from torch.distributed.tensor import DTensor, distribute_tensor

    for step in range(first, last):
        torch.manual_seed(100 + step)  # of the random bits of those that draw them from torch
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = (
                distribute_tensor(grad, p.device_mesh, p.placements)
                if isinstance(p, DTensor)
                else grad
            )
        opt.step()


def weights(model):
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().numpy().tobytes()
        for p in model.parameters()
    ]


def part(rank, size, name, folder, first, last):
    """Makes steps from `first` to `last`, from a checkpoint unless `first` is 0, and saves. Returns
    the weights, or what went wrong."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build(name, size)
            opt = make(name, model)
            if first:
                found = get_state_dict(model, opt)
                held = {"model": found[0], "optim": found[1]}
                dcp.load(held, checkpoint_id=folder)
                set_state_dict(
                    model, opt, model_state_dict=held["model"], optim_state_dict=held["optim"]
                )
            steps(model, opt, first, last)
            if last < STEPS:
                found = get_state_dict(model, opt)
                dcp.save({"model": found[0], "optim": found[1]}, checkpoint_id=folder)
            return weights(model)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"


def ask(name, question):
    size, then = QUESTIONS[question]
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(4)
        try:
            if then is None:
                model = build(name, 0)
                opt = make(name, model)
                steps(model, opt, 0, STEPS)
                wanted, found = weights(model), pool.run(size, part, name, folder, 0, STEPS)
            else:
                wanted = pool.run(size, part, name, folder, 0, STEPS)[0]
                found = pool.run(size, part, name, folder, 0, STEPS // 2)
                if not any(isinstance(value, str) for value in found):
                    found = pool.run(then, part, name, folder, STEPS // 2, STEPS)
        except Exception as error:
            return "fails (" + str(error).strip().splitlines()[-1][:120] + ")"
        finally:
            pool.close()
    for value in [wanted, *found]:
        if isinstance(value, str):
            return f"fails ({value})"
    return "same bits" if all(value == wanted for value in found) else "differs"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="every answer as JSON, errors in full")
    parser.add_argument("--only", default="", help="optimizers whose name has this in it")
    args = parser.parse_args()
    table = {
        name: {question: ask(name, question) for question in QUESTIONS}
        for name in OPTIMIZERS
        if args.only in name
    }
    if args.json:
        print(json.dumps(table, indent=1))
        return
    print("| | " + " | ".join(QUESTIONS) + " |\n|---|" + "---|" * len(QUESTIONS))
    errors = []
    for name, answers in table.items():
        row = []
        for answer in answers.values():
            if answer.startswith("fails"):
                if answer not in errors:
                    errors.append(answer)
                answer = f"fails ({errors.index(answer) + 1})"
            row.append(answer)
        print(f"| {name} | " + " | ".join(row) + " |")
    for i, error in enumerate(errors):
        print(f"\n({i + 1}) {error[7:-1]}")


if __name__ == "__main__":
    main()
