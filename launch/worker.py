"""One rank's work, the same under every launcher: a RankContext, a Job and a store in, a stream of
reports out.

`RankRun` loads the target, sets torch's threads, opens the process group, calls the target and
turns whatever happens into reports. The way back up: launch/supervise.py, and for torchrun
launch/torchrun.py.
"""

import logging
import os
import pickle
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from distmega.engine.ranks.context import DeviceKind, RankContext
from distmega.env import read_settings
from distmega.errors import (
    DistmegaError,
    LaunchError,
    LostPeerError,
    RankFailure,
    RequestError,
)
from distmega.hostir.run.cuda_graph import release_graphs
from distmega.launch.contract import Job, load_function
from distmega.launch.host.devices import allow_sharing, gpu_of
from distmega.launch.host.reports import Done, Failed, Ready, Report, Value
from distmega.launch.host.stores import DistError, PrefixStore, Store

logger = logging.getLogger(__name__)

GATHER_S = 0.005
"""Nobody sees a token come so much later."""

TORCH_FOLDER = str(Path(torch.__file__).parent)
DISTRIBUTED_FOLDER = str(Path(dist.__file__).parent)


class RankRun:
    """One run of a job's target on this rank. The group stays open after it, see close_group."""

    def __init__(
        self,
        context: RankContext,
        job: Job,
        *,
        join: Callable[[], Store],
        collective_timeout_s: float,
    ) -> None:
        """`join` opens or connects to the rendezvous store. Collectives that take longer than the
        limit raise.
        """
        self._context, self._job, self._join = context, job, join
        self._collective_timeout_s = collective_timeout_s
        self._thread_id = 0

    def run(self, report: Callable[[Report], None]) -> None:
        """Call the target in this thread. Reports are given at once; Done or Failed is the last."""
        self._thread_id = threading.get_ident()
        rank = self._context.rank
        try:
            value = self._call_target(report)
            data = self._pickled(value, "result") if rank == 0 else b""
        except BaseException as error:  # whatever ends the target must reach the launcher
            logger.debug("failed", exc_info=error)
            report(_describe_failure(rank, error, self._context.world_size))
        else:
            report(Done(rank=rank, data=data))

    def stream(self) -> Iterator[list[Report]]:
        """Call the target in a thread of its own and yield its reports as they come, those of
        GATHER_S together: passing them on takes time from the target.
        """
        reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        threading.Thread(target=self.run, args=(reports.put,), name="target", daemon=True).start()
        while True:
            found = [reports.get()]
            if not isinstance(found[0], Done | Failed):
                time.sleep(GATHER_S)
            while not reports.empty():
                found.append(reports.get())
            yield found
            if isinstance(found[-1], Done | Failed):
                return

    def position(self) -> str:
        """The innermost line outside of torch at which the target stands now."""
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None and frame.f_code.co_filename.startswith(TORCH_FOLDER):
            frame = frame.f_back
        if frame is None:
            return "not in the target"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

    def _pickled(self, value: object, what: str) -> bytes:
        try:
            return pickle.dumps(value)
        except Exception as error:  # whatever the classes of its parts raise
            raise RankFailure(
                f"rank {self._context.rank} of {self._context.world_size} raised"
                f" {type(error).__name__}: its {what} of type {type(value).__name__} can't be"
                f" pickled ({_text(error)})",
                expected="what can be sent to the launcher",
                remedy="give plain values, arrays, or tensors of a CPU",
            ) from error

    def _call_target(self, report: Callable[[Report], None]) -> object:
        function = load_function(self._job.target)
        payload = _read_payload(self._job.payload)
        torch.set_num_threads(_choose_num_threads(self._context.local_world_size))
        open_group(self._context, self._join(), self._collective_timeout_s)
        report(Ready(rank=self._context.rank))

        def emit(value: object) -> None:
            if self._context.rank == 0:
                report(Value(rank=0, data=self._pickled(value, "emitted value")))

        return function(self._context, payload, emit)


def _read_payload(data: bytes) -> object:
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        raise LaunchError(
            f"a payload of a type that the ranks don't find ({error})",
            expected="values of types that they can import",
            remedy="send plain values, or define the type in a module of its own",
        ) from error


