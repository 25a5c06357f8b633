"""How soon Python lets another thread in, while threads of ours work beside the main one.

Out: a block. A thread that has read a file or heard from another process must have the interpreter
back to go on, and a busy thread gives it up every 5 ms by default. Reading all of Triton for its
hash, a file of 1 MB after the other, takes 0.3 s alone and 5 s beside a busy thread; with turns of
0.2 ms 0.6 s, and the busy thread is no slower. Used by warm_up.py, ahead.py and relaunch.py.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 0.0002
_ROUNDED_S = 1e-7
"""Python cuts seconds to whole microseconds, 15 of which would become 14."""

_lock = threading.Lock()
_num_inside = 0
_before_s = _chosen_s = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Within it, in whatever thread, threads take turns of TURN_S at most; when the last block ends
    they take those of before, unless somebody else has chosen others meanwhile.
    """
    global _num_inside, _before_s, _chosen_s
    with _lock:
        if not _num_inside:
            _before_s = sys.getswitchinterval()
            if _before_s > TURN_S:
                sys.setswitchinterval(TURN_S)
            _chosen_s = sys.getswitchinterval()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            is_ours = sys.getswitchinterval() == _chosen_s < _before_s
            if not _num_inside and is_ours:
                sys.setswitchinterval(_before_s + _ROUNDED_S)
