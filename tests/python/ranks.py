"""Several processes of torch.distributed for tests. A server is forked once for all tests, so that
torch is imported once. It forks fresh ranks for every run.

The ranks are killed when all of them have answered. So no process ever destroys a group and makes
another, which now and then crashes a thread of gloo.

On a busy machine such a thread also crashes by itself, with torch 2.13 in about one of 200 runs:
glibc finds its heap broken while gloo frees what it gathered. No thread of halfstep runs in a rank.
So a run is made once more if a thread died that is not Python's. A rank that dies in Python's
thread, where halfstep works, is an error at once.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

#: seconds; more than any test needs on a busy machine. Ranks that have not answered by then are
#: reported as hanging
_TIMEOUT = 480


def _rank(rank, size, around, store, function, arguments, pipe):
    torch.set_num_threads(1)
    faulthandler.enable(open(f"{store}.{rank}", "w", encoding="utf-8"))
    try:
        dist.init_process_group(
            "gloo",
            init_method="file://" + store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_TIMEOUT // 2),
        )
        with around():
            answer = pickle.dumps((True, function(rank, size, *arguments)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    # send() would put tensors into shared memory, and needs /dev/shm for that.
    pipe.send_bytes(answer)
    time.sleep(_TIMEOUT)


def _serve(control, pipes, around):
    """Forks the ranks of each run. Reports how a rank died in its place, and kills ranks when told
    to."""
    for module in (
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.tensor.parallel",
    ):  # what every rank would import again
        importlib.import_module(module)
    while (given := control.recv()) is not None:
        size, *task = given
        ranks = {}
        for rank, pipe in enumerate(pipes[:size]):
            pid = os.fork()
            if not pid:
                try:
                    _rank(rank, size, around, *task, pipe)
                finally:
                    os._exit(1)
            ranks[pid] = pipe
        try:
            while not control.poll(0.02):
                for pid in list(ranks):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        text = f"ended with status {os.waitstatus_to_exitcode(status)}"
                        ranks.pop(pid).send_bytes(pickle.dumps((False, text)))
            control.recv()
        finally:  # also if the process of the tests has ended
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _read(path):
    """Returns the text of a file, which is empty if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _died_outside_python(text):
    """Judges what faulthandler wrote: it names the current thread, if that is one of Python's."""
    return "Fatal Python error" in text and "Current thread" not in text


class Pool:
    """Up to `size` ranks. `around` makes a context in which each rank runs its function."""

    def __init__(self, size=4, around=contextlib.nullcontext):
        context = multiprocessing.get_context("fork")
        ours, theirs = zip(*(context.Pipe() for _ in range(size + 1)))
        task = theirs[0], theirs[1:], around
        self.process = context.Process(target=_serve, args=task, daemon=True)
        self.process.start()
        for pipe in theirs:
            pipe.close()
        self.control, self.pipes = ours[0], ours[1:]

    def run(self, size, function, *arguments):
        """Runs function(rank, size, *arguments) in `size` processes and returns their results. If
        ranks fail or hang, raises an error that names them and shows what the first one raised."""
        for more in (1, 0):
            with tempfile.TemporaryDirectory() as folder:
                store = os.path.join(folder, "store")
                answers = self._answers(size, store, function, arguments)
                broken = [_read(f"{store}.{rank}") for rank in range(size)]
            if not (more and any(map(_died_outside_python, broken))):
                break
            warnings.warn("a thread of gloo has crashed; the ranks run once more", stacklevel=2)
        bad = {rank: text for rank, (good, text) in sorted(answers.items()) if not good}
        hang = [rank for rank in range(size) if rank not in answers]
        if bad or hang:
            last = {rank: text.strip().splitlines()[-1] for rank, text in bad.items()}
            raise AssertionError(
                "\n".join(
                    [
                        f"of {size} ranks {hang} hang, and others failed: {last}",
                        *list(bad.values())[:1],
                    ]
                )
            )
        return [answers[rank][1] for rank in range(size)]

    def _answers(self, size, store, function, arguments):
        """Returns what each rank has answered, but of those that hang."""
        answers = {}
        self.control.send((size, store, function, arguments))
        waiting, until = list(self.pipes[:size]), time.monotonic() + _TIMEOUT
        while waiting and time.monotonic() < until:
            for pipe in multiprocessing.connection.wait(waiting, until - time.monotonic()):
                answers[self.pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
                waiting.remove(pipe)
        self.control.send("done")
        return answers

    def close(self):
        """Ends the server, once it has killed the ranks of the last run."""
        self.control.send(None)
        self.process.join()
