"""The one entrance to the launchers: a target, a payload and a number of ranks in, emitted values
and a result out.

A launcher's module is loaded when it is chosen, so that a command which starts no ranks needs
neither torch nor Ray. Next: launch/local.py, launch/torchrun.py or launch/on_ray/actors.py.
"""

import logging
import os
import pickle
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from distmega.arguments import require_type
from distmega.engine.ranks.context import DeviceKind, Emit, ProgressReport, RankContext
from distmega.env import read_settings
from distmega.errors import LaunchError, RankFailure, RequestError, argument, counted
from distmega.launch import late
from distmega.launch.contract import (
    PASSIVE,
    Emitted,
    Event,
    Job,
    LauncherOptions,
    function_name,
    require_no_import,
)
from distmega.launch.on_ray.token import show_token

logger = logging.getLogger(__name__)

DEVICES = Path("/dev")

LAST_WORDS_S = 2.0
"""How long a silent rank stays, so that the one that explains the failure isn't ended by torchrun
before it has.
"""


def launch(
    target: str | Callable[[RankContext, Any, Emit], object],
    payload: object,
    options: LauncherOptions,
) -> Iterator[Event]:
    """Call `target`, a function or "module:function", on every rank with (RankContext, payload,
    emit); see distmega/engine/ranks/context.py. Ranks import its module, so what calls `launch` in
    it must stand under `if __name__ == "__main__":`.

    Yields Emitted for each value emitted on rank 0, as it comes, then one Result once all ranks
    have returned. Under torchrun, where every rank runs this, ranks other than 0 yield nothing.
    Closing the iterator, or any error, ends all ranks.

    Raises RequestError for bad options, LaunchError if ranks can't be started, RankFailure naming
    the rank if one dies, raises or hangs, and any DistmegaError that a rank raises.
    """
    require_type("options", options, LauncherOptions, "LauncherOptions")
    timeout_s = read_settings().timeout_s if options.timeout_s is None else options.timeout_s
    launcher = choose_launcher(options.launcher)
    _check_restarts(options, launcher)
    _check_bundles(options, launcher)
    require_gpus(options, options.num_ranks)
    require_no_import()
    job = Job(
        target=function_name(target),
        payload=_pickle_payload(payload),
        num_ranks=options.num_ranks,
        device=choose_device(options.device, launcher),
        timeout_s=timeout_s,
        start_timeout_s=options.start_timeout_s,
        ray=options.ray,
    )
    return _run_with_restarts(_load_launcher(launcher), job, options.max_restarts)


def choose_launcher(name: str) -> str:
    """The launcher meant by `name`; "auto" is torchrun in a process that torchrun started, else
    local. RequestError for another launcher in there, where every rank would start all ranks.
    """
    if name == "auto":
        return "torchrun" if is_under_torchrun() else "local"
    if name != "torchrun" and is_under_torchrun():
        raise RequestError(
            f"{argument('launcher')} {name} in a process that torchrun started",
            expected=f"{argument('launcher')} torchrun or auto there",
            remedy=f"leave {argument('launcher')} out, or start without torchrun",
        )
    return name


def choose_num_ranks(launcher: str, requested: int) -> int:
    """`requested` ranks, or for 0 as many as there are: torchrun's WORLD_SIZE, else 1.

    RequestError if WORLD_SIZE is set, by torchrun or by hand, and isn't that number.
    """
    text = os.environ.get("WORLD_SIZE", "")
    num_ranks = requested or (int(text) if launcher == "torchrun" and text.isdecimal() else 1)
    if text and text != str(num_ranks):
        asked = "1 rank is" if num_ranks == 1 else f"{num_ranks} ranks are"
        raise RequestError(
            f"{asked} asked for, and WORLD_SIZE={text}",
            expected="both to be the same",
            remedy=f"correct {argument('tp')} or what starts the ranks, or unset WORLD_SIZE",
        )
    return num_ranks


def choose_device(name: DeviceKind | Literal["auto"], launcher: str) -> DeviceKind:
    """The device meant by `name`; "auto" is cuda on a machine with an NVIDIA GPU, else cpu.

    A GPU that CUDA_VISIBLE_DEVICES hides does not count, but for Ray, which sets that variable for
    its ranks by itself and leaves processes without a GPU none.
    """
    if name == "auto":
        return "cuda" if _num_gpu_files(launcher) else "cpu"
    return name