def open_group(context: RankContext, store: Store, timeout_s: float) -> None:
    """Initialise torch.distributed over `store`: gloo on CPU, NCCL on CUDA with the rank's device
    made current.
    """
    device_id = None
    if context.backend == "nccl":
        device_id = torch.device(context.device)
        if device_id.index >= torch.cuda.device_count():
            raise LaunchError(
                f"rank {context.rank} is to run on {context.device}, node {context.node} has "
                f"{torch.cuda.device_count()} CUDA devices",
                expected="one device for every rank",
                remedy="ask for fewer ranks, for CPU ranks, or, to test, set DISTMEGA_SHARE_GPUS=1",
            )
        torch.cuda.set_device(device_id)
        allow_sharing(context.rank)
    if context.backend == "gloo":
        _check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    dist.init_process_group(
        context.backend,
        store=PrefixStore("group", store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device_id,
    )


def supervised_timeout_s(job: Job) -> float:
    """Limit of a collective where a launcher watches: it gives up before, and explains better."""
    return 2 * max(job.timeout_s, job.start_timeout_s)


def close_group() -> None:
    """Leave torch.distributed; only once every rank is through, since peers may still read what
    this rank sent.
    """
    if dist.is_initialized():
        release_graphs()
        dist.destroy_process_group()


def make_context(
    *,
    rank: int,
    world_size: int,
    local: tuple[int, int],
    node: str,
    kind: DeviceKind,
    index: int,
    timeout_s: float,
) -> RankContext:
    """The context of a rank; `local` is its number among the node's ranks and their count, `index`
    its CUDA device.
    """
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local[0],
        local_world_size=local[1],
        node=node,
        backend="nccl" if kind == "cuda" else "gloo",
        device=f"cuda:{gpu_of(index)}" if kind == "cuda" else "cpu",
        timeout_s=timeout_s,
    )


def start_logging(rank: int) -> None:
    """Log to stderr from DISTMEGA_LOG upwards, each line with its rank."""
    logging.basicConfig(
        level=read_settings().log.upper(),
        format=f"%(levelname)s rank {rank} %(name)s: %(message)s",
    )


def _choose_num_threads(local_world_size: int) -> int:
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    num_threads = read_settings().num_threads
    if num_threads is not None and num_threads > num_cores:  # torch may crash
        raise RequestError(
            f"environment variable DISTMEGA_THREADS={num_threads}",
            expected=f"at most {num_cores}, the cores that a rank here may use",
            remedy="lower or unset DISTMEGA_THREADS",
        )
    return num_threads or max(1, num_cores // local_world_size)


def _check_interfaces(names: str) -> None:
    """LaunchError where gloo is to use a network interface that isn't there, which ends in an error
    of its sources.
    """
    here = [name for _, name in socket.if_nameindex()]
    missing = [name for name in names.split(",") if name and name not in here]
    if missing:
        raise LaunchError(
            f"environment variable GLOO_SOCKET_IFNAME={names[:80]!r} with no interface "
            f"{missing[0][:80]!r}",
            expected=f"some of {', '.join(here)}",
            remedy="correct or unset GLOO_SOCKET_IFNAME",
        )


def _describe_failure(rank: int, error: BaseException, num_ranks: int) -> Failed:
    return Failed(
        rank=rank,
        error=error if isinstance(error, DistmegaError) and _can_be_sent(error) else None,
        summary=f"{type(error).__name__}: {_text(error)}",
        traceback="".join(traceback.format_exception(error)),
        lost_peer=num_ranks > 1 and _is_lost_peer(error),
    )


def _can_be_sent(error: DistmegaError) -> bool:
    """Whether it can be pickled and read back, as one whose class is inside of a function can't."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class, or the classes of its parts, raise
        return False
    return True


def _text(error: BaseException) -> str:
    """What an error says, whatever its class does when it is asked."""
    try:
        return str(error)
    except Exception as wrong:
        return f"its text raised {type(wrong).__name__}"


def _is_lost_peer(error: BaseException) -> bool:
    """Whether another rank is the likely cause: an exchange between ranks, or the store, failed in
    the error or in what caused it.
    """
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, LostPeerError | DistError | ConnectionError) or _is_in_collective(each):
            return True
        each = each.__cause__
    return False


def _is_in_collective(error: BaseException) -> bool:
    """Whether torch.distributed raised it, or gloo, whose handles raise it where they are awaited:
    both have no class of their own for that.
    """
    if type(error) is not RuntimeError:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return "/gloo/" in str(error) or (
        bool(frames) and frames[-1].filename.startswith(DISTRIBUTED_FOLDER)
    )
