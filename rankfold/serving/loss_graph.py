"""Losses that clients trace: graphs of operations, as data. Needs no torch.

A graph names operations; those of the lists here are what it may name. Nothing of a request is executed: what computes
an operation is looked up under its name in a table (`loss_program.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError

OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos", "abs", "invert", "eq", "ne", "lt",
    "le", "gt", "ge", "and_", "or_", "xor", "getitem",
)  # fmt: skip
"""Of the module operator."""
COMMON = (
    "abs", "add", "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "atan", "bitwise_and", "bitwise_not",
    "bitwise_or", "ceil", "chunk", "clamp", "clamp_max", "clamp_min", "clip", "clone", "cos", "cosh", "cummax",
    "cumprod", "cumsum", "detach", "diff", "div", "divide", "dot", "eq", "erf", "exp", "exp2", "expm1", "flatten",
    "flip", "floor", "floor_divide", "fmod", "gather", "ge", "greater", "greater_equal", "gt", "index_select",
    "isfinite", "isinf", "isnan", "kthvalue", "le", "lerp", "less", "less_equal", "log", "log10", "log1p", "log2",
    "log_softmax", "logaddexp", "logcumsumexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit",
    "logsumexp", "lt", "masked_fill", "masked_select", "matmul", "max", "maximum", "mean", "median", "min", "minimum",
    "mm", "mul", "multiply", "mv", "nan_to_num", "nanmean", "nansum", "narrow", "ne", "neg", "negative", "norm",
    "outer", "permute", "pow", "prod", "reciprocal", "relu", "remainder", "reshape", "roll", "round",
    "rsqrt", "select", "sigmoid", "sign", "sin", "sinh", "softmax", "sort", "split", "sqrt", "square", "squeeze", "std",
    "sub", "subtract", "sum", "t", "take_along_dim", "tan", "tanh", "tile", "topk", "transpose", "tril", "triu",
    "true_divide", "trunc", "unbind", "unsqueeze", "var", "where", "xlogy",
)  # fmt: skip
"""Of torch, and methods of tensors."""
OF_TORCH = (
    "arange", "cat", "concat", "concatenate", "cosine_similarity", "full", "full_like", "ones", "ones_like", "stack",
    "zeros", "zeros_like",
)  # fmt: skip
METHODS = (
    "bool", "contiguous", "cpu", "dim", "double", "expand", "expand_as", "float", "int", "long", "new_full", "new_ones",
    "new_zeros", "numel", "repeat", "reshape_as", "size", "to", "type_as", "view", "view_as",
)  # fmt: skip
"""Of tensors alone."""
OF_FUNCTIONAL = (
    "binary_cross_entropy_with_logits", "elu", "hardtanh", "huber_loss", "kl_div", "l1_loss",
    "leaky_relu", "log_softmax", "margin_ranking_loss", "mse_loss", "normalize", "pad", "poisson_nll_loss", "relu",
    "relu6", "silu", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softsign", "tanh",
)  # fmt: skip
"""Of torch.nn.functional."""
OF_LIBRARY = {
    "torch._C._nn.gelu": "gelu", "torch._C._nn.log_sigmoid": "logsigmoid", "torch._C._nn.one_hot": "one_hot",
    "torch._C._nn.softplus": "softplus",
}  # fmt: skip
"""Names under which traces have functions of torch.nn.functional, and what they are called there."""
ATTRIBUTES = ("T", "mT", "device", "dtype", "indices", "ndim", "shape", "values")
"""That getattr may read."""
_WORDS = frozenset({*ATTRIBUTES, "none", "mean", "sum", "batchmean", "floor", "trunc", "constant", "tanh"})
_FUNCTIONS = frozenset(
    ["getattr", *(f"operator.{one}" for one in OPERATORS), *(f"torch.{one}" for one in (*COMMON, *OF_TORCH))]
    + [f"torch.nn.functional.{one}" for one in OF_FUNCTIONAL]
    + [*OF_LIBRARY]
)
_CONSTANTS = {
    "dtype": ("float64", "float32", "bfloat16", "float16", "int64", "int32", "bool"),
    "device": ("cpu",),
    "layout": ("strided",),
    "memory_format": ("contiguous_format", "preserve_format"),
    "float": ("inf", "-inf", "nan"),
}
_NO_WORDS = frozenset({"out", "generator", "requires_grad", "pin_memory", "names"})
"""Keywords that are not taken."""
MAX_NODES, _MAX_DEPTH, _MAX_ITEMS, _MAX_INPUTS = 1000, 8, 64, 16
_MAX_NUMBER = 1 << 53
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_LOSS_ID = re.compile(r"([A-Za-z0-9]{1,64}):loss:([0-9]{1,10})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One operation.

    Args:
        kind: whether it is an input, a function, or a method of its first argument.
        name: of its result.
        target: what it computes, a name of the lists.
        args, kwargs: as a request has them, checked.
    """

    kind: str
    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossGraph:
    """A loss of one datum.

    Args:
        inputs: name -> dimensions of each input, log-probabilities first.
        nodes: in the order in which they are computed.
        loss: name of the node that has the loss.
        metrics: name -> node; each name ends with how the values of data are combined.
    """

    inputs: Mapping[str, int]
    nodes: tuple[Node, ...]
    loss: str
    metrics: Mapping[str, str]


