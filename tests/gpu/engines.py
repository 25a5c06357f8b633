"""Engines of models with random weights on the GPU: presets, and presets with other extents."""

from dataclasses import replace

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.models.config import ModelConfig
from distmega.models.presets import PRESETS
from distmega.models.sampling import MOST_LIKELY, Samplings
from distmega.models.weights.random_source import RandomReader
from distmega.models.weights.tensors import RopeTableReader, weight_specs
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import ModelSource, open_model


def random_model(name: str, **changes: object) -> ModelSource:
    """A preset with some fields of its configuration changed."""
    if not changes:
        return open_model(name)
    config: ModelConfig = replace(PRESETS[name], **changes)
    specs = weight_specs(config)
    readers = {name: RandomReader(spec=spec, seed=0) for name, spec in specs.items()}
    rope = RopeTableReader(config=config)
    return replace(open_model(name), config=config, readers={**readers, "rope_table": rope})


def open_engine(
    source: ModelSource | str,
    batch: int = 1,
    max_context: int = 1024,
    sampling: Samplings = MOST_LIKELY,
    **more: object,
) -> Engine:
    """An engine whose decode steps give logits; it must run them by the decode kernel. more:
    options.
    """
    if isinstance(source, str):
        source = open_model(source)
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=max_context, batch=batch, **more)
    comm = SingleCommunicator(mesh)
    engine = Engine(source, mesh, comm, options, device="cuda:0", logits="last", sampling=sampling)
    assert engine.uses_megakernel
    return engine