def require_gpus(options: LauncherOptions, num_ranks: int) -> None:
    """LaunchError where ranks on GPUs of this machine are asked for, and it has too few. Ranks of
    Ray may be elsewhere, those of torchrun look for themselves.
    """
    launcher = choose_launcher(options.launcher)
    if launcher != "local" or choose_device(options.device, launcher) != "cuda":
        return
    needed = 1 if read_settings().share_gpus else num_ranks
    if _num_gpu_files(launcher) >= needed:  # so that torch need not be asked, which takes seconds
        return
    if (found := late.num_gpus()) < needed:
        raise LaunchError(
            f"{argument('device')} cuda for {counted(num_ranks, 'rank')}, and"
            f" {counted(found, 'GPU')} that torch finds",
            expected=f"at least {counted(needed, 'NVIDIA GPU')}, and a torch built for CUDA",
            remedy=f"give {argument('device')} cpu or ask for fewer ranks; distmega doctor says "
            "what this machine has",
        )


def _num_gpu_files(launcher: str) -> int:
    """GPUs that have a file, as they do once the driver is in use; elsewhere they may have none.
    Not those that are hidden from ranks of `launcher`.
    """
    num = len([*DEVICES.glob("nvidia[0-9]*")])
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None or launcher == "ray":
        return num
    return min(num, len([*takewhile(partial(_is_gpu, num=num), shown.split(","))]))


def _is_gpu(name: str, num: int) -> bool:
    """Whether CUDA takes a name in CUDA_VISIBLE_DEVICES for one of num GPUs; it reads no further
    than the first that it does not take.
    """
    name = name.strip()
    return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < num)


def should_report() -> bool:
    """Whether this process is to print the error that ends it: under torchrun, the first rank to
    ask; else always.

    The other ranks should end silently; they are kept here until the message is surely out.
    """
    if not is_under_torchrun():
        return True
    try:
        if late.claim_report():
            return True
    except RequestError:  # a process with some variables of torchrun, which has no peers
        return True
    time.sleep(LAST_WORDS_S)
    return False


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _check_restarts(options: LauncherOptions, launcher: str) -> None:
    if options.max_restarts and launcher == "torchrun":
        raise RequestError(
            f"{counted(options.max_restarts, 'restart')} with launcher torchrun",
            expected="none: torchrun itself starts its ranks again",
            remedy="give --max-restarts to torchrun",
        )


def _check_bundles(options: LauncherOptions, launcher: str) -> None:
    size = options.ray.ranks_per_bundle
    if launcher == "ray" and options.num_ranks % size:
        raise RequestError(
            f"{counted(options.num_ranks, 'rank')} in bundles of {size}",
            expected="as many ranks in each bundle",
            remedy="correct num_ranks, or ranks_per_bundle of RayOptions",
        )


def _pickle_payload(payload: object) -> bytes:
    try:
        return pickle.dumps(payload)
    except Exception as error:  # whatever the classes of its parts raise
        raise RequestError(
            f"a payload of type {type(payload).__name__} ({error})",
            expected="a payload that can be pickled",
            remedy="send plain values, and open files and devices on the ranks",
        ) from error


def _load_launcher(launcher: str) -> Callable[[Job], Generator[Event]]:
    if launcher == "local":
        return late.run_local
    if launcher == "torchrun":  # this process is a rank, and OpenMP reads it as torch is loaded
        for name, value in PASSIVE.items():
            os.environ.setdefault(name, value)
        return late.run_torchrun
    show_token(os.environ)
    try:
        return late.run_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise LaunchError(
            "launcher 'ray', but Ray is not installed here",
            expected="the package ray",
            remedy="run: pip install 'distmega[ray]'",
        ) from error


def _run_with_restarts(
    start: Callable[[Job], Generator[Event]], job: Job, max_restarts: int
) -> Iterator[Event]:
    num_yielded = 0
    for num_left in range(max_restarts, -1, -1):
        num_seen = 0
        try:
            with closing(start(job)) as events:
                for event in events:
                    if isinstance(event, Emitted) and not isinstance(event.value, ProgressReport):
                        num_seen += 1
                        if num_seen <= num_yielded:
                            continue
                        num_yielded = num_seen
                    yield event
            return
        except RankFailure as failure:
            if num_left == 0:
                raise
            number = max_restarts - num_left + 1
            logger.warning("restart %d of %d of all ranks: %s", number, max_restarts, failure)
