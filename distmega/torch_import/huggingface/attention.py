"""What decoders of transformers are given while they are captured: caches, masks and an attention
function that speak of rows of tokens at positions.

In: a Rows, entered by `capturing`. Out: the classes' own forward calls these through transformers'
registries of attention and mask functions and through its Cache; where a mask is proved to be
causal, with a window or without, attention becomes the operator `attend_rows`, otherwise attention
under that mask. Used by decoders.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distmega.errors import CaptureError
from distmega.torch_import.exported import EXPORTING
from distmega.torch_import.operators import custom_ops

MAX_PROVED = 32768
"""Positions up to which a mask is compared with a causal one, every pair of them."""
_PROVED_ROWS = 1024


@dataclass(slots=True)
class StepRows:
    """The rows of a step, and what it has found so far.

    positions [m]; max_context of the caches; sequences [m] and starts [s + 1] of a prompt's rows.
    own: each row has a cache of its own. flat: the model sees one sequence of m tokens, otherwise
    m sequences of one. causal: masks proved causal and their windows; open: masks by which tokens
    see all rows, which are made and maybe not used; caches: what a model was given as keys or
    values and the cache that this is. num_updates, num_attended: keys and values appended, and
    attention calls over caches.
    """

    positions: Tensor
    max_context: int
    sequences: Tensor | None = None
    starts: Tensor | None = None
    own: bool = False
    flat: bool = True
    causal: list[tuple[Tensor, int]] = field(default_factory=list)
    open: list[Tensor] = field(default_factory=list)
    caches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_updates: int = 0
    num_attended: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Batch and tokens as the model sees them."""
        num_rows = self.positions.shape[0]
        return (1, num_rows) if self.flat else (num_rows, 1)


_current: ContextVar[StepRows] = ContextVar("rows")


class NumCached(int):
    """How many positions a cache holds, as far as a class is told."""


ADDITIONS = frozenset(
    {torch.add, torch.sub, Tensor.add, Tensor.sub, Tensor.add_, Tensor.sub_, Tensor.__add__,
     Tensor.__radd__, Tensor.__iadd__, Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__}
)  # fmt: skip


