"""A wait for all that was queued on a GPU, which other ranks may hold up.

Comes in: how long it may take. Goes out: HangError where it takes longer. Used by groups.py and
nccl.py; what waits for single calls is ../run/deadline.py.
"""

import threading

import torch

from distmega.errors import HangError


def late_error(found: str) -> HangError:
    """What to raise for work that has taken longer than its limit. found: which, and how long."""
    return HangError(
        found,
        expected="every rank of the mesh to make the same calls in that time",
        remedy="look for the rank that ended or stopped first, and start the job again",
    )


def await_gpu(limit_s: float) -> None:
    """Returns once the current GPU is through with all that was queued on it; HangError where that
    takes longer than the limit, as behind a peer that has ended.
    """
    device, errors = torch.cuda.current_device(), list[Exception]()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
        except Exception as error:  # of a GPU that has failed
            errors.append(error)

    # nothing bounds a wait for all streams, so another thread does it, which is left where it hangs
    thread = threading.Thread(target=wait, name="distmega-gpu", daemon=True)
    thread.start()
    thread.join(min(limit_s, threading.TIMEOUT_MAX))
    if thread.is_alive():
        raise late_error(f"GPU {device} of this rank is still at work after {limit_s:g} s")
    if errors:
        raise errors[0]
