"""What is of use in the process that made it alone: it has threads, connections or memory of a GPU,
which neither a fork nor a pickle takes along. Used by calls.py, engine.py, compiled/ and
torch_import/captured.py.
"""

import os
from typing import NoReturn

from distmega.errors import RequestError, UnsupportedError


class OwnProcess:
    """Base of classes whose objects can't be copied or pickled; each says what to do in place of
    that.
    """

    how_to_remake = ""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"a copy or a pickle of a {type(self).__name__}",
            expected="its use in the process that made it",
            remedy=self.how_to_remake,
        )


def require_process(process: int, what: str) -> None:
    """RequestError in another process than `process`, which made `what`: a fork of it."""
    if os.getpid() != process:
        raise RequestError(
            f"a call in process {os.getpid()} of {what} of process {process}",
            expected="calls in the process that made it, since a fork has no threads, no GPU and "
            "no connections of its own",
            remedy='start processes with the method "spawn", and make it in each',
        )
