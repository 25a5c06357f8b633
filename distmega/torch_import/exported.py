"""From a torch module to a functional graph of its operators, by torch.export.

In: a module and example inputs. Out: an ExportedProgram whose in-place updates are results, whose
operators are torch's core ones and those that programs state whole. Next on the walk: repeats.py,
then conversion/converter.py.
"""

import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._export.utils as export_utils
import torch.export._trace as export_trace
from torch import Tensor, nn
from torch.export import ExportedProgram

from distmega.errors import CaptureError
from distmega.torch_import.attributes import kept_attributes, replaced_tensors
from distmega.torch_import.repeats import Layer, find_kinds, folded, unfold
from distmega.torch_import.replacements import (
    Attribute,
    WithAttributes,
    buffers,
    changed,
    plain_tensors,
    read_attributes,
)
from distmega.torch_import.source_lines import line_of_error

WHOLE = (
    "aten.linear.default",
    "aten.matmul.default",
    "aten.scaled_dot_product_attention.default",
    "aten.layer_norm.default",
    "aten.rms_norm.default",
    "aten.gelu.default",
    "aten.silu.default",
    "aten.softmax.int",
    "aten.hardtanh.default",
)
"""Operators that are kept as they are, since programs state them exactly."""

CHECKED = (
    "aten.linalg_cholesky.default",
    "aten.linalg_inv.default",
    "aten.linalg_ldl_factor.default",
    "aten.linalg_lu_factor.default",
    "aten.linalg_solve.default",
    "aten.linalg_tensorinv.default",
    "aten.one_hot.default",
)
"""Operators that are kept as they are, since they raise errors for values that have no result;
their parts would do so by effects beside the graph.
"""

UNKNOWN_TYPE = re.compile(r"(?:Found|Unsupported input type) <class '([^']*)'>")
"""How torch.export names a class that it can't take apart."""


class _Exporting:
    """Held by one thread at a time, any number of times. It is dynamo's own lock: a thread in which
    dynamo traces would see what torch.export patches too, and the other way round.
    """

    def __enter__(self) -> None:
        torch._dynamo.convert_frame.compile_lock.acquire()

    def __exit__(self, *error: object) -> None:
        torch._dynamo.convert_frame.compile_lock.release()


EXPORTING = _Exporting()
"""torch.export patches torch while it runs."""


