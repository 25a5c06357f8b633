"""What ranks tell each other beside tensors: plain values as bytes, and back.

In: None, booleans, numbers, text, bytes, and lists, tuples and dicts of such. Out: the same value,
on a rank that trusts the sender with data, never with code: unlike pickle, reading makes no other
objects and calls nothing. The form is JSON, with an object of one key for what JSON lacks. Used by
communicator.py.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

Plain: TypeAlias = "None | bool | int | float | str | bytes | Sequence[Plain] | Mapping[str, Plain]"

MAX_BYTES = 1 << 30
"""Longer messages are refused before there is memory for them."""


def encode_plain(value: Plain) -> bytes:
    """The value as bytes. TypeError for what is not plain, a bug of the caller."""
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode_plain(data: bytes) -> Plain:
    """What encode_plain was given. ValueError for any other bytes."""
    try:
        return _from_json(json.loads(data.decode()))
    except RecursionError as error:
        raise ValueError("values lie too deep inside each other") from error


def _to_json(value: Plain) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case tuple():
            return {"tuple": [_to_json(each) for each in value]}
        case list():
            return [_to_json(each) for each in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": [[key, _to_json(each)] for key, each in value.items()]}
        case _:
            raise TypeError(f"a {type(value).__name__} can't be told to other ranks")


def _from_json(found: object) -> Plain:
    match found:
        case None | bool() | int() | float() | str():
            return found
        case list():
            return [_from_json(each) for each in found]
        case {"bytes": str(text), **rest} if not rest:
            return base64.b64decode(text, validate=True)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(_from_json(each) for each in items)
        case {"dict": list(items), **rest} if not rest:
            return dict(map(_item, items))
        case _:
            raise ValueError("an object of unknown form")


def _item(pair: object) -> tuple[str, Plain]:
    match pair:
        case [str(key), value]:
            return key, _from_json(value)
        case _:
            raise ValueError("a dict with an item of unknown form")


def gather_bytes(mine: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Each rank's bytes on all ranks of a group, in its order. Collective. RuntimeError where one
    says to have more than MAX_BYTES, as torch has for any other fault of the communication.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    lengths = torch.empty(size, 1, dtype=torch.int64, device=device)
    dist.all_gather([*lengths], torch.tensor([len(mine)], device=device), group=group)
    sizes = lengths.flatten().tolist()
    if not 0 <= min(sizes) <= (most := max(sizes)) <= MAX_BYTES:
        raise RuntimeError(f"messages of {sizes} bytes, at most {MAX_BYTES} are taken")
    own = torch.zeros(most, dtype=torch.uint8, device=device)
    own[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    found = own.new_empty(size, most)
    dist.all_gather([*found], own, group=group)
    rows = zip(found.cpu(), sizes, strict=True)
    return [row[:length].numpy().tobytes() for row, length in rows]
