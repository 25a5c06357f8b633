"""Weights of a GGUF file: an open GgufFile in, readers of logical weights as float32 out. Next:
sources/load.py.
"""

from distmega.models.config import ModelConfig
from distmega.models.gguf.config import ROPE_FACTORS
from distmega.models.gguf.file import GgufArray, GgufFile
from distmega.models.weights.tensors import StoredReader, check_stored, weight_specs

_ROTATED = ("wq", "wk")


def read_gguf(file: GgufFile, config: ModelConfig) -> dict[str, StoredReader]:
    """A reader for each weight of the configuration; ModelError when the file's tensors do not fit
    it.

    Files of architecture llama keep query and key rows in interleaved rotary order.
    """
    wanted = {spec.gguf_name: spec for spec in weight_specs(config).values()}
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    stored = {name: spec.stored_shape for name, spec in wanted.items()}
    check_stored(stored, shapes, lambda name: name == ROPE_FACTORS, str(file.path))
    return {
        spec.name: StoredReader(
            spec=spec,
            stored=GgufArray(file=file, tensor=file.tensors[name]),
            interleaved=config.architecture == "llama" and spec.name.endswith(_ROTATED),
        )
        for name, spec in wanted.items()
    }
