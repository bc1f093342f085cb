"""Reads the experts that a server chose for each token out of its answers.

vLLM writes the bytes of an .npy file, SGLang those of an array of int32, both in base64. Both have
[tokens - 1, layers, experts of a token]: the last token of a completion has not been through the model. Layers are all
of the model's, or those with a router. No sentence repeats what the server wrote.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from engine.rollouts.data.routes import RouteShape

NAME = "routed_experts"
"""The field of both servers."""
_HEADER_BYTES = 1 << 10
"""Maximum bytes of an .npy file before its numbers."""
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([|<][ui][1248])', 'fortran_order': False, 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)
"""The header of an .npy file of whole numbers in three dimensions, as numpy writes it."""
_ADVICE = "serve the model of model.path, or set rollout.router_replay to off"


def route_bytes(shape: RouteShape, tokens: int) -> int:
    """Returns the bytes that the routes of so many tokens may have in an answer."""
    raw = tokens * shape.num_layers * shape.per_token * np.dtype(np.int32).itemsize + _HEADER_BYTES
    return -(-raw // 3) * 4


def read_npy(text: object, shape: RouteShape, tokens: int) -> NDArray[Any] | None:
    """Reads vLLM's field.

    Args:
        text: of the answer; None where there is none.
        shape: of the model's routes.
        tokens: whose routes are expected.

    Returns:
        [tokens, M, K] of `RouteShape.dtype`; None where there is no such field.

    Raises:
        UserError: they are not the routes of these tokens.
    """
    if text is None:
        return None
    raw = _raw(text)
    first = len(_MAGIC) + 2
    last = first + int.from_bytes(raw[len(_MAGIC) : first], "little")
    header = _HEADER.fullmatch(raw[first:last]) if raw.startswith(_MAGIC) else None
    if header is None:
        raise UserError(f"{NAME} is no .npy file of experts' numbers in three dimensions: {_ADVICE}")
    dtype, sizes = np.dtype(header[1].decode()), tuple(map(int, header.groups()[1:]))
    if len(raw) - last != sizes[0] * sizes[1] * sizes[2] * dtype.itemsize:
        raise UserError(f"{NAME} has other bytes than its header says: {_ADVICE}")
    return _checked(np.frombuffer(raw, dtype, offset=last).reshape(sizes), shape, tokens)


def read_int32(text: object, shape: RouteShape, tokens: int) -> NDArray[Any] | None:
    """Reads SGLang's field; see `read_npy`."""
    if text is None:
        return None
    raw, dtype = _raw(text), np.dtype("<i4")
    for layers in (shape.num_layers, len(shape.layers)):
        if len(raw) == tokens * layers * shape.per_token * dtype.itemsize:
            return _checked(np.frombuffer(raw, dtype).reshape(tokens, layers, shape.per_token), shape, tokens)
    raise UserError(f"{NAME} does not have int32 of {_expected(shape, tokens)}: {_ADVICE}")


def _raw(text: object) -> bytes:
    try:
        if isinstance(text, str):
            return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise UserError(f"{NAME} is no text in base64: see that nothing between here and the server changes it")


def _expected(shape: RouteShape, tokens: int) -> str:
    return f"{tokens} tokens, {shape.num_layers} layers and {shape.per_token} experts of a token"


def _checked(found: NDArray[Any], shape: RouteShape, tokens: int) -> NDArray[Any]:
    """Returns the routes of the layers with a router.

    Raises:
        UserError: they are of other tokens, layers or experts.
    """
    if found.shape[1] == shape.num_layers:
        found = found[:, list(shape.layers)]
    if found.shape != (tokens, *shape.of_token):
        raise UserError(f"{NAME} is not of {_expected(shape, tokens)}: {_ADVICE}")
    if not ((found >= 0) & (found < shape.num_experts)).all():
        raise UserError(f"{NAME} names experts outside of 0 to {shape.num_experts - 1}: {_ADVICE}")
    ordered = np.sort(found, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise UserError(f"{NAME} names an expert twice for one token: {_ADVICE}")
    return found.astype(shape.dtype)