class RowsLayer(CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of a layer: `store` appends them, and gives the cache."""

    is_sliding = False
    is_compileable = True

    def __init__(self, rows: StepRows, store: Callable[[int, Tensor], Tensor], layer: int) -> None:
        super().__init__()
        self._rows, self._store, self._layer = rows, store, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the caches are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [b, h, s, d] go into the caches; all of them come back, [b, h, t, d]."""
        self._rows.num_updates += 1
        return self._kept(0, key_states), self._kept(1, value_states)

    def _kept(self, which: int, states: Tensor) -> Tensor:
        rows = self._rows
        by_row = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
        cache = self._store(2 * self._layer + which, by_row)
        if cache.dim() == 3:
            seen = cache.unsqueeze(0)
            if not rows.flat:
                seen = seen.expand(by_row.shape[0], -1, -1, -1)
        elif rows.flat:
            seen = cache[:1]
        else:
            seen = cache if rows.sequences is None else cache.index_select(0, rows.sequences)
        rows.caches.append((seen, cache))
        return seen

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Every position of the cache is looked at."""
        return self._rows.max_context, 0

    def get_seq_length(self, *args: Any) -> int:
        """As if the rows were the last of the cache; positions are given apart from this."""
        return NumCached(self._rows.max_context - self._rows.shape[1])

    def get_max_length(self) -> int:
        return self._rows.max_context

    def get_max_cache_shape(self) -> int:
        """As older releases call get_max_length."""
        return self._rows.max_context


_Recurrent: type = getattr(cache_utils, "LinearAttentionCacheLayerMixin", object)
"""What layers of transformers' caches are that keep more than keys and values; older releases have
none."""

CONV, RECURRENT = "conv", "recurrent"
"""What such layers keep: the last inputs of a convolution, and a state that each token changes."""


class StatesLayer(RowsLayer, _Recurrent):  # type: ignore[misc]
    """A layer that may keep states [b, ...] besides or in place of keys and values, as they were
    before the step, and then as it leaves them.
    """

    record_past = False

    def __init__(
        self,
        rows: StepRows,
        store: Callable[[int, Tensor], Tensor],
        layer: int,
        before: Mapping[tuple[str, int], Tensor] | None,
    ) -> None:
        """before: by what they are and their number in the layer; None where nothing is known, as
        if no token had come yet.
        """
        RowsLayer.__init__(self, rows, store, layer)
        known = {} if before is None else before
        first = {0: False} if before is None else {}
        self.has_previous_state = defaultdict(bool, {**first, **{n: True for _, n in known}})
        self.conv_states, self.recurrent_states = (
            {n: x for (what, n), x in known.items() if what == each} for each in (CONV, RECURRENT)
        )

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        """New inputs [b, c, s] go in; with those before them they come back."""
        before = self.conv_states.get(state_idx)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            missing = max(0, size - conv_states.shape[-1])
            found = torch.nn.functional.pad(conv_states, (missing, 0))
        else:
            found = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = found[..., -size:]
        return found

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """The state behind the rows goes in, and comes back."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    @property
    def states(self) -> dict[tuple[str, int], Tensor]:
        """As `before`, as they are now."""
        pairs = ((CONV, self.conv_states), (RECURRENT, self.recurrent_states))
        return {(what, n): x for what, each in pairs for n, x in sorted(each.items())}


Before = Mapping[int, Mapping[tuple[str, int], Tensor]]
"""States before a step, by layer."""


def rows_cache(
    rows: StepRows,
    num_layers: int,
    store: Callable[[int, Tensor], Tensor],
    before: Before | None = None,
) -> Cache:
    """A cache of transformers for a step. store: appends to cache 2 * layer (keys) or 2 * layer + 1
    (values), and gives it. before: states of layers that keep others; None before any token.
    """
    layers = [
        RowsLayer(rows, store, layer)
        if before is not None and layer not in before
        else StatesLayer(rows, store, layer, None if before is None else before[layer])
        for layer in range(num_layers)
    ]
    return Cache(layers=layers)


class _RowsOfTables(TorchFunctionMode):
    """Gives the rows' positions to a class that takes them from the length of its cache: as numbers
    t - s to t for s rows and caches of t, as numbers 0 to s to which t - s is added, or as these
    rows of a table that is t long at least. CaptureError for another sum with that length.
    """

    def __init__(self, rows: StepRows) -> None:
        super().__init__()
        self._rows = rows
        self._counted: list[Tensor] = []
        """Numbers 0 to s."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.arange and self._counts_rows(args):
            return self._positions(**(kwargs or {}))
        if func is torch.arange and args in ((num := self._rows.shape[1],), (0, num), (0, num, 1)):
            self._counted.append(func(*args, **(kwargs or {})))
            return self._counted[-1]
        if func in ADDITIONS and any(isinstance(each, NumCached) for each in args):
            return self._shifted(func, args)
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            table, indices = args
            dim = self._cut_dim(table, indices)
            if dim is not None:
                return self._looked_up(table, indices, dim)
        return func(*args, **(kwargs or {}))

    def _counts_rows(self, bounds: tuple[Any, ...]) -> bool:
        stop = self._rows.max_context
        first = stop - self._rows.shape[1]
        return first > 0 and bounds in ((first, stop), (first, stop, 1))

    def _shifted(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor:
        """The sum of the rows' numbers and the length of the cache."""
        subtracts = "sub" in getattr(func, "__name__", "")
        (x,) = (each for each in args if not isinstance(each, NumCached))
        if subtracts or not any(x is each for each in self._counted):
            raise CaptureError(
                "a tensor to which the number of cached positions is added",
                expected="positions as position_ids, or counted from that number on",
                remedy="use a class of transformers that takes position_ids",
            )
        return self._positions(dtype=x.dtype)

    def _positions(self, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if not self._rows.flat:
            raise CaptureError(
                "positions of a step that are counted from a cache's length",
                expected="a class that takes position_ids, for the sequences of a batch",
                remedy="use a batch of 1",
            )
        return self._rows.positions.to(dtype or torch.long)

    def _cut_dim(self, table: Tensor, indices: tuple[Any, ...]) -> int | None:
        """The dim that is cut so, if there is one."""
        stop = self._rows.max_context
        cut = slice(stop - self._rows.shape[1], stop)
        plain = all(isinstance(index, slice) for index in indices)
        if not plain or cut.start <= 0 or indices.count(cut) != 1:
            return None
        dim = indices.index(cut)
        return dim if table.shape[dim] >= stop else None

    def _looked_up(self, table: Tensor, indices: tuple[Any, ...], dim: int) -> Tensor:
        others = tuple(slice(None) if n == dim else index for n, index in enumerate(indices))
        found = table[others].index_select(dim, self._rows.positions)
        if self._rows.flat:
            return found
        if not dim or found.shape[0] != 1:
            raise CaptureError(
                f"a table of shape {tuple(table.shape)} cut along dim {dim} by a cache's length",
                expected="a first dim of 1 before it, for the sequences of a batch",
                remedy="use a batch of 1",
            )
        return found.transpose(0, dim)


@contextmanager
def capturing(rows: StepRows) -> Iterator[None]:
    """Around a forward: attention and masks are those of the rows, in this thread alone."""
    attention, masks = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    replaced = (
        (attention, "sdpa", attend),
        (masks, "sdpa", seen_rows),
        (masks, "eager", added_rows),
    )
    with EXPORTING:  # two that overlap would put each other's functions back
        token = _current.set(rows)
        before = [(each, each._local_mapping.get(name), name) for each, name, _ in replaced]
        for registry, name, function in replaced:
            registry[name] = _while_capturing(function, registry[name])
        try:
            with _RowsOfTables(rows):
                yield
        finally:
            _current.reset(token)
            for registry, function, name in before:
                if function is None:
                    registry._local_mapping.pop(name, None)
                else:
                    registry[name] = function


def _while_capturing(own: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`own` in the thread that captures, `plain` in others, which may run models meanwhile."""

    def chosen(*args: Any, **options: Any) -> Any:
        return (plain if _current.get(None) is None else own)(*args, **options)

    return chosen


def seen_rows(*, mask_function: Callable[..., Any], batch_size: int = 1, **other: Any) -> Tensor:
    """What each row may see of the cache, bool [b, 1, s, t]. mask_function: of batch, head, query
    and key indices.
    """
    rows = _current.get()
    device = rows.positions.device
    here = rows.positions.reshape(rows.shape)[:, None, :, None]
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    there = torch.arange(rows.max_context, device=device)[None, None, None, :]
    mask: Tensor = mask_function(zero, zero, here, there)
    mask = mask.expand(rows.shape[0], 1, rows.shape[1], rows.max_context)
    if _is_bidirectional(mask_function, rows.max_context):
        rows.open.append(mask)  # of an encoder that may not be there
        return mask
    window = proved_window(mask_function, rows.max_context)
    if window is None:
        return mask
    # one tensor for masks that are equal: layers that are given either do the same
    known = next((each for each, width in rows.causal if width == window), None)
    if known is not None:
        return known
    rows.causal.append((mask, window))
    return mask


def added_rows(*, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """As seen_rows, as what is added to scores."""
    rows, mask = _current.get(), seen_rows(**options)
    added = torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
    if any(mask is each for each in rows.open):
        rows.open.append(added)
    return added


def _is_bidirectional(mask_function: Callable[..., Any], num: int) -> bool:
    """Whether the first of `num` positions sees all of them; False where that depends on inputs."""
    with _disable_current_modes():
        zero = torch.zeros((), dtype=torch.long)
        try:
            return num > 1 and bool(mask_function(zero, zero, zero, torch.arange(num)).all())
        except (RuntimeError, TypeError, IndexError, AttributeError):
            return False


def proved_window(mask_function: Callable[..., Any], num: int) -> int | None:
    """The window of a mask that is causal for all pairs of `num` positions, 0 for none; None for
    another mask.
    """
    if num > MAX_PROVED:
        return None
    with _disable_current_modes():
        zero, there = torch.zeros((), dtype=torch.long), torch.arange(num)
        try:
            last = mask_function(zero, zero, torch.tensor(num - 1), there)
            width = int(last.sum())
            for start in range(0, num, _PROVED_ROWS):
                here = torch.arange(start, min(start + _PROVED_ROWS, num))[:, None]
                found = mask_function(zero, zero, here, there[None])
                if not torch.equal(found, (there <= here) & (there > here - width)):
                    return None
        except (RuntimeError, TypeError, IndexError, AttributeError):
            return None
    return 0 if width == num else width


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: q [b, h g, s, d], out [b, s, h g, e]."""
    rows = _current.get()
    if any(attention_mask is each for each in rows.open):
        raise CaptureError(
            "a mask by which tokens see those behind them",
            expected="attention of each token to itself and those before it",
            remedy="use a decoder; of an encoder, capture the module itself",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    cap = 0.0 if softcap is None else float(softcap)
    window, keys, values = (
        _find(pairs, given)
        for pairs, given in (
            (rows.causal, attention_mask), (rows.caches, key), (rows.caches, value)
        )
    )  # fmt: skip
    plain = position_bias is None and s_aux is None
    if plain and window is not None and keys is not None and values is not None:
        rows.num_attended += 1
        num_heads, num_kv = query.shape[1], keys.shape[-3]
        by_row = query.transpose(1, 2).reshape(-1, num_kv, num_heads // num_kv, query.shape[-1])
        options = rows.positions, rows.sequences, rows.starts, scale, window, cap
        out = custom_ops.attend_rows(by_row, keys, values, *options)
        return out.reshape(*rows.shape, num_heads, -1), None
    if s_aux is not None:
        return _with_sinks(query, key, value, attention_mask, scale, s_aux).transpose(1, 2), None
    if position_bias is not None:
        attention_mask = _biased(position_bias, attention_mask)
    out = custom_ops.attend(query, key, value, attention_mask, scale, cap)
    return out.transpose(1, 2), None


def _find(pairs: Sequence[tuple[Tensor, Any]], given: Tensor | None) -> Any:
    """What stands beside the very tensor that was given."""
    return next((found for tensor, found in pairs if tensor is given), None)


def _biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Attention with a score a head that takes weight and gives no value."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if mask is not None:
        added = mask.dtype != torch.bool
        scores = scores + mask if added else scores.masked_fill(~mask, torch.finfo().min)
    sink = sinks.reshape(1, -1, 1, 1).float().expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    return weights.to(value.dtype) @ value
