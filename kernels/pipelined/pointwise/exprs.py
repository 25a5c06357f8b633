"""The expressions of a pointwise op together, as what is compiled and kept for them goes by.

In: texts or trees of distmega.program.expr. Out: `Formula`. Next: views.py.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from distmega.program import expr


@dataclass(frozen=True, kw_only=True)
class Formula:
    """The expressions of a kernel, one an output; Triton would take a plain tuple apart."""

    exprs: tuple[expr.Expr, ...]

    @cached_property
    def text(self) -> str:
        """All expressions, the key of what is kept for them."""
        return "; ".join(map(str, self.exprs))


@lru_cache(maxsize=4096)
def formula_of(exprs: tuple[str | expr.Expr, ...]) -> Formula:
    """The formula of expressions or their texts, the same object each time."""
    parsed = (expr.parse(each) if isinstance(each, str) else each for each in exprs)
    return Formula(exprs=tuple(parsed))
