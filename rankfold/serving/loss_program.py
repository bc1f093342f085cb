"""Computes losses that clients trace, datum by datum, and differentiates them.

    loss = sum over data of f(log-probabilities, inputs),   f the graph of `loss_graph.py`

Before a pass, a graph is checked: once without numbers, which tells shapes and sizes, and once with inputs of a datum
of each shape, or of every datum where an operation may fail for some numbers. Whether an operation fails does not
depend on log-probabilities: what is selected by them, or indexed with numbers made of them, is refused. So a checked
loss does not fail in the middle of a pass, where rows of others are; if torch refuses one all the same, the loss of
that datum is NaN, without a gradient.

Gradients are computed at once for each datum, so that what a graph keeps is that of one datum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from engine.errors import UserError
from rankfold.serving.loss_graph import (
    COMMON,
    METHODS,
    OF_FUNCTIONAL,
    OF_LIBRARY,
    OF_TORCH,
    OPERATORS,
    LossGraph,
    Node,
    references,
)  # fmt: skip

TENSOR_ELEMENTS = 1 << 24
"""Of one result, at most."""
DATUM_ELEMENTS = 1 << 26
"""Of all results of a datum together, and products of matrices, at most."""
REQUEST_ELEMENTS, REQUEST_OPERATIONS = 1 << 28, 1 << 18
_MAX_PIECES = 64
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in OPERATORS},
    **{f"torch.{name}": getattr(torch, name) for name in (*COMMON, *OF_TORCH)},
    **{f"torch.nn.functional.{name}": getattr(functional, name) for name in OF_FUNCTIONAL},
    **{target: getattr(functional, name) for target, name in OF_LIBRARY.items()},
    "getattr": getattr,
}
_METHODS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(Tensor, name) for name in (*COMMON, *METHODS)},
    "cpu": lambda tensor: tensor,  # it is computed where the log-probabilities are
}
_OF_TORCH = (
    RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, MemoryError,
)  # fmt: skip
"""What torch raises for operands that do not fit."""
_QUERIES = ("size", "dim", "numel")
_ORDERS = ("argsort", "argmax", "argmin", "sort", "topk", "max", "min", "median", "kthvalue", "cummax")
"""Operations whose results are, or have, places in a dimension."""
_INDEXED = {"getitem": 1, "gather": 2, "index_select": 2, "take_along_dim": 1}
"""Operation -> argument that has places."""
_PRODUCTS = ("matmul", "mm", "mv", "outer", "dot")
_ROUNDED_DIVISIONS = ("floor_divide", "floordiv", "mod", "fmod", "remainder")
_MAKERS = ("torch.arange", "torch.full", "torch.ones", "torch.zeros")
"""Functions that make tensors of numbers alone, on the device of log-probabilities."""
_VALUES_MATTER = frozenset({*_INDEXED, *_ROUNDED_DIVISIONS, "div", "masked_select", "one_hot"})
"""Operations that fail for some numbers of good shapes, or whose shapes depend on numbers."""


class _Refusal(Exception):
    """Why a loss is not computed, in a few words."""


class LossProgram:
    """A graph that can be computed.

    Args:
        graph: of the loss.
    """

    def __init__(self, graph: LossGraph) -> None:
        self.graph = graph
        self.metrics = tuple(graph.metrics)
        self._places: dict[str, str] = {}
        """Nodes whose results are, or have, places that depend on log-probabilities -> the operation that orders."""
        names = {node.target: node.name for node in graph.nodes if node.kind == "input"}
        tainted = {names["logprobs"]}
        for node in graph.nodes:
            self._mark(node, tainted)
        if graph.loss not in tainted:
            raise UserError("the loss does not depend on logprobs, so that there is nothing to train: use them.")

    def _mark(self, node: Node, tainted: set[str]) -> None:
        """Notes what depends on log-probabilities, and refuses what could fail for some of them."""
        operation = node.target.rpartition(".")[2]
        read = [name for value in (*node.args, *node.kwargs.values()) for name in references(value)]
        if node.kind == "input" or not tainted.intersection(read) or operation in _QUERIES:
            return
        if operation == "getattr" and node.args[1] in ("shape", "dtype", "device", "ndim"):
            return
        tainted.add(node.name)
        if operation in _ORDERS:
            self._places[node.name] = node.name
        elif operation in ("getitem", "getattr") and read[0] in self._places:
            self._places[node.name] = self._places[read[0]]
        place = _INDEXED.get(operation)
        chosen = node.args[place:] if place is not None else ()
        chosen = (*chosen, *(node.kwargs[key] for key in ("index", "indices", "mask", "input") if key in node.kwargs))
        if place is not None:
            places = {name for value in chosen for name in references(value)} & tainted
            if places - self._places.keys():
                raise UserError(_by_logprobs(node, "indexes with numbers that depend on logprobs"))
        if operation in ("masked_select", "one_hot"):
            masks = node.args[1:] if operation == "masked_select" else node.args
            if tainted.intersection(name for value in (*masks, *chosen) for name in references(value)):
                raise UserError(_by_logprobs(node, "selects by numbers that depend on logprobs"))

    @cached_property
    def values_matter(self) -> bool:
        """Whether an operation may fail for some numbers, or has results whose shapes depend on numbers."""
        for node in self.graph.nodes:
            operation = node.target.rpartition(".")[2]
            fixed = operation == "getitem" and not any(True for one in node.args[1:] for _ in references(one))
            if operation in _VALUES_MATTER and not fixed:
                return True
        return False

    def run(self, logps: Tensor, inputs: Sequence[Tensor], counter: _Counter | None = None) -> Computed:
        """Computes the loss of a datum.

        Args:
            logps: [T] or [T, K].
            inputs: of the graph behind them, in its order.
            counter: where tensors have shapes alone, what counts their elements.
        """
        values: dict[str, Any] = {}
        given = dict(zip(self.graph.inputs, (logps, *inputs), strict=True))
        for node in self.graph.nodes:
            if node.kind == "input":
                values[node.name] = given[node.target]
                continue
            args = [_decoded(value, values, logps.device) for value in node.args]
            kwargs = {name: _decoded(value, values, logps.device) for name, value in node.kwargs.items()}
            _check_call(node, args, kwargs)
            if node.target in _MAKERS:
                kwargs.setdefault("device", logps.device)
            found = _selected(node, args, kwargs) if counter is not None else None
            if found is None:
                found = (_FUNCTIONS if node.kind == "function" else _METHODS)[node.target](*args, **kwargs)
            values[node.name] = found
            if counter is not None:
                counter.count(node, found)
                if node.target.rpartition(".")[2] in _PRODUCTS:
                    counter.add(node, found.numel() * args[0].shape[-1])
                self._check_places(node, args, kwargs, counter.places)
        loss = values[self.graph.loss]
        named = {name: values[node] for name, node in self.graph.metrics.items()}
        for name, value in {"the loss": loss, **named}.items():
            if not isinstance(value, Tensor) or value.numel() != 1 or (name == "the loss" and value.ndim):
                raise _Refusal(f"{name} is no tensor of one number: sum it, or take the mean")
        return Computed(loss, named)

    def check(self, number: int, logps: Tensor, inputs: Sequence[Tensor]) -> int:
        """Checks that the loss of a datum can be computed and differentiated, whatever its log-probabilities are.

        Args:
            number: of the datum.
            logps: fp32, of their shape.
            inputs: as for `run`.

        Returns:
            The elements of all results.

        Raises:
            UserError: it cannot.
        """
        counter = _Counter({})
        try:
            self._differentiate(logps.to("meta"), [one.to("meta") for one in inputs], counter)
            self._differentiate(logps, inputs, None)  # shapes alone do not tell which numbers an operation takes
        except _Refusal as refusal:
            raise UserError(f"the loss cannot be computed for datum {number}: {refusal}.") from None
        except _OF_TORCH as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"the loss cannot be computed for datum {number}: {reason}.") from None
        return counter.total

    def _check_places(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], bounds: dict[str, int]) -> None:
        """Checks that places which depend on log-probabilities lie in what is indexed with them.

        Args:
            bounds: number of places among which each operation orders, which this adds to.
        """
        operation = node.target.rpartition(".")[2]
        if operation in _ORDERS and isinstance(args[0], Tensor):
            at = 2 if operation in ("topk", "kthvalue") else 1
            dim = kwargs.get("dim", args[at] if len(args) > at else None if operation in ("argmax", "argmin") else -1)
            source = args[0]
            bounds[node.name] = source.numel() if not isinstance(dim, int) or not source.ndim else source.shape[dim]
        if operation not in _INDEXED:
            return
        others = (*node.args[1:], *node.kwargs.values())
        read = [self._places[one] for value in others for one in references(value) if one in self._places]
        if not read:
            return
        indexed, dim = args[0], 0
        if operation in ("gather", "index_select"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        elif operation == "take_along_dim":
            dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        elif isinstance(args[1], tuple):
            if not all(isinstance(one, Tensor | int | slice) for one in args[1]) or len(read) > 1:
                raise _Refusal(f"{node.target} has places that depend on logprobs beside others: index with one tensor")
            dim = next(number for number, one in enumerate(args[1]) if isinstance(one, Tensor))
        room = indexed.numel() if dim is None else indexed.shape[dim]
        if (most := max(bounds[one] for one in read)) > room:
            raise _Refusal(f"{node.target} has places of {most} numbers, but indexes {room}")

    def _differentiate(self, logps: Tensor, inputs: Sequence[Tensor], counter: _Counter | None) -> None:
        leaf = logps.detach().requires_grad_()
        with torch.enable_grad():
            found = self.run(leaf, inputs, counter)
            if not found.loss.requires_grad:
                raise _Refusal("it has no gradient for logprobs: compute it without detach and comparisons alone")
            torch.autograd.grad(found.loss, leaf, allow_unused=True)


@dataclass(frozen=True, slots=True)
class Computed:
    """The loss of a datum, and its metrics by name."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(slots=True)
