"""Faults that tests inject into ranks which decode with a real engine; imported on the ranks."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from distmega.engine.decode_plan import model_mesh
from distmega.engine.engine import Engine
from distmega.engine.ranks.context import Emit, RankContext
from distmega.engine.requests import Collectives, EngineOptions
from distmega.errors import HangError, RequestError
from distmega.hostir.comm.communicator import GlooCommunicator
from distmega.sources.load import open_model

PROMPT = (11, 42, 7, 99, 5)
NUM_TOKENS = 6
FAULTY_STEP = 3
DELAY_S = 5.0

Kind = Literal["none", "kill", "stop", "delay", "drop", "target"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong on `rank` before step FAULTY_STEP. timeout_s: of a wait in a kernel;
    exchange_s: of an exchange on the host, which takes long on a busy machine. once: a file that
    says that it did.
    """

    kind: Kind = "none"
    rank: int = 1
    pp: int = 1
    timeout_s: float = 2.0
    exchange_s: float = 60.0
    collectives: Collectives = "auto"
    once: Path | None = None


def decode(context: RankContext, fault: Fault, emit: Emit) -> list[int]:
    """Emits and returns NUM_TOKENS tokens after PROMPT; after a hang the engine is of no use."""
    mesh = model_mesh(context.world_size // fault.pp, fault.pp)
    comm = GlooCommunicator(mesh, context.rank, wait_s=fault.exchange_s)
    options = EngineOptions(
        max_context=64, timeout_s=fault.timeout_s, collectives=fault.collectives
    )
    engine = Engine(open_model("tiny-llama"), mesh, comm, options, node=context.node)
    tokens = [engine.prefill(PROMPT)]
    emit(tokens[0])
    for step in range(1, NUM_TOKENS):
        if step == FAULTY_STEP and context.rank == fault.rank and not _is_over(fault):
            FAULTS[fault.kind](engine)
        try:
            tokens.append(engine.decode(tokens[-1]))
        except HangError as error:
            _assert_refuses(engine, error)
            raise
        emit(tokens[-1])
    return tokens


def _assert_refuses(engine: Engine, hang: HangError) -> None:
    """Its ranks may have started different launches, so it does nothing any more."""
    for call in (lambda: engine.prefill(PROMPT), lambda: engine.decode(1)):
        with pytest.raises(RequestError) as refusal:
            call()
        assert refusal.value.found == f"a call after a hang ({hang.found})"


def _is_over(fault: Fault) -> bool:
    if fault.once is None:
        return False
    over = fault.once.exists()
    fault.once.touch()
    return over


def _kill(engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _drop_signals(engine: Engine) -> None:
    """From now on, no task of this rank's kernel signals a peer."""
    for runner in engine._decode.cpu_kernels.values():
        interpreter = runner.interpreter
        own = interpreter._peers.counters[interpreter.rank]
        interpreter._queues = [
            [step._replace(signals=tuple(s for s in step.signals if s[0] is own)) for step in queue]
            for queue in interpreter._queues
        ]


def _raise_target(engine: Engine) -> None:
    """The first task that waits for peers waits for one trigger more than there is."""
    for runner in engine._decode.cpu_kernels.values():
        for queue in runner.interpreter._queues:
            for at, step in enumerate(queue):
                if any(len(wait.sources) > 1 for wait in step.waits):
                    waits = tuple(w._replace(triggers=w.triggers + 1) for w in step.waits)
                    queue[at] = step._replace(waits=waits)
                    return


def _drop_host_signals(engine: Engine) -> None:
    engine.comm.signal = lambda axis, name, peer: None  # type: ignore[method-assign]


def prefill_without_signals(context: RankContext, fault: Fault, emit: Emit) -> int:
    """A pipeline's prefill in six micro-batches; the last stage never says that it is done."""
    mesh = model_mesh(context.world_size // fault.pp, fault.pp)
    comm = GlooCommunicator(mesh, context.rank, fault.timeout_s)
    options = EngineOptions(max_context=64, timeout_s=fault.timeout_s, micro_batches=6)
    engine = Engine(open_model("tiny-llama"), mesh, comm, options, node=context.node)
    if context.rank == fault.rank:
        _drop_host_signals(engine)
    return engine.prefill((*PROMPT, 3))


FAULTS: dict[Kind, Callable[[Engine], None]] = {
    "none": lambda engine: None,
    "kill": _kill,
    "stop": _stop,
    "delay": lambda engine: time.sleep(DELAY_S),
    "drop": _drop_signals,
    "target": _raise_target,
}
