"""Decoders of transformers as programs with the same inputs, outputs and caches as our own.

In: a configuration of transformers. Out: HfDecoder, whose `build` gives what models/decoder.py's
build_decoder gives for ours. The model's own class is exported, its caches are states, and tokens
are chosen from its logits as there. Weights keep the names of the model's parameters. Used by
source.py; next on the walk: attention.py.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import Cache

from distmega.errors import CaptureError, DistmegaError, RequestError
from distmega.hostir.library.torch_types import torch_dtype
from distmega.models.decoder import Logits, choose_tokens
from distmega.models.sampling import GREEDY, Method
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.torch_import.conversion import Graph, convert
from distmega.torch_import.exported import EXPORTING, asks_for_values, export_module
from distmega.torch_import.forms import Derived, Normal, normalise
from distmega.torch_import.huggingface.attention import (
    Before,
    StatesLayer,
    StepRows,
    capturing,
    rows_cache,
)
from distmega.torch_import.huggingface.masks import check_masks
from distmega.torch_import.huggingface.rotations import fix_frequencies, scaling_kinds
from distmega.torch_import.operators import custom_ops
from distmega.torch_import.repeats import without_values

_RANDOM = ("normal_", "uniform_", "trunc_normal_")
"""Methods of tensors that fill them."""


class _WithoutRandomness(TorchFunctionMode):
    """Leaves new parameters as memory gives them: nobody reads them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if getattr(func, "__module__", "") == "torch.nn.init" or name in _RANDOM:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_filling() -> Iterator[None]:
    """torch.nn.init leaves parameters of this thread too; its loop for a truncated normal would go
    on until it finds values that are in bounds.
    """
    here = get_ident()

    def unless_here(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(x: Tensor, *args: Any, **options: Any) -> Tensor:
            return x if get_ident() == here else fill(x, *args, **options)

        return filled

    with EXPORTING, ExitStack() as stack:  # two that overlap would leave torch without filling
        for name in _RANDOM:
            inner = f"_no_grad_{name}"
            if hasattr(nn.init, inner):
                fill = unless_here(getattr(nn.init, inner))
                stack.enter_context(patch.object(nn.init, inner, fill))
        yield


def make_model(config: PretrainedConfig, dtype: str, attention: str) -> nn.Module:
    """The model of a configuration, its parameters without values, its buffers with theirs; on the
    CPU, where torch gives parameters no memory before they are filled.

    attention: "sdpa" or "eager", as transformers names implementations.
    """
    config = copy.deepcopy(config)
    with torch.device("cpu"), _WithoutRandomness(), _without_filling():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch_dtype(dtype), attn_implementation="eager"
        )
    for each in (model.config, model.config.get_text_config(decoder=True)):
        each._attn_implementation = attention
        each._experts_implementation = "batched_mm"  # whatever tokens choose, of one shape
    bare: nn.Module = model.eval().requires_grad_(False)
    fix_frequencies(bare, 1)
    return bare


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Heads and dim of one of the caches, and its number: twice the layer's for keys, one more for
    values.
    """

    number: int
    num_heads: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """A state of a sequence that each of its tokens changes: what of which layer it is (see
    attention.StatesLayer), its shape and type.
    """

    layer: int
    what: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def buffer(self) -> str:
        """Its name among its layer's."""
        return f"{self.what}_{self.number}_state"

    @property
    def name(self) -> str:
        """Of the state in programs."""
        return f"layers.{self.layer}.{self.buffer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """What a class keeps of the tokens that it has seen."""

    shapes: tuple[CacheShape, ...]
    states: tuple[StateShape, ...]


@dataclass(slots=True, eq=False)
class HfDecoder:
    """A model of transformers that programs are built of.

    shapes: of its caches, keys and values of each layer in turn. states: what else layers keep, so
    that tokens come one by one. covered: whether all of its
    attention goes through transformers' registry, so that rows may be of any sequences. attention:
    the implementation that its class is asked for. group: query heads per kv head.
    """

    config: PretrainedConfig
    vocab: int
    max_positions: int
    num_layers: int
    shapes: tuple[CacheShape, ...]
    states: tuple[StateShape, ...]
    covered: bool
    attention: str
    group: int
    dtype: str = "f32"
    eos_ids: tuple[int, ...] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    derived: dict[str, Derived] = field(default_factory=dict)
    opaque: dict[str, int] = field(default_factory=dict)
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _states: dict[str, tuple[StateShape, ...]] = field(default_factory=dict)

    @property
    def num_kv_heads(self) -> int:
        """Of the cache that has the fewest; without caches any number of ranks has enough."""
        return min((shape.num_heads for shape in self.shapes), default=_MOST_HEADS)

    @property
    def recurrent_states(self) -> tuple[str, ...]:
        """Names of its states besides caches."""
        return tuple(state.name for state in self.states)

    def states_of(self, dtype: str) -> tuple[StateShape, ...]:
        """Its states in programs of an element type."""
        if not self.states or dtype == "f32":
            return self.states
        if dtype not in self._states:
            self._states[dtype] = _look(self.model(dtype), self.num_layers)[0].states
        return self._states[dtype]

    def model(self, dtype: str) -> nn.Module:
        """The model in an element type."""
        if dtype not in self._models:
            self._models[dtype] = make_model(self.config, dtype, self.attention)
        return self._models[dtype]

    def build(
        self,
        num_tokens: int,
        max_context: int,
        *,
        batch: int = 1,
        logits: Logits = "none",
        dtype: str = "f32",
        method: Method = GREEDY,
        prompt: bool = False,
        peaks: bool = False,
    ) -> Program:
        """As build_decoder. RequestError where the context does not fit the model."""
        most = max_context * batch if prompt else max_context
        if not 1 <= num_tokens <= most or max_context > self.max_positions:
            raise RequestError(
                f"{num_tokens} tokens in a context of {max_context}",
                expected=f"1 <= tokens <= context <= {self.max_positions}, as the model allows",
                remedy="choose a shorter prompt or context",
            )
        num_rows = num_tokens if prompt else num_tokens * batch
        name = f"decoder_{num_tokens}" + (f"x{batch}" if batch > 1 else "")

        def choose(
            p: ProgramBuilder, given: Mapping[str, Handle], out: Sequence[Handle]
        ) -> list[Handle]:
            scores, last, at = out[0], out[0], None
            if prompt and logits == "all":
                last = p.embedding(given["last"], scores, name="last_logits")
            elif not prompt:
                at = _last_rows(p, given["positions"], batch, "last_position")
                last = _last_rows(p, scores, batch, "last_logits")
            chosen = choose_tokens(p, last, method, at)
            found = [chosen] if logits == "none" else [p.set(scores, name="logits"), chosen]
            return [*found, p.value_of(chosen)] if peaks else found

        with torch.device("cpu"):
            step = _DecodeStep(self, max_context, batch, dtype, prompt, logits)
            layers = [] if self.states else _layers(step, self.num_layers)
            with EXPORTING:
                fix_frequencies(step.model, max_context)
                exported = export_module(step, (), _inputs(num_rows, batch, prompt=prompt), layers)
            graph = convert(exported, name, choose)
            check_masks(graph.program, graph.constants, max_context)
            # rows one by one look unlike those of a step, which reads the same weights and caches
            normal = normalise(
                graph.program, dict(graph.constants), "positions", max_context,
                keep_weights=bool(self.states),
            )  # fmt: skip
        self._note(graph, normal)
        return normal.program

    def _note(self, graph: Graph, normal: Normal) -> None:
        self.constants |= normal.constants
        self.derived |= normal.derived
        self.opaque |= graph.opaque
        prefix = "model."
        self.targets |= {
            name: target.removeprefix(prefix)
            for name, target in graph.targets.items()
            if target.startswith(prefix)
        }


def _inputs(num_rows: int, batch: int, *, prompt: bool) -> dict[str, Tensor]:
    """Those of a step, and of packed prompts."""
    sizes = {"tokens": num_rows, "positions": num_rows}
    if prompt:
        sizes |= {"sequences": num_rows, "starts": batch + 1, "last": batch}
    return {name: torch.zeros(size, dtype=torch.long) for name, size in sizes.items()}


def open_decoder(config: PretrainedConfig, *, eos_ids: tuple[int, ...] = ()) -> HfDecoder:
    """The decoder of a configuration, after a look at what its class does with a cache.

    CaptureError for a class that keeps neither keys and values nor states in a cache.
    """
    text = config.get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CaptureError(
            f"{config.model_type}, of which transformers has no decoder",
            expected="a model that AutoModelForCausalLM makes",
            remedy="capture another kind of module itself: distmega.capture(module, inputs)",
        )
    if text.num_hidden_layers < 1:
        raise CaptureError(
            f"{config.model_type} of {text.num_hidden_layers} layers",
            expected="a layer at least",
            remedy="correct the configuration",
        )
    model: nn.Module | None = None
    for attention in ("sdpa", "eager"):
        try:
            model = make_model(config, "f32", attention)
            kept, covered = _look(model, text.num_hidden_layers)
        except (DistmegaError, MemoryError):
            raise
        except Exception as error:  # the class may raise anything
            raise _failed(config, model, error) from error
        if covered or (attention == "sdpa" and getattr(model, "_supports_sdpa", False)):
            break
    assert model is not None, "one attention or the other made it"
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    return HfDecoder(
        config=config,
        vocab=text.vocab_size,
        max_positions=int(limit or _MOST_POSITIONS) - first_position(model),
        num_layers=text.num_hidden_layers,
        shapes=kept.shapes,
        states=kept.states,
        covered=covered and not kept.states,
        attention=attention,
        group=_group(text, kept.shapes),
        eos_ids=eos_ids,
        _models={"f32": model},
    )


def _group(config: PretrainedConfig, shapes: Sequence[CacheShape]) -> int:
    """Query heads per kv head."""
    if not shapes:
        return 1
    num_heads: int = config.num_attention_heads
    return max(1, num_heads // min(shape.num_heads for shape in shapes))


def _failed(config: PretrainedConfig, model: nn.Module | None, error: Exception) -> CaptureError:
    """What to say of a class that fails with a cache of keys, values and states."""
    kinds = scaling_kinds(model) if model is not None and asks_for_values(error) else ()
    if kinds:
        return CaptureError(
            f"rope scaling {', '.join(kinds)} of {config.model_type}, whose class asks for the "
            "positions of each call",
            expected="frequencies that follow from the configuration and the context",
            remedy="use a model of another class, or run this one by transformers",
        )
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if model is not None and _runs_alone(model):
        return CaptureError(
            f"{config.model_type}: its layers keep more than keys and values ({reason})",
            expected="a decoder whose layers keep keys, values and recurrent states",
            remedy="use a model without a cache of its own and without indexed layers",
        )
    return CaptureError(
        f"{config.model_type}: its class fails on one token ({reason})",
        expected="a configuration by which transformers makes a decoder that runs",
        remedy="run AutoModelForCausalLM.from_config(config) on a token to see all of it",
    )


def _runs_alone(model: nn.Module) -> bool:
    """Whether a class takes a token with whatever it makes to keep."""
    with without_values(model):
        try:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True)
        except Exception:  # the class may raise anything
            return False
    return True


def _layers(step: nn.Module, num_layers: int) -> list[tuple[str, str]]:
    """The model's layers with what holds their caches, where there is one list of them."""
    lists = [
        name
        for name, inner in step.named_modules()
        if isinstance(inner, nn.ModuleList) and len(inner) == num_layers and name != "layers"
    ]
    several = len(lists) != 1
    return [] if several else [(f"{lists[0]}.{n}", f"layers.{n}") for n in range(num_layers)]


