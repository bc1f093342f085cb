"""Losses as clients trace them, in the form that the SDK gives them on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import _get_qualified_name


def traced(loss: Callable[..., Any], **ranks: int) -> dict[str, Any]:
    """Returns what create_custom_loss sends of a loss."""
    nodes = []
    for node in torch.fx.symbolic_trace(loss).graph.nodes:
        target = node.target
        if node.op == "call_function":
            target = _get_qualified_name(target).replace("_operator.", "operator.")
        args = [_encoded(one) for one in node.args]
        kwargs = {name: _encoded(one) for name, one in node.kwargs.items()}
        nodes.append({"op": node.op, "name": node.name, "target": str(target), "args": args, "kwargs": kwargs})
    return {
        "name": loss.__name__,
        "inputs": [{"name": name, "rank": rank} for name, rank in ranks.items()],
        "graph": {"format": 1, "nodes": nodes},
    }


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(one) for one in value]}
    if isinstance(value, list):
        return [_encoded(one) for one in value]
    if isinstance(value, dict):
        return {"dict": {name: _encoded(one) for name, one in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encoded(one) for one in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    for kind, name in ((torch.dtype, "dtype"), (torch.device, "device")):
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    return value