class _Counter:
    """Counts elements of results that have shapes alone.

    Args:
        places: operation that orders -> number of places that it orders among.
        total: elements.
    """

    places: dict[str, int]
    total: int = 0

    def count(self, node: Node, found: Any) -> None:
        """Adds the elements of a result."""
        pieces = found if isinstance(found, tuple | list) and not isinstance(found, torch.Size) else (found,)
        if len(pieces) > _MAX_PIECES:
            raise _Refusal(f"{node.target} makes {len(pieces)} pieces, but at most {_MAX_PIECES} are taken")
        for one in pieces:
            if isinstance(one, Tensor):
                self.add(node, one.numel())

    def add(self, node: Node, elements: int) -> None:
        """Adds elements that an operation computes."""
        self.total += elements
        if elements > TENSOR_ELEMENTS or self.total > DATUM_ELEMENTS:
            raise _Refusal(
                f"{node.target} makes {elements} numbers, but at most {TENSOR_ELEMENTS} by one operation and "
                f"{DATUM_ELEMENTS} for a datum are computed"
            )


def _check_call(node: Node, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks what torch and Python would take, at a price: numbers and lists without bounds, large products; and what
    they compute otherwise than elsewhere."""
    operation, tensors = node.target.rpartition(".")[2], [one for one in args if isinstance(one, Tensor)]
    if node.kind == "method" and not (args and isinstance(args[0], Tensor)):
        raise _Refusal(f"{node.target} is called on something that is no tensor")
    if node.target == "getattr" and not isinstance(args[0], Tensor | tuple):
        raise _Refusal("an attribute is read of something that is no tensor")
    if node.target.startswith("operator.") and operation != "getitem" and not tensors:
        if not all(isinstance(one, int | float) and abs(one) < 1 << 53 for one in args):
            raise _Refusal(f"{node.target} takes tensors and numbers below 2**53")
        if operation == "pow" and abs(args[1]) > 64:
            raise _Refusal(f"{node.target} of numbers takes exponents up to 64")
    rounds = operation in _ROUNDED_DIVISIONS or kwargs.get("rounding_mode") is not None
    if rounds and len(args) > 1 and isinstance(args[1], Tensor) and not any(map(_is_float, args[:2])):
        raise _Refusal(f"{node.target} divides whole numbers by a tensor of whole numbers: make one of them float")


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _selected(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the most that a selection by a mask can be, where there are shapes alone; None for other operations."""
    operation = node.target.rpartition(".")[2]
    if operation == "masked_select":
        mask = kwargs["mask"] if "mask" in kwargs else args[1]
        return args[0].expand(torch.broadcast_shapes(args[0].shape, mask.shape)).flatten()
    if operation != "getitem" or not isinstance(args[0], Tensor):
        return None
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    index: list[Any] = []
    for one in parts:
        if isinstance(one, Tensor) and one.dtype == torch.bool:
            index += [torch.zeros(one.numel(), dtype=torch.int64, device=one.device)] * one.ndim
        else:
            is_place = isinstance(one, Tensor) and one.ndim == 0  # its number would be read
            index.append(0 if is_place else one)
    return args[0][tuple(index)]


def _decoded(value: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """Returns an argument."""
    if isinstance(value, list):
        return [_decoded(one, values, device) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, own),) = value.items()
    if kind == "ref":
        return values[own]
    if kind in ("tuple", "slice"):
        inner = [_decoded(one, values, device) for one in own]
        return tuple(inner) if kind == "tuple" else slice(*inner)
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return device
    return math.nan if own == "nan" else float(own) if kind == "float" else getattr(torch, own)


def _by_logprobs(node: Node, what: str) -> str:
    return (
        f"the loss {what} in {node.target[:40]}, so that it could fail for some of them: select with torch.where, or "
        "by inputs."
    )


class _WithGradient(torch.autograd.Function):
    """A number whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return dvalue * gradient, None, None


def gradient_of(
    program: LossProgram, logps: Tensor, shapes: Sequence[int], inputs: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Computes the loss of a micro-batch.

    Args:
        program: of the loss; checked on each datum.
        logps: fp32 [T] or [T, K] log-probabilities of all data.
        shapes: tokens of each datum, which lie one after the other.
        inputs: of each datum.

    Returns:
        The 0-dim fp32 sum of the losses, with the gradient for `logps`; and fp64 [metrics], the sums of the metrics.
    """
    losses, gradients = [], []
    sums = torch.zeros(len(program.metrics), dtype=torch.float64, device=logps.device)
    for own, given in zip(logps.detach().split(list(shapes)), inputs, strict=True):
        leaf = own.clone().requires_grad_()
        try:
            with torch.enable_grad():
                found = program.run(leaf, [one.to(logps.device, non_blocking=True) for one in given])
                (gradient,) = torch.autograd.grad(found.loss, leaf, allow_unused=True)
        except (_Refusal, *_OF_TORCH):
            losses.append(logps.new_full((), torch.nan, dtype=torch.float32))
            gradients.append(torch.zeros_like(leaf))
            sums = sums + torch.nan
            continue
        losses.append(found.loss.detach().float())
        gradients.append(torch.zeros_like(leaf) if gradient is None else gradient)
        if program.metrics:
            sums += torch.stack([one.detach().double().reshape(()) for one in found.metrics.values()])
    total: Tensor = _WithGradient.apply(logps, torch.cat(gradients), torch.stack(losses).sum())
    return total, sums
