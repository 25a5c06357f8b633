"""Element types by short name, without importing torch; `torch_dtype` lives with the code that
runs.
"""

ITEM_BYTES: dict[str, int] = {
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "bool": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes of one element; KeyError is a bug of the caller, since programs validate dtypes when
    built.
    """
    return ITEM_BYTES[dtype]


INTEGER_BITS: dict[str, int] = {"i64": 64, "i32": 32, "bool": 1}
"""Bits of the types that hold whole numbers."""


def is_integer(dtype: str) -> bool:
    """Whether elements are whole numbers."""
    return dtype in INTEGER_BITS
