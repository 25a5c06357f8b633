"""The device of a rank: its name in, torch's device out, if this machine has it."""

import torch

from distmega.arguments import shown
from distmega.engine.ranks.context import DEVICE_NAME
from distmega.errors import RequestError, counted


def find_device(name: str) -> torch.device:
    """ "cpu", or the GPU "cuda:i" of this machine; RequestError for any other."""
    named = isinstance(name, str | torch.device)
    if not named or not DEVICE_NAME.fullmatch(str(name)):
        raise RequestError(
            f"device {shown(name)}",
            expected="cpu or cuda:i",
            remedy="name where this rank's tensors are",
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (num := torch.cuda.device_count()):
        raise RequestError(
            f"device {name!r}, where torch {torch.__version__} finds {counted(num, 'GPU')}",
            expected="a GPU of this machine, and a torch built for CUDA",
            remedy="run on the device cpu, or where there is such a GPU",
        )
    return device
