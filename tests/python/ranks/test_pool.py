"""The pool of ranks runs once more after a crash in a thread that is none of Python's."""

import ctypes
import os
import time
import warnings

import pytest


def dies(rank, size, where, times, folder):
    """Aborts the first rank as often as told, in Python's thread or in another one."""
    tries = len(os.listdir(folder)) if rank == 0 else times
    if tries < times:
        with open(os.path.join(folder, str(tries)), "w", encoding="utf-8"):
            pass
        if where == "python":
            os.abort()
        libc = ctypes.CDLL(None)
        libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.abort, None)
        time.sleep(60)
    return rank


@pytest.mark.parametrize(
    "where, times, good", [("native", 1, True), ("native", 2, False), ("python", 1, False)]
)
def test_crashes(pool, tmp_path, where, times, good):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if good:
            assert pool.run(2, dies, where, times, str(tmp_path)) == [0, 1]
        else:
            with pytest.raises(AssertionError, match="ended with status -6"):
                pool.run(2, dies, where, times, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == times
    assert ["gloo has crashed" in str(one.message) for one in found] == [True] * (where == "native")
