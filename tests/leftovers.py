"""What a test may leave behind on the machine."""

from pathlib import Path


def shared_names() -> set[str]:
    """Names in /dev/shm, but for the semaphores of multiprocessing: tests that run in another
    process meanwhile make and remove such.
    """
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return {name for name in names if not name.startswith("sem.mp-")}
