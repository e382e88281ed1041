"""`halfstep train lm` and `train mnist` beside PyTorch, eager and compiled, on the same models,
first weights and batches, in turn on one machine.

    python bench/trainer.py [--program build/halfstep] [--sizes 2,6.6,25,mnist]
                            [--compute f32,bf16] [--rounds 7] [--seconds 4] [--only REGEX]
                            [--json FILE] [--out bench/trainer.md]

With --out the tables go between the marks of that page. Nothing else may run meanwhile. It needs
torch, safetensors and, for the compiled contestants, g++; for the peak of oneDNN a C compiler and
its headers (--no-peak does without).

Each round gives every contestant --seconds in turn. A contestant of torch is a process that waits
between its turns. `train lm` is started for each turn. The first steps of both are left out, and
so is the time of torch's compiler.

The file is longer than 500 lines because it holds the same two models once more, in torch.
"""

import argparse
import csv
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Optional

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)
from peers_common import flags, markdown, processor, put, resident  # noqa: E402

SEED, LR, WEIGHT_DECAY = 1, 1e-3, 0.1
#: about millions of parameters -> --width, --depth, --heads; heads of 64
SIZES = {"2": (192, 4, 3), "6.6": (256, 8, 4), "25": (512, 8, 8), "tiny": (64, 2, 1)}
DIGITS_BATCH, DIGITS = 128, 12800


@dataclasses.dataclass
class Contestant:
    key: str
    compute: str  #: the group of contestants it belongs to: type of the matrix products
    recipe: Optional[str] = None  #: of the trainer in C
    compiled: bool = False  #: of torch: with inductor
    ours: Optional[str] = (
        #: of torch: BF16 weights and this recipe of the Python package, in place of torch's fused
        #: fp32 AdamW
        None
    )

    @property
    def title(self):
        if self.recipe:
            return f"**`halfstep train`**, `{self.recipe}`"
        how = "compiled" if self.compiled else "eager"
        kind = (
            f'BF16, `halfstep.optimizer("{self.ours}")`'
            if self.ours
            else "autocast, fused AdamW"
            if self.compute == "bf16"
            else "fused AdamW"
        )
        return f"torch {how}, {kind}"


CONTESTANTS = [
    Contestant("halfstep-f32", "f32", recipe="adamw/f32/f32"),
    Contestant("torch-f32", "f32"),
    Contestant("torch-f32-compiled", "f32", compiled=True),
    Contestant("halfstep-bf16", "bf16", recipe="adamw/bf16-sr/bf16-sr"),
    Contestant("halfstep-bf16-f32", "bf16", recipe="adamw/f32/f32"),
    Contestant("torch-bf16", "bf16"),
    Contestant("torch-bf16-compiled", "bf16", compiled=True),
    Contestant("torch-bf16-ours", "bf16", ours="adamw/bf16-sr/bf16-sr"),
    Contestant("torch-bf16-ours-compiled", "bf16", compiled=True, ours="adamw/bf16-sr/bf16-sr"),
]


# ---- A contestant of torch, a process of its own -------------------------------------------------


