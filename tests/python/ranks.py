"""Several processes of torch.distributed for tests: a pool that is forked once for a file, so that none of them imports torch again."""
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

#: more than any test needs; what hangs is told
_TIMEOUT = 60


def _work(rank, pipe):
    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        if task is None:
            return
        function, arguments, size, store = task
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT // 2))
        try:
            pipe.send((True, function(rank, size, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            dist.destroy_process_group()


class Pool:
    """Up to `size` ranks."""

    def __init__(self, size=4):
        self.size, self.processes, self.pipes = size, [], []

    def _start(self):
        context = multiprocessing.get_context("fork")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, size, function, *arguments):
        """function(rank, size, *arguments) in `size` processes: what each returns. Raises what the first of them raised."""
        if not self.processes:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes[:size]:
                pipe.send((function, arguments, size, os.path.join(folder, "store")))
            answers = []
            for rank, pipe in enumerate(self.pipes[:size]):
                if not pipe.poll(_TIMEOUT):
                    self.close()
                    raise AssertionError(f"rank {rank} of {size} hangs; the others: {answers}")
                answers.append(pipe.recv())
        for rank, (good, answer) in enumerate(answers):
            if not good:
                others = [text.strip().splitlines()[-1] for ok, text in answers if not ok]
                raise AssertionError(f"rank {rank} of {size}:\n{answer}\nall: {others}")
        return [answer for _, answer in answers]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []
