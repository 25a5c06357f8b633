"""Element types by short name, without importing torch; `torch_dtype` lives with the code that
runs.
"""

from distmega.arguments import shown
from distmega.errors import ProgramError

ITEM_BYTES: dict[str, int] = {
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "bool": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes of one element; KeyError is a bug of the caller, since programs validate dtypes when
    built.
    """
    return ITEM_BYTES[dtype]


TORCH_NAMES = {
    "float64": "f64", "double": "f64", "float32": "f32", "float": "f32", "bfloat16": "bf16",
    "float16": "f16", "half": "f16", "int64": "i64", "long": "i64", "int32": "i32", "int": "i32",
}  # fmt: skip
"""What torch calls these types; it has `bool` too."""


def short_dtype(dtype: object) -> str:
    """The short name of a type that is given by it, by torch's name or as a torch.dtype;
    ProgramError for another one.
    """
    text = dtype if isinstance(dtype, str) else shown(dtype)
    text = text.removeprefix("torch.")
    name = TORCH_NAMES.get(text, text)
    if name not in ITEM_BYTES:
        raise ProgramError(
            f"dtype {shown(text)}",
            expected=f"one of {', '.join(ITEM_BYTES)}, or a name that torch has for one",
            remedy="convert the tensor to one of these",
        )
    return name


HALVES = ("bf16", "f16")
"""The float types of 16 bits."""
FLOATS_TO_F32 = (*HALVES, "f32")
"""Those that kernels compute with in f32."""
FLOATS = (*FLOATS_TO_F32, "f64")

INTEGER_BITS: dict[str, int] = {"i64": 64, "i32": 32, "bool": 1}
"""Bits of the types that hold whole numbers."""


def is_integer(dtype: str) -> bool:
    """Whether elements are whole numbers."""
    return dtype in INTEGER_BITS