def worker(told):
    """Trains for as many seconds as each line of stdin says, and answers with what it did."""
    import torch
    import trainer_torch

    contestant, threads = Contestant(**told["contestant"]), told["threads"]
    torch.set_num_threads(threads)
    before = resident("VmRSS")
    if told["size"] == "mnist":
        model = trainer_torch.Digits()
        model.initialize(SEED)
        data, units, every = (
            trainer_torch.Images(os.path.join(told["folder"], "digits"), DIGITS_BATCH, SEED),
            None,
            True,
        )
    else:
        from safetensors.torch import load_file

        shape = trainer_torch.Shape(**told["shape"])
        model = trainer_torch.Llama(shape)
        model.load_state_dict(load_file(os.path.join(told["folder"], "start", "model.safetensors")))
        data, units, every = (
            trainer_torch.Text(told["data"], shape, SEED),
            shape.batch * shape.context,
            False,
        )
    if contestant.ours:
        sys.path.insert(0, os.path.join(ROOT, "python"))
        import halfstep

        model = model.to(torch.bfloat16)
        opt = halfstep.optimizer(
            contestant.ours, trainer_torch.groups(model, WEIGHT_DECAY, every), lr=LR
        )
    else:
        opt = torch.optim.AdamW(trainer_torch.groups(model, WEIGHT_DECAY, every), lr=LR, fused=True)
    loss_of = torch.compile(model, dynamic=False) if contestant.compiled else model
    autocast = contestant.compute == "bf16" and not contestant.ours
    done = 0

    def step():
        nonlocal done
        batch = data.batch(done)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(*batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        done += 1
        return loss.detach(), units or len(batch[1])

    begun = time.perf_counter()
    losses = [float(step()[0]) for _ in range(told["check"])]
    print(json.dumps({"losses": losses, "started": time.perf_counter() - begun}), flush=True)
    for line in sys.stdin:
        units_done, steps, begun = 0, 0, time.perf_counter()
        while steps < told["least"] or time.perf_counter() - begun < float(line):
            units_done += step()[1]
            steps += 1
        took = time.perf_counter() - begun
        print(
            json.dumps(
                {
                    "rate": units_done / took,
                    "steps": steps,
                    "peak": resident("VmHWM"),
                    "before": before,
                }
            ),
            flush=True,
        )


class Torch:
    def __init__(self, contestant, task):
        environment = {
            **os.environ,
            "HALFSTEP_LIBRARY": os.path.join(
                os.path.dirname(os.path.abspath(task.args.program)), "libhalfstep.so"
            ),
        }
        told = {
            "contestant": dataclasses.asdict(contestant),
            "size": task.size,
            "threads": task.args.threads,
            "folder": task.folder,
            "data": task.args.data,
            "check": task.args.check,
            "least": task.args.least,
            "shape": dataclasses.asdict(task.shape) if task.shape else None,
        }
        self.log = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(told)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.losses = self.answer()["losses"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            said = self.log.read().strip().splitlines() or ["died without a word"]
            raise RuntimeError(
                next(
                    (
                        line
                        for line in reversed(said)
                        if re.match(r"[\w.]*(Error|Exception)\b", line)
                    ),
                    said[-1],
                )
            )
        return json.loads(line)

    def turn(self, seconds):
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        try:
            self.process.stdin.close()
        except OSError:
            pass  # it is dead
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


# ---- The trainer in C ----------------------------------------------------------------------------


class Program:
    """A run for each turn, long enough for the seconds by the rate of the turn before; its first
    steps are left out."""

    def __init__(self, contestant, task):
        self.contestant, self.task, self.log = (
            contestant,
            task,
            os.path.join(task.folder, "log.csv"),
        )
        args = task.args
        what = "mnist" if task.size == "mnist" else "lm"
        self.command = [
            *(args.program, "train", what, "--quiet", "--json"),
            *flags(recipe=contestant.recipe, compute=contestant.compute, threads=args.threads),
            *flags(lr=LR, weight_decay=WEIGHT_DECAY, seed=SEED, log=self.log),
        ]
        if task.size == "mnist":
            self.command += flags(data=task.digits, batch=DIGITS_BATCH)
        else:
            self.command += flags(data=args.data, val_every=0, eval_batches=1, sample_bytes=0)
            self.command += task.options()
        self.rate = None
        self.losses = []
        self.turn(0)

    def run(self, *more):
        words = [*self.command, *map(str, more)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        with open(self.log, encoding="ascii") as file:
            return json.loads(done.stdout), list(csv.DictReader(file))

    def turn(self, seconds):
        return self.epochs(seconds) if self.task.size == "mnist" else self.steps(seconds)

    def steps(self, seconds):
        args, units = self.task.args, self.task.shape.batch * self.task.shape.context
        steps = max(args.least, round(seconds * (self.rate or 0) / units))
        found, rows = self.run("--steps", args.check + steps)
        took = [units / float(row["tokens_per_s"]) for row in rows]
        self.losses = [float(row["train_loss"]) for row in rows[: args.check]]
        self.rate = steps * units / sum(took[args.check :])
        return {"rate": self.rate, "steps": steps, "peak": found["peak_process_bytes"]}

    def epochs(self, seconds):
        """Runs epochs. One line of the log is an epoch, its time in milliseconds. The first is left
        out."""
        images = self.task.args.digits
        epochs = max(1, round(seconds * (self.rate or 0) / images))
        found, rows = self.run("--epochs", 1 + epochs)
        took = [float(row["seconds"]) for row in rows]
        self.losses = [float(rows[1]["train_loss"])]
        self.rate = epochs * images / max(took[-1] - took[1], 1e-3)
        return {
            "rate": self.rate,
            "steps": epochs * -(-images // DIGITS_BATCH),
            "peak": found["peak_process_bytes"],
        }

    def close(self):
        pass


# ---- Rounds --------------------------------------------------------------------------------------


class Task:
    """A model, its data and its first weights."""

    def __init__(self, size, folder, args):
        import trainer_torch

        self.size, self.folder, self.args = size, folder, args
        if size == "mnist":
            self.digits = os.path.join(folder, "digits")
            os.mkdir(self.digits)
            trainer_torch.write_images(self.digits, args.digits, DIGITS_BATCH)
            self.shape, self.flop, self.params, self.unit = (
                None,
                trainer_torch.Digits.FLOP,
                431080,
                "images",
            )
            return
        width, depth, heads = SIZES[size]
        self.shape = trainer_torch.Shape(width, depth, heads, args.context, args.batch)
        self.flop, self.params, self.unit = self.shape.flop, self.shape.params, "tokens"
        start = os.path.join(folder, "start")
        command = [
            *(args.program, "train", "lm", "--quiet"),
            *flags(data=args.data, recipe="adamw/f32/f32", compute="f32", seed=SEED, steps=0),
            *flags(eval_batches=1, sample_bytes=0, checkpoint=start),
            *self.options(),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def options(self):
        names = ("width", "depth", "heads", "context", "batch")
        return flags(**{name: getattr(self.shape, name) for name in names})


class Peak:
    """The rate of oneDNN's large products, built here."""

    def __init__(self, args):
        self.program, self.rates, self.environment = (
            None,
            {"f32": [], "bf16": []},
            {**os.environ, "OMP_NUM_THREADS": str(args.threads)},
        )
        if args.no_peak:
            return
        path = os.path.join(args.folder, "onednn_peak")
        built = subprocess.run(
            [
                os.environ.get("CC", "cc"),
                "-O2",
                os.path.join(ROOT, "lab", "onednn_peak.c"),
                "-o",
                path,
                "-ldnnl",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            print("no peak of oneDNN: lab/onednn_peak.c does not compile", file=sys.stderr)
        else:
            self.program = path

    def measure(self):
        if not self.program:
            return
        found = json.loads(
            subprocess.run(
                [self.program, "2048", "1"],
                env=self.environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for kind, rate in found.items():
            if rate:
                self.rates[kind].append(rate)

    def best(self, kind):
        return max(self.rates[kind], default=None)


def processor_has_bf16():
    """Returns True if the processor multiplies BF16. Without, products would go through fp32, and
    nobody trains so."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", file.read()))


def measure(task, compute, contestants, peak):
    """Everybody's turns, in rounds."""
    runs, failures, turns = {}, {}, {}
    for contestant in contestants:
        try:
            runs[contestant.key] = (Program if contestant.recipe else Torch)(contestant, task)
        except RuntimeError as error:
            failures[contestant.title] = str(error)
    for number in range(task.args.rounds):
        peak.measure()
        for contestant in [c for c in contestants if c.key in runs]:
            key = contestant.key
            try:
                turns.setdefault(key, []).append(runs[key].turn(task.args.seconds))
            except (RuntimeError, OSError) as error:
                failures[contestant.title] = str(error)
                runs.pop(key).close()
                continue
            print(
                f"{task.size} {compute} round {number + 1}: {key} {turns[key][-1]['rate']:.0f}"
                f" {task.unit}/s",
                file=sys.stderr,
            )
    for run in runs.values():
        run.close()
    rows = []
    for contestant in contestants:
        if contestant.key not in runs:
            continue
        own, first = turns[contestant.key], turns[next(iter(runs))]
        best = max(turn["rate"] for turn in own)
        gflops = best * task.flop * 1e-9
        losses = runs[contestant.key].losses
        if contestant.recipe is None and task.size == "mnist":
            # the program tells the mean of an epoch, and torch's contestants stop where their time
            # is over
            losses = []
        rows.append(
            {
                "key": contestant.key,
                "title": contestant.title,
                "best": best,
                "median": statistics.median(turn["rate"] for turn in own),
                "to_first": statistics.median(a["rate"] / b["rate"] for a, b in zip(own, first)),
                "gflops": gflops,
                "of_peak": gflops / peak.best(compute) if peak.best(compute) else None,
                "peak": max(turn["peak"] for turn in own),
                "before": own[0].get("before"),
                "loss": losses[-1] if losses else None,
                "first_loss": losses[0] if losses else None,
                "steps": sum(turn["steps"] for turn in own),
            }
        )
    return {
        "size": task.size,
        "compute": compute,
        "params": task.params,
        "flop": task.flop,
        "unit": task.unit,
        "rows": rows,
        "failures": failures,
        "peak": peak.best(compute),
    }


# ---- Tables --------------------------------------------------------------------------------------


def table(found, args):
    name = "`train mnist`" if found["size"] == "mnist" else "`train lm`"
    digits = found["size"] == "mnist"
    columns = [
        f"{found['unit']}/s, best",
        "median",
        "of the first line, median of rounds",
        "GFLOP/s",
        "of oneDNN",
        "peak, MB",
        "of it before the model, MB",
    ]
    rows = []
    for row in found["rows"]:
        rows.append(
            [
                row["title"],
                f"{row['best']:,.0f}",
                f"{row['median']:,.0f}",
                f"{row['to_first']:.2f}",
                f"{row['gflops']:.0f}",
                f"{row['of_peak']:.2f}" if row["of_peak"] else "-",
                f"{row['peak'] / 1e6:.0f}",
                f"{row['before'] / 1e6:.0f}" if row["before"] else "-",
            ]
        )
        if not digits:
            rows[-1].append(f"{row['loss']:.4f}")
    work = (
        f"batches of {DIGITS_BATCH}" if digits else f"{args.batch} x {args.context} tokens a step"
    )
    peak = f"; oneDNN {found['peak']:.0f} GFLOP/s" if found["peak"] else ""
    lines = [
        (
            f"**{name}, {found['params'] / 1e6:.2f} M parameters, `--compute {found['compute']}`**,"
            f" {work}, {found['flop'] / 1e6:.1f} MFLOP each of the {found['unit']}{peak}"
        ),
        "",
        markdown(["", *columns] + ([] if digits else [f"loss at step {args.check}"]), rows),
        "",
    ]
    return (
        lines
        + [f"Did not run: {title}: {reason}" for title, reason in found["failures"].items()]
        + ([""] if found["failures"] else [])
    )


def report(results, args):
    import torch

    lines = [
        (
            f"{processor()}, {args.threads} threads, torch {torch.__version__}, {args.rounds}"
            f" rounds of {args.seconds:g} s for each; load {os.getloadavg()[0]:.1f} at the end."
        ),
        "",
    ]
    for found in results:
        lines += table(found, args)
    return lines[:-1]


def main():
    if sys.argv[1:2] == ["--worker"]:
        return worker(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default=os.path.join(ROOT, "build", "halfstep"))
    parser.add_argument(
        "--data", default=os.path.join(ROOT, "data", "demo.txt"), help="text of the language model"
    )
    parser.add_argument(
        "--sizes",
        default="2,6.6,25,mnist",
        help="of 2, 6.6 and 25 (million parameters), tiny, mnist",
    )
    parser.add_argument(
        "--compute",
        default="f32,bf16" if processor_has_bf16() else "f32",
        help="types of the matrix products (bf16 where the processor has them)",
    )
    parser.add_argument(
        "--only",
        default="",
        help="contestants whose key matches: " + ", ".join(c.key for c in CONTESTANTS),
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4, help="of a turn")
    parser.add_argument("--least", type=int, default=3, help="steps of a turn")
    parser.add_argument(
        "--check",
        type=int,
        default=10,
        help="first steps, which warm up, and whose losses are compared",
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--digits", type=int, default=DIGITS, help="images of an epoch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--no-peak", action="store_true", help="do not measure oneDNN's large products"
    )
    parser.add_argument("--json", help="all figures into this file")
    parser.add_argument("--out", help="page whose tables to replace")
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    if unknown := [size for size in sizes if size not in (*SIZES, "mnist")]:
        parser.error(f"no size {unknown[0]}; there are {', '.join((*SIZES, 'mnist'))}")
    contestants = [
        c
        for c in CONTESTANTS
        if c.compute in args.compute.split(",") and re.search(args.only, c.key)
    ]
    if not contestants:
        parser.error(f"no contestant matches {args.only!r} with --compute {args.compute}")
    try:
        import torch  # noqa: F401
    except ImportError:
        sys.exit("bench/trainer.py needs torch")
    results = []
    with tempfile.TemporaryDirectory() as args.folder:
        peak = Peak(args)
        for size in sizes:
            folder = os.path.join(args.folder, size)
            os.mkdir(folder)
            task = Task(size, folder, args)
            for compute in dict.fromkeys(c.compute for c in contestants):
                results.append(
                    measure(task, compute, [c for c in contestants if c.compute == compute], peak)
                )
    lines = report(results, args)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(
                {"results": results, "onednn": peak.rates, "threads": args.threads, "lines": lines},
                file,
                indent=1,
            )
    if args.out:
        put(args.out, "measured", lines)
    else:
        print("\n".join(lines))
    return None


if __name__ == "__main__":
    main()