def export_module(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layers: Sequence[Layer] = (),
) -> ExportedProgram:
    """The module on inputs like these. CaptureError with what torch.export says where it refuses.

    The module's parameters and buffers are not read, and its attributes are left as they were,
    whatever its forward puts in their place. layers: those of its modules of which many may
    do the same; such ones are traced once.
    """
    if not isinstance(module, nn.Module):
        raise CaptureError(
            f"a {type(module).__name__} in place of a module",
            expected="a torch.nn.Module",
            remedy="put the function into the forward of one",
        )
    try:
        with EXPORTING, _quietly(), kept_attributes(module), torch.no_grad():
            kinds = find_kinds(module, args, kwargs, layers) if layers else []
            with folded(module, kinds), replaced_tensors(module) as replaced:
                with kept_attributes(module):
                    functional, strict = _exported(module, args, kwargs)
                _require_unchanged(module, functional, replaced, args, kwargs, strict=strict)
            unfold(functional, kinds)
            return functional
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds, the module any other
        raise _refused(module, error) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warnings, and what torch.export writes to standard error and its log where it
    refuses a module: it may take the same one another way, and else an error says why.
    """
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    log.addFilter(_is_no_warning)
    try:
        with (
            warnings.catch_warnings(),
            patch.object(export_trace, "print", lambda *_, **__: None, create=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING


def _require_unchanged(
    module: nn.Module,
    exported: ExportedProgram,
    replaced: Collection[Attribute],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    strict: bool,
) -> None:
    """CaptureError for a tensor that forward reads and then puts another one in the place of: the
    program would have the first one in each call. Of a buffer torch.export follows that, but where
    dynamo traces (strict).

    replaced: those that are no buffers; what dynamo traces is not seen there.
    """
    plain = plain_tensors(module)
    held = {**plain, **buffers(module)} if strict else plain
    read = read_attributes(exported, held)
    if read.isdisjoint(held if strict else replaced):
        return
    with kept_attributes(module):
        shown = _traced(WithAttributes(module, [*held]), args, kwargs, strict=strict)
    lost = read & changed(shown, held)
    for key in held:
        if key in lost and key in plain:
            raise CaptureError(
                f"{type(module).__name__}: a tensor {'.'.join(filter(None, key))!r} that its"
                " forward reads and replaces",
                expected="a buffer in place of what changes from call to call",
                remedy=f"write register_buffer({key[1]!r}, ...)",
            )
        if key in lost:
            raise CaptureError(
                f"{type(module).__name__}: a buffer {'.'.join(filter(None, key))!r} that its"
                " forward replaces, and a number of Python that it takes from a tensor",
                expected="a buffer that changes in place where there are such numbers",
                remedy=f"write self.{key[1]}.copy_(...), or make the number a tensor",
            )


def _exported(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ExportedProgram, bool]:
    """As torch.export traces it, by dynamo where it asks for a value that isn't there: that keeps
    numbers of Python, as int(x.sum().item()), in the graph. And whether dynamo has traced it.
    """
    try:
        return _traced(module, args, kwargs, strict=False), False
    except Exception as error:  # of many classes, which torch keeps to itself
        if not asks_for_values(error):
            raise
        try:
            return _traced(module, args, kwargs, strict=True), True
        except Exception:  # as refused before
            raise error from None


def _traced(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, strict: bool
) -> ExportedProgram:
    """strict: by dynamo."""
    with patch.object(torch._dynamo, "reset", lambda: None) if strict else nullcontext():
        # or it forgets what torch.compile has made, which asks for this export in each call
        with _idle_dropout_aliases():
            found = torch.export.export(module, tuple(args), dict(kwargs), strict=strict)
        with _operators_listed():
            functional: ExportedProgram = found.run_decompositions(decompositions())
    return functional


@contextmanager
def _idle_dropout_aliases() -> Iterator[None]:
    """Dropout that drops nothing gives its input itself, as where no graph is made: torch.export
    takes it for a copy, and what forward then does to the result in place would miss the input.
    """
    drop: Callable[[Tensor, float, bool], Tensor] = torch.dropout

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        is_idle = 0 <= p <= 1 and (p == 0 or not train)
        return input if is_idle else drop(input, p, train)

    with patch.object(torch, "dropout", dropout), patch.object(torch._VF, "dropout", dropout):
        yield


def asks_for_values(error: Exception) -> bool:
    """Whether torch.export refused a module since it has shapes alone."""
    kind = type(error).__name__
    return "data-dependent" in str(error) or "DataDependent" in kind or "DynamicOutput" in kind


@contextmanager
def _operators_listed() -> Iterator[None]:
    """Torch asks its dispatcher for composite operators once, not twice for each of its namespaces,
    which is a third of the time that a small module takes. None is added in between. A torch that
    asks by another function asks as often as it does.
    """
    name = "_materialize_cpp_cia_ops"
    listing: Callable[[], None] | None = getattr(export_utils, name, None)
    if listing is None:
        yield
        return
    listing()
    setattr(export_utils, name, lambda: None)
    try:
        yield
    finally:
        setattr(export_utils, name, listing)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's own, but for the operators that are kept whole."""
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions())
    return {target: rule for target, rule in table.items() if str(target) not in WHOLE + CHECKED}


def _refused(module: nn.Module, error: Exception) -> CaptureError:
    reason = " ".join(str(error).split())[:400] or type(error).__name__
    name = f"{type(module).__name__}{line_of_error(error)}"
    if found := UNKNOWN_TYPE.search(reason):
        return CaptureError(
            f"{name}: an instance of {found[1]} among its arguments or results",
            expected="tensors, numbers, and tuples, lists and dicts of these",
            remedy="use one of these, or say what the class holds: "
            "torch.export.register_dataclass(...)",
        )
    if "data-dependent" in reason or "GuardOnDataDependent" in type(error).__name__:
        return CaptureError(
            f"{name}: its control flow or shapes depend on data ({reason})",
            expected="a module that does the same for all inputs of these shapes",
            remedy="use torch.where in place of if, or capture the parts around it",
        )
    if "be on the same device" in reason or "different devices" in reason:
        return CaptureError(
            f"{name}: tensors on several devices ({reason})",
            expected="weights and example inputs on one device",
            remedy="give example inputs where the weights are, on meta for a module there",
        )
    if isinstance(error, TypeError) and "argument" in reason:
        return CaptureError(
            f"{name}: the example inputs don't fit its forward ({reason})",
            expected="inputs that its forward takes",
            remedy="give the arguments in a tuple, named ones in kwargs",
        )
    return CaptureError(
        f"{name}: torch.export refused it ({type(error).__name__}: {reason})",
        expected="a module that torch.export(..., strict=False) takes, and inputs that it runs on",
        remedy="run torch.export.export on it alone to see all that it says",
    )
