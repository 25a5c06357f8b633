"""Functions run side by side, each in a thread of its own."""

import threading
from collections.abc import Callable, Iterable


def run_at_once(parts: Iterable[Callable[[], object]]) -> None:
    """Returns when all have ended; raises the error that came first, if there was one."""
    errors: list[BaseException] = []

    def run(part: Callable[[], object]) -> None:
        try:
            part()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