def loss_id(session: str, number: int) -> str:
    """Returns the name of a session's loss."""
    return f"{session}:loss:{number}"


def session_of(loss: str) -> str:
    """Returns the session of a loss.

    Raises:
        UserError: the name is none of a loss.
    """
    match = _LOSS_ID.fullmatch(loss)
    if match is None:
        raise UserError(f"loss_id is {loss[:60]!r}, which is no name of a loss: send the one that it was created with.")
    return match[1]


def read_loss(request: Mapping[str, Any]) -> LossGraph:
    """Returns the graph of a create_custom_loss request.

    Raises:
        UserError: it names what is not in the lists, is too large, or does not fit together.
    """
    inputs = _inputs(request.get("inputs"))
    graph = request.get("graph")
    if not isinstance(graph, dict) or graph.get("format") != 1 or not isinstance(graph.get("nodes"), list):
        raise UserError("graph is no traced loss of format 1: create it with the SDK's create_custom_loss.")
    given = graph["nodes"]
    if not 2 <= len(given) <= MAX_NODES:
        raise UserError(f"the loss has {len(given)} operations, but 2 to {MAX_NODES} are expected: simplify it.")
    nodes, known = list[Node](), set[str]()
    for number, one in enumerate(given):
        if not isinstance(one, dict):
            raise UserError(f"operation {number} of the loss is no object: create it with the SDK.")
        if one.get("op") == "output":
            if number != len(given) - 1 or [node.target for node in nodes if node.kind == "input"] != [*inputs]:
                break
            loss, metrics = _output(one.get("args"), known)
            return LossGraph(inputs=inputs, nodes=tuple(nodes), loss=loss, metrics=metrics)
        node = _node(one, known)
        known.add(node.name)
        nodes.append(node)
    raise UserError(
        "the loss has no output at its end, or other inputs than it names: create it with the SDK's create_custom_loss."
    )


