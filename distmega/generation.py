"""One call that answers prompts: a GenerateRequest in, ranks started and ended, answers out.

The command (cli/starting.py) checks and places ranks by the same functions. Next:
launch/launchers.py.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distmega.arguments import require_callable, require_type, shown
from distmega.engine.decode_plan import (
    context_limit,
    model_mesh,
    num_stages_of,
    require_positions,
    require_traced,
    untraced,
)
from distmega.engine.decode_planner import plan_decode
from distmega.engine.ranks.context import DeviceKind
from distmega.engine.requests import (
    EngineOptions,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    Token,
    TraceRequest,
)
from distmega.engine.texts import encode_prompts, encode_text
from distmega.errors import RequestError, counted
from distmega.kernels.machines import CPU
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import choose_device, choose_launcher, launch, require_gpus
from distmega.models.decoder import AnyDecoder
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import tokenizer_at
from distmega.sources.locate import config_at, locate_model
from distmega.whole_file import naming_unwritable, require_writable


def generate(
    request: GenerateRequest,
    launcher: LauncherOptions | None = None,
    on_token: Callable[[Token], None] | None = None,
) -> GenerateResult:
    """Starts request.tp * request.pp ranks, which load the model, answer and end. on_token: called
    with each token as it comes.

    launcher: how ranks are started, whatever its number of them; by default as processes of this
    machine, on its GPUs if it has some. Under torchrun, where every rank would return, start a job
    with launch("distmega.engine.ranks.jobs:generate", ...) instead.

    Raises the errors of launch, and those of check_request before any rank starts.
    """
    if not isinstance(request, GenerateRequest):
        raise RequestError(
            f"{shown(request)} in place of a request",
            expected="a GenerateRequest",
            remedy='write GenerateRequest(model="...", prompts=("...",))',
        )
    options = LauncherOptions() if launcher is None else launcher
    require_type("launcher", options, LauncherOptions, "LauncherOptions")
    if on_token is not None:
        require_callable("on_token", on_token)
    if choose_launcher(options.launcher) == "torchrun":
        raise RequestError(
            "generate under torchrun",
            expected="the launcher local or ray",
            remedy='call launch("distmega.engine.ranks.jobs:generate", request, options) on '
            "every rank",
        )
    check_request(request, options)
    options = reserve_ranks(options, request.tp, request.pp)
    last: object = None
    for event in launch("distmega.engine.ranks.jobs:generate", request, options):
        last = event.value
        if isinstance(last, Token) and on_token is not None:
            on_token(last)
    assert isinstance(last, GenerateResult), "a job ends with its result"
    return last


def reserve_ranks(options: LauncherOptions, tp: int, pp: int) -> LauncherOptions:
    """The options for pp stages of tp ranks; ranks of a stage stay together on a node."""
    together = tp if pp > 1 else options.ray.ranks_per_bundle
    ray = replace(options.ray, ranks_per_bundle=max(together, 1))
    return replace(options, num_ranks=tp * pp, ray=ray)


def check_request(
    request: GenerateRequest | ScoreRequest | TraceRequest, launcher: LauncherOptions
) -> None:
    """Finds what is wrong with a request before any rank starts, and fetches a model of the Hub.
    What can be told without the model's program is told before it is made, what can be told without
    its weights before they are fetched.

    LaunchError where this machine is to run all ranks on its GPUs and has too few; ModelError where
    the model is unknown or damaged; PlanError where it can't be divided so; RequestError where this
    machine is to run ranks on its cores and hasn't the memory, and for texts that don't fit the
    context, have no tokens, or some that the model does not know.
    """
    mesh = model_mesh(request.tp, 1 if isinstance(request, TraceRequest) else request.pp)
    require_gpus(launcher, mesh.num_ranks)
    location = locate_model(request.model, "tokenizer")
    config = config_at(location)
    _check_values(request, config, launcher)
    tokenizer = tokenizer_at(location, config)
    if isinstance(request, GenerateRequest):
        encode_prompts(request, config, tokenizer)
    elif isinstance(request, ScoreRequest):
        encode_text(request, config, tokenizer)
    _check_plan(config, mesh, request.options, launcher)
    locate_model(request.model, "weights")


def _check_values(
    request: GenerateRequest | ScoreRequest | TraceRequest,
    config: AnyDecoder,
    launcher: LauncherOptions,
) -> None:
    """RequestError for positions, a device and a file that the request can't have, whatever its
    texts are.
    """
    limit = context_limit(config, request.options)
    if isinstance(request, GenerateRequest):
        require_positions(config, request.options, request.max_new_tokens)
    elif isinstance(request, TraceRequest):
        if (device := _device(launcher)) == "cpu":
            raise untraced(device)
        require_traced(limit, request.num_steps, request.position)
        if choose_launcher(launcher.launcher) == "local":  # rank 0 is on this machine
            path = Path(request.path)
            with naming_unwritable(path, "path"):
                require_writable(path)


def _check_plan(
    config: AnyDecoder, mesh: DeviceMesh, options: EngineOptions, launcher: LauncherOptions
) -> None:
    """PlanError where a model can't be divided so, RequestError for more than the machine has room
    for.
    """
    num_stages = num_stages_of(mesh)
    num_bytes = 0
    for stage in range(num_stages):
        staged = plan_decode(config, mesh, CPU, options, index=stage)
        num_bytes += staged.plan.memory.total_bytes * (mesh.num_ranks // num_stages)
    if (
        choose_launcher(launcher.launcher) == "local"
        and _device(launcher) == "cpu"
        and num_bytes > (most := memory_bytes())
    ):
        raise RequestError(
            f"{num_bytes / 1e9:.1f} GB for the weights and caches of"
            f" {counted(mesh.num_ranks, 'rank')}",
            expected=f"at most the {most / 1e9:.1f} GB of this machine",
            remedy="use GPUs, a smaller model, a smaller batch or a shorter context",
        )


def _device(launcher: LauncherOptions) -> DeviceKind:
    """Where the ranks of a launcher compute."""
    return choose_device(launcher.device, choose_launcher(launcher.launcher))


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