def _last_rows(p: ProgramBuilder, x: Handle, num: int, name: str) -> Handle:
    rows = x.shape[0]
    return x if rows == num else p.slice(x, 0, rows - num, rows, name=name)


_MOST_HEADS = 1 << 10
_MOST_POSITIONS = 1 << 20
"""Of models that don't say how many positions they take, since they learn nothing about them."""


def _look(model: nn.Module, num_layers: int) -> tuple[KeptStates, bool]:
    """Runs one token through the model without computing anything: what it keeps, and whether all
    of its attention is over caches by way of transformers' registry.
    """
    found: dict[int, CacheShape] = {}

    def store(number: int, x: Tensor) -> Tensor:
        found[number] = CacheShape(number=number, num_heads=x.shape[1], dim=x.shape[2])
        return x.new_zeros(x.shape[1], 4, x.shape[2])

    with torch.device("cpu"), without_values(model):
        rows = StepRows(positions=torch.zeros(1, dtype=torch.long), max_context=4)
        cache = rows_cache(rows, num_layers, store)
        with capturing(rows):
            _forward(model, torch.zeros(1, 1, dtype=torch.long), rows, cache, None)
    states = tuple(
        StateShape(layer=layer, what=what, number=n, shape=tuple(x.shape[1:]), dtype=x.dtype)
        for layer, mine in enumerate(cache.layers)
        for (what, n), x in mine.states.items()
    )
    keeping = {number // 2 for number in found} | {state.layer for state in states}
    if len(keeping) != num_layers:
        raise CaptureError(
            f"{type(model).__name__}: {len(keeping)} of {num_layers} layers have caches",
            expected="a decoder whose layers all do",
            remedy="use a model whose layers keep what they saw in transformers' Cache",
        )
    shapes = tuple(found[number] for number in sorted(found))
    covered = rows.num_attended == rows.num_updates == len(shapes) // 2
    return KeptStates(shapes=shapes, states=states), covered


def _forward(
    model: nn.Module,
    ids: Tensor,
    rows: StepRows,
    cache: Cache,
    last: Tensor | None,
) -> Tensor:
    """Logits [b, s, v] of the model; of rows `last` alone where it can tell."""
    takes = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if "position_ids" in takes:
        first = first_position(model)
        positions = rows.positions + first if first else rows.positions
        options["position_ids"] = positions.reshape(rows.shape)
    if "cache_position" in takes:  # older releases make masks from it
        options["cache_position"] = rows.positions
    if last is not None and "logits_to_keep" in takes and rows.flat:
        options["logits_to_keep"] = last
    options["past_key_values" if "past_key_values" in takes else "cache_params"] = cache
    logits: Tensor = model(input_ids=ids, use_cache=True, **options).logits
    return logits


def first_position(model: nn.Module) -> int:
    """The number that a class gives its first token: a table of positions with a row for padding
    counts from behind that.
    """
    tokens = model.get_input_embeddings()  # type: ignore[operator]
    extent = getattr(model.config, "max_position_embeddings", None)
    tables = (each for each in model.modules() if isinstance(each, nn.Embedding))
    padded = [
        table.padding_idx + 1
        for table in tables
        if table is not tokens and table.padding_idx is not None and table.num_embeddings == extent
    ]
    return padded[0] if padded else 0


class _DecodeStep(nn.Module):
    """One step: tokens [m] at positions [m] in; logits of all rows or of the last ones out."""

    def __init__(
        self,
        decoder: HfDecoder,
        max_context: int,
        batch: int,
        dtype: str,
        prompt: bool,
        logits: Logits,
    ) -> None:
        super().__init__()
        self.model = decoder.model(dtype)
        self._decoder, self._context, self._batch = decoder, max_context, batch
        self._prompt, self._logits = prompt, logits
        self.layers = nn.ModuleList(nn.Module() for _ in range(decoder.num_layers))
        front = (batch,) if batch > 1 else ()
        self._states = decoder.states_of(dtype)
        # empty: only shapes count, and nobody touches the memory
        for shape in decoder.shapes:
            whole = (*front, shape.num_heads, max_context, shape.dim)
            cache = torch.empty(whole, dtype=torch_dtype(dtype))
            self.layers[shape.number // 2].register_buffer(_cache_buffer(shape.number), cache)
        for state in self._states:
            kept = torch.empty((*front, *state.shape), dtype=state.dtype)
            self.layers[state.layer].register_buffer(state.buffer, kept)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        sequences: Tensor | None = None,
        starts: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        num_rows = tokens.shape[0]
        chooses = self._logits != "all" and last is not None and (num_rows, *last.shape) != (1, 1)
        wanted = last if chooses else None
        if self._states:
            logits = self._in_order(tokens, positions, sequences)
        else:  # as many rows as are wanted would not show whether the class has chosen them
            asked = wanted if wanted is not None and wanted.shape[0] != num_rows else None
            logits = self._run(tokens, positions, sequences, starts, asked)
        if wanted is not None and logits.shape[0] == num_rows:
            kept: Tensor = logits.index_select(0, wanted)
            return kept
        some = self._logits != "all" and not self._prompt
        rows_given: Tensor = logits[-self._batch :] if some else logits
        return rows_given

    def _in_order(self, tokens: Tensor, positions: Tensor, sequences: Tensor | None) -> Tensor:
        """Logits of all rows: those of a decode step of all sequences together, others one by one,
        for each changes the states that the next one of its sequence finds.
        """
        if not self._prompt and tokens.shape[0] == self._batch:
            return self._run(tokens, positions, None, None, None)
        if not self._prompt and self._batch > 1:
            raise CaptureError(
                f"{tokens.shape[0] // self._batch} tokens a sequence in a step of several",
                expected="one token a sequence, of a decoder whose layers keep states",
                remedy="give the tokens of each sequence one by one",
            )
        found = []
        for row in range(tokens.shape[0]):
            token, position = tokens[row : row + 1], positions[row : row + 1]
            sequence, starts = None, None
            if sequences is not None:
                sequence = sequences[row : row + 1]
                starts = (torch.arange(self._batch + 1) > sequence).long()
            found.append(self._run(token, position, sequence, starts, None))
        return torch.cat(found)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        sequences: Tensor | None,
        starts: Tensor | None,
        last: Tensor | None,
    ) -> Tensor:
        """Logits of rows that the model sees together."""
        several = self._batch > 1
        rows = StepRows(
            positions=positions,
            max_context=self._context,
            sequences=sequences if several or self._decoder.covered else None,
            starts=starts,
            own=several and not self._prompt,
            flat=self._decoder.covered or not several,
        )

        def store(number: int, x: Tensor) -> Tensor:
            buffer: Tensor = self.get_buffer(cache_name(number))
            new: Tensor = custom_ops.append_rows(
                buffer, x, positions, sequences if several else None
            )
            buffer.copy_(new)
            return new

        of = rows.sequences
        cache = rows_cache(rows, self._decoder.num_layers, store, self._before(positions, of))
        with capturing(rows):
            logits = _forward(self.model, tokens.reshape(rows.shape), rows, cache, last)
        for number, layer in enumerate(cache.layers):
            if isinstance(layer, StatesLayer):
                self._leave(number, layer, of)
        return logits.reshape(-1, logits.shape[-1])

    def _before(self, positions: Tensor, sequences: Tensor | None) -> Before:
        """The states of each row's sequence; those of one that begins are zero."""
        found: dict[int, dict[tuple[str, int], Tensor]] = {}
        for state in self._states:
            held = self._held(state)
            mine = held if sequences is None else held.index_select(0, sequences)
            begins = (positions == 0).reshape(-1, *[1] * len(state.shape))
            one = torch.where(begins, torch.zeros((), dtype=mine.dtype), mine)
            found.setdefault(state.layer, {})[state.what, state.number] = one
        return found

    def _leave(self, number: int, layer: StatesLayer, sequences: Tensor | None) -> None:
        """Keeps a layer's states for the tokens behind these."""
        states = layer.states
        for state in self._states:
            if state.layer != number:
                continue
            held, new = self._held(state), states[state.what, state.number].to(state.dtype)
            if sequences is not None:
                slots = torch.arange(self._batch).reshape(-1, *[1] * len(state.shape))
                new = torch.where(slots == sequences, new, held)
            held.copy_(new)

    def _held(self, state: StateShape) -> Tensor:
        """A state of all sequences, [b, ...]."""
        held = self.get_buffer(state.name)
        return held if self._batch > 1 else held.unsqueeze(0)


def cache_name(number: int) -> str:
    """The state of a layer's keys or values."""
    return f"layers.{number // 2}.{_cache_buffer(number)}"


def _cache_buffer(number: int) -> str:
    return "kv"[number % 2] + "_cache"
