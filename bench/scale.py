"""Measures step time, memory of a rank and communicated bytes on 1, 2 and 4 processes.

`halfstep train lm` runs under mpirun, and FSDP2 with the Python package (gloo). The minimum of
bytes stands beside them, and the same on paper for larger machines.

    python bench/scale.py [--program build/halfstep] [--out docs/scale.md] [--paper]

With --out the tables go between the marks of that page. It needs mpirun, and torch for FSDP2 (left
out where it is missing). Bytes of the loopback device are counted by the kernel, for all programs
of the machine: nothing else may talk over it. --paper measures nothing.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)
from peers_common import flags, processor, put  # noqa: E402

RECIPE, WEIGHT_BYTES, SUM_BYTES = "adamw/bf16-sr/int8", 2, 4
WIDTH, DEPTH, HEADS, CONTEXT, BATCH, MICRO_STEPS = 256, 4, 4, 128, 4, 4
INTERMEDIATE = (WIDTH * 8 // 3 + 31) // 32 * 32
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_plm": "isolated",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def loopback_bytes():
    for line in open("/proc/net/dev", encoding="ascii"):
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    return 0


# ---- halfstep train lm ---------------------------------------------------------------------------


def child(folder, command):
    """Runs the program of one rank, and keeps what the kernel says of its memory."""
    status = subprocess.call(command)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    with open(
        os.path.join(folder, f"peak-{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}"),
        "w",
        encoding="ascii",
    ) as file:
        file.write(str(peak))
    return status


def run_mpi(program, ranks, steps, transport):
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log.csv")
        command = [
            "mpirun",
            "-n",
            str(ranks),
            sys.executable,
            os.path.abspath(__file__),
            "--child",
            folder,
            *(program, "train", "lm", "--quiet", "--json"),
            *flags(data=os.path.join(ROOT, "data", "demo.txt"), recipe=RECIPE, log=log),
            *flags(width=WIDTH, depth=DEPTH, heads=HEADS, context=CONTEXT, batch=BATCH),
            *flags(micro_steps=MICRO_STEPS, steps=steps),
            *flags(val_every=0, eval_batches=1, sample_bytes=0),
        ]
        before = loopback_bytes()
        found = json.loads(
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, **MPI, "OMPI_MCA_btl": transport},
            ).stdout
        )
        found["wire"] = loopback_bytes() - before
        rows = [line.split(",") for line in open(log, encoding="ascii")]
        seconds = [float(row[rows[0].index("seconds")]) for row in rows[1:]]
        found["step"] = statistics.median(b - a for a, b in zip(seconds, seconds[1:]))
        found["peak"] = max(
            int(open(os.path.join(folder, f"peak-{rank}"), encoding="ascii").read())
            for rank in range(ranks)
        )
        return found


def measure_mpi(program, ranks, steps):
    """Measures two runs of different lengths, which tell the bytes of a step from those of the
    start and the end."""
    long = run_mpi(program, ranks, 2 * steps, "self,vader")
    short, tcp = (run_mpi(program, ranks, steps, kind) for kind in ("self,vader", "self,tcp"))
    tcp_long = run_mpi(program, ranks, 2 * steps, "self,tcp")
    if long["state_hash"] != tcp_long["state_hash"]:
        sys.exit(f"{ranks} ranks: another hash over TCP")
    return {
        "params": long["params"],
        "hash": long["state_hash"],
        "step": long["step"],
        "peak": long["peak"],
        "states": long["bytes_per_param"]["states"],
        "bytes": (long["received_bytes"] - short["received_bytes"]) / steps / ranks,
        "wire": (tcp_long["wire"] - tcp["wire"]) / steps / ranks,
    }


# ---- FSDP2 ---------------------------------------------------------------------------------------


def fsdp_rank(rank, ranks, steps):
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sys.path.insert(0, os.path.join(ROOT, "python"))
    import halfstep

    nn, functional = torch.nn, torch.nn.functional

    class Layer(nn.Module):
        """The layer of `train lm`, but for its rotary positions, which have no parameters."""

        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])
            self.qkvo = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
            self.gate, self.up = (nn.Linear(WIDTH, INTERMEDIATE, bias=False) for _ in range(2))
            self.down = nn.Linear(INTERMEDIATE, WIDTH, bias=False)

        def forward(self, x):
            y = self.norms[0](x)
            q, k, v = (p(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkvo[:3])
            y = (
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .flatten(2)
            )
            x = x + self.qkvo[3](y)
            y = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    threads = max(1, (os.cpu_count() or 1) // ranks)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH),
        *(Layer() for _ in range(DEPTH)),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, 256, bias=False),
    )
    model = model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model, model]:
        # Weights are gathered once a step, as ZeRO-1 has them: the comparison is of the same
        # traffic.
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    params = sum(p.numel() for p in model.parameters())
    opt = halfstep.optimizer(RECIPE, model.named_parameters(), lr=1e-3)
    text = torch.frombuffer(
        bytearray(open(os.path.join(ROOT, "data", "demo.txt"), "rb").read()), dtype=torch.uint8
    ).long()
    generator = torch.Generator().manual_seed(rank)
    seconds, wire = [], []
    for _ in range(steps):
        dist.barrier()
        before, begun = loopback_bytes(), time.perf_counter()
        own = MICRO_STEPS // ranks
        for micro in range(own):
            model.set_requires_gradient_sync(micro + 1 == own)
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
            windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
            loss = (
                functional.cross_entropy(
                    model(windows[:, :-1]).float().flatten(0, 1), windows[:, 1:].flatten()
                )
                / own
            )
            loss.backward()
        opt.step()
        opt.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        wire.append((loopback_bytes() - before) / ranks)
    states = sum(
        value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes
        for state in opt.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    peak = torch.tensor([float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(
            json.dumps(
                {
                    "params": params,
                    "step": statistics.median(seconds[1:]),
                    "wire": statistics.median(wire[1:]),
                    "states": states / params,
                    "peak": peak.item(),
                }
            ),
            flush=True,
        )
    dist.destroy_process_group()


def measure_fsdp(ranks, steps, library):
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29500 + os.getpid() % 400),
        "HALFSTEP_LIBRARY": library,
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1",
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                os.path.abspath(__file__),
                "--fsdp-rank",
                str(rank),
                str(ranks),
                str(steps),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    out = [p.communicate() for p in processes]
    if any(p.returncode for p in processes):
        return next(
            err.strip().splitlines()[-1] for p, (_, err) in zip(processes, out) if p.returncode
        )
    return json.loads(out[0][0].strip().splitlines()[-1])


def minimum(params, ranks):
    """Returns the bytes that a rank must receive: the sums of the others' gradients for its rows,
    with one addition on the way, and the others' weights."""
    return params * (SUM_BYTES + WEIGHT_BYTES) * (ranks - 1) / ranks