def _inputs(given: object) -> dict[str, int]:
    found = {}
    for one in given if isinstance(given, list) and 0 < len(given) <= _MAX_INPUTS else ():
        name, rank = (one.get("name"), one.get("rank")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or not _INPUT.fullmatch(name) or type(rank) is not int or rank not in (0, 1, 2):
            break
        found[name] = rank
    if next(iter(found), None) != "logprobs" or found["logprobs"] == 0 or len(found) != len(given):  # type: ignore[arg-type]
        raise UserError(
            f"inputs are no list of 1 to {_MAX_INPUTS} names with ranks from 0 to 2 that begins with logprobs, of rank "
            "1 or 2: create the loss with the SDK's create_custom_loss."
        )
    return found


def _node(one: Mapping[str, Any], known: set[str]) -> Node:
    kinds = {"placeholder": "input", "call_function": "function", "call_method": "method"}
    op, name, target = (one.get(key) for key in ("op", "name", "target"))
    if op not in kinds or not isinstance(name, str) or not _NAME.fullmatch(name) or name in known:
        raise UserError(
            f"the loss has an operation {str(name)[:40]!r} of kind {str(op)[:20]!r}, but inputs, functions and methods "
            "with names of their own are read here: compute it with functions of torch alone."
        )
    kind, args, kwargs = kinds[op], one.get("args", []), one.get("kwargs", {})
    allowed = {"input": (), "function": _FUNCTIONS, "method": (*COMMON, *METHODS)}[kind]
    if not isinstance(target, str) or (kind != "input" and target not in allowed):
        raise UserError(
            f"the loss calls {str(target)[:60]}, which is not computed here: use other functions of torch, or give the "
            "function itself to forward_backward_custom, which runs it at the client."
        )
    if not isinstance(args, list) or not isinstance(kwargs, dict) or (kind == "input" and (args or kwargs)):
        raise UserError(f"operation {name} of the loss has no lists of arguments: create it with the SDK.")
    if _NO_WORDS & kwargs.keys() or kwargs.get("inplace"):
        word = next(iter(sorted(_NO_WORDS & kwargs.keys())), "inplace")
        raise UserError(f"the loss calls {target} with {word}, which is not taken here: leave it out.")
    for value in (*args, *kwargs.values()):
        _check_value(name, value, known, _MAX_DEPTH)
    if target == "getattr" and (len(args) != 2 or kwargs or args[1] not in ATTRIBUTES):
        raise UserError(f"the loss reads another attribute than {', '.join(ATTRIBUTES)}: compute without it.")
    return Node(kind=kind, name=name, target=target, args=tuple(args), kwargs=kwargs)


def _check_value(name: str, value: object, known: set[str], depth: int) -> None:
    """Checks an argument of the operation `name`."""
    inner: Sequence[object] = ()
    if value is None or isinstance(value, bool):
        good = True
    elif isinstance(value, int | float):
        good = abs(value) <= _MAX_NUMBER
    elif isinstance(value, str):
        good = value in _WORDS
    elif isinstance(value, list):
        good, inner = len(value) <= _MAX_ITEMS, value
    elif isinstance(value, dict) and len(value) == 1:
        ((kind, own),) = value.items()
        good, inner = _is_good(kind, own, known), own if kind in ("tuple", "slice") else ()
    else:
        good = False
    if not good or (inner and depth == 0):
        raise UserError(
            f"operation {name[:40]} of the loss has an argument that is not read here: {str(value)[:60]!r}: give "
            "numbers, tensors, lists of them, slices and dtypes."
        )
    for one in inner:
        _check_value(name, one, known, depth - 1)


def _is_good(kind: str, own: object, known: set[str]) -> bool:
    if kind == "ref":
        return isinstance(own, str) and own in known
    if kind == "tuple":
        return isinstance(own, list) and len(own) <= _MAX_ITEMS
    if kind == "slice":
        return isinstance(own, list) and len(own) == 3
    return own is True if kind == "ellipsis" else own in _CONSTANTS.get(kind, ())


def _output(args: object, known: set[str]) -> tuple[str, dict[str, str]]:
    with_metrics = _pair(args)
    if with_metrics is not None:
        loss, metrics = _reference(with_metrics[0], known), with_metrics[1]
        named = metrics.get("dict") if isinstance(metrics, dict) and metrics.keys() == {"dict"} else None
        if loss is not None and isinstance(named, dict) and len(named) <= _MAX_ITEMS:
            found = {name: _reference(one, known) for name, one in named.items() if _METRIC.fullmatch(name)}
            good = {name: one for name, one in found.items() if one is not None}
            if len(good) == len(named):
                return loss, good
    raise UserError(
        "the loss returns something else than a tensor and metrics, tensors named custom/NAME:sum or custom/NAME:mean: "
        "return (loss, metrics)."
    )


def _pair(args: object) -> list[object] | None:
    one = args[0] if isinstance(args, list) and len(args) == 1 else None
    found = one.get("tuple") if isinstance(one, dict) else one
    return found if isinstance(found, list) and len(found) == 2 else None


def _reference(value: object, known: set[str]) -> str | None:
    found = value.get("ref") if isinstance(value, dict) and value.keys() == {"ref"} else None
    return found if isinstance(found, str) and found in known else None


def references(value: Any) -> Iterator[str]:
    """Yields the names of the nodes that a checked argument reads."""
    if isinstance(value, dict):
        ((kind, own),) = value.items()
        if kind == "ref":
            yield own
        value = own if kind in ("tuple", "slice") else ()
    for one in value if isinstance(value, list) else ():
        yield from references(one)