def measured(program, steps):
    rows = []
    for ranks in (1, 2, 4):
        found = measure_mpi(program, ranks, steps)
        least = minimum(found["params"], ranks)
        rows.append(("`train lm`, MPI", ranks, found, found["bytes"], found["wire"], least))
        print(rows[-1], file=sys.stderr)
    if len({row[2]["hash"] for row in rows}) != 1:
        sys.exit("the hashes differ")
    lines = [
        (
            f"{rows[0][2]['params'] / 1e6:.1f} M parameters, `{RECIPE}`, {MICRO_STEPS} micro-steps"
            f" of {BATCH} x {CONTEXT} bytes; {os.cpu_count()} processors ({processor()}) for all"
            " ranks together, which talk over the loopback device. Every number of ranks ended with"
            f" the hash `{rows[0][2]['hash']}`."
        ),
        "",
        (
            "| | ranks | ms a step | states, B/param of a rank | peak of a rank, MB | MB received"
            " by a rank in a step | of the minimum | MB on the wire (TCP) |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in (1, 2, 4):
        found = measure_fsdp(
            ranks,
            2 * steps,
            os.path.join(os.path.dirname(os.path.abspath(program)), "libhalfstep.so"),
        )
        if isinstance(found, str):
            lines.append(f"| FSDP2: {found} | {ranks} | | | | | | |")
            continue
        rows.append(
            (
                "FSDP2, `halfstep.optimizer`",
                ranks,
                found,
                None,
                found["wire"],
                minimum(found["params"], ranks),
            )
        )
        print(rows[-1], file=sys.stderr)
    body = []
    for name, ranks, found, received, wire, least in rows:
        counted = received if received is not None else wire
        share = f"{counted / least:.2f}" if least else "-"
        body.append(
            f"| {name} | {ranks} | {found['step'] * 1e3:.0f} | {found['states']:.2f} |"
            f" {found['peak'] / 1e6:.0f} | {'-' if received is None else f'{received / 1e6:.2f}'} |"
            f" {share} | {wire / 1e6:.2f} |"
        )
    return lines[:4] + body + lines[4:]


# ---- On paper ------------------------------------------------------------------------------------

PEAK, USED = 989e12, 0.40  # FLOP/s of an H100 in BF16, dense; the share that large runs reach
NVLINK, NIC, GPUS = (
    450e9,
    50e9,
    8,
)  # bytes/s each way of a GPU; GPUs, and network cards, of a machine
LATENCY = 10e-6  # seconds of one hop between machines, with the software


def network_seconds(received, hops):
    """Returns the time of an exchange. All 8 cards of a machine carry what crosses between
    machines, once, and NVLink hands it on within."""
    return max(received / (GPUS * NIC), received / NVLINK) + hops * LATENCY


def paper_rows(params, gpus, tokens, layers):
    states = {
        "adamw/f32/f32": (4, 8),
        "adamw/bf16-sr/bf16-sr": (2, 4),
        "adamw/bf16-sr/int8": (2, 2.13),
        "adamw/bf16-sr/int4": (2, 1.13),
    }
    compute = 6 * params * tokens / (gpus * PEAK * USED)
    share = (gpus - 1) / gpus
    log = (gpus - 1).bit_length()
    for recipe, (weight, state) in states.items():
        # One micro-batch on each GPU: one fp32 slot for its gradients, and the rows' nodes from the
        # others.
        zero1 = params * (weight + 4 + 4 * share + state / gpus)
        traffic = share * params * (4 + weight)
        yield (
            "`train lm`'s way (ZeRO-1)",
            recipe,
            zero1,
            traffic,
            network_seconds(traffic, 2 * layers * log),
            compute,
        )
        # Weights are gathered for the forward and for the backward pass, gradients scattered in
        # fp32; one layer is whole at a time, twice.
        layer = params / layers
        zero3 = params * (weight + weight + state) / gpus + 2 * layer * (weight + 4)
        traffic = share * params * (2 * weight + 4)
        yield (
            "FSDP2 (ZeRO-3)",
            recipe,
            zero3,
            traffic,
            network_seconds(traffic, 3 * layers * log),
            compute,
        )


def paper():
    lines = []
    for title, params, gpus, tokens, layers in (
        ("8 B parameters, 64 GPUs, 4 Mi tokens a step, 32 layers", 8e9, 64, 4 << 20, 32),
        ("1 T parameters, 4096 GPUs, 16 Mi tokens a step, 128 layers", 1e12, 4096, 16 << 20, 128),
    ):
        lines += [
            "",
            f"**{title}**",
            "",
            (
                "| | recipe | GB a GPU | GB received by a GPU in a step | s on the network | s of"
                " computing | network / computing |"
            ),
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for name, recipe, memory, traffic, seconds, compute in paper_rows(
            params, gpus, tokens, layers
        ):
            lines.append(
                f"| {name} | `{recipe}` | {memory / 1e9:,.1f} | {traffic / 1e9:,.1f} |"
                f" {seconds:.3g} | {compute:.3g} | {seconds / compute:.2f} |"
            )
    return lines[1:]


def main():
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(sys.argv[2], sys.argv[3:]))
    if sys.argv[1:2] == ["--fsdp-rank"]:
        return fsdp_rank(*map(int, sys.argv[2:5]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default=os.path.join(ROOT, "build", "halfstep"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out")
    parser.add_argument("--paper", action="store_true")
    args = parser.parse_args()
    tables = {"paper": paper()}
    if not args.paper:
        tables["measured"] = measured(args.program, args.steps)
    for mark, lines in tables.items():
        if args.out:
            put(args.out, mark, lines)
        else:
            print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
