"""Requests for gradients, read from their bodies. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from rankfold.serving.protobuf import Message, WireError, decode

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""Names of the losses that are computed here."""
_INPUTS = {
    "weights": "float32", "logprobs": "float32", "advantages": "float32", "clip_low_threshold": "float32",
    "clip_high_threshold": "float32", "sequence_ratio_mask": "float32",
}  # fmt: skip
_NEEDED = {"cross_entropy": (), **dict.fromkeys(LOSSES[1:], ("logprobs", "advantages"))}
_NUMBERS = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "gspo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: "<f4", _INT64: "<i8", 3: "<i4"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """One document with what its loss needs.

    Args:
        tokens: int64 [T].
        targets: int64 [T], the token that each position is to predict.
        inputs: float32 [T] each, by name.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackward:
    """A request for gradients, or for log-probabilities alone."""

    loss: str
    numbers: Mapping[str, float]
    forward_only: bool
    data: tuple[Datum, ...]


def head_of(body: bytes) -> tuple[str, int]:
    """Returns the model and seq_id of a forward_backward request.

    Raises:
        UserError: the body is no such request.
    """
    message = _message(body)
    model, seq = message.get("model_id", ""), message.get("seq_id", 0)
    if not model or not 1 <= seq < 2**31:
        raise UserError("the request has no model_id, or no seq_id of 1 or more, which orders a model's requests.")
    return model, seq


def _message(body: bytes) -> Message:
    try:
        return decode("ForwardBackwardRequest", body)
    except WireError as flaw:
        raise UserError(
            f"the body is no ForwardBackwardRequest in protobuf: {flaw}; SDK 0.25 and newer send one."
        ) from None


def read_forward_backward(body: bytes, *, vocab_size: int, limit: int) -> ForwardBackward:
    """Returns a forward_backward request.

    Args:
        body: protobuf.
        vocab_size: of the model.
        limit: tokens of the longest document.

    Raises:
        UserError: what it asks for is not there, or its tensors do not fit each other.
    """
    message = _message(body)
    loss = message.get("loss_fn", "")
    if loss not in LOSSES:
        advice = "set loss_fn to importance_sampling, ppo or cispo" if loss == "stable_reinforce" else "choose one"
        raise UserError(f"loss_fn is {loss[:40]!r}, but it must be one of {', '.join(LOSSES)} here: {advice}.")
    numbers = dict(message.get("loss_fn_config", {}))
    for name, value in message.get("loss_fn_config_v2", {}).items():
        if "number" not in value:
            raise UserError(f"loss_fn_config has a text for {name[:40]}, but {loss} takes numbers alone.")
        numbers[name] = value["number"]
    for name, number in numbers.items():
        if name not in _NUMBERS[loss] or not 0 <= number < math.inf:
            known = ", ".join(_NUMBERS[loss]) or "nothing"
            raise UserError(
                f"loss_fn_config has {name[:40]} = {number:g}, but {loss} takes {known}, of 0 or more: leave it out."
            )
    data = message.get("data", [])
    if not data:
        raise UserError("the request has no data, but at least one datum is expected.")
    read = tuple(_datum(number, one, loss, vocab_size, limit) for number, one in enumerate(data))
    for number, one in enumerate(read):
        if one.inputs.keys() != read[0].inputs.keys():
            raise UserError(
                f"datum {number} has other loss_fn_inputs than datum 0: send the same ones in all data of a request."
            )
    return ForwardBackward(loss=loss, numbers=numbers, forward_only=bool(message.get("forward_only", False)), data=read)


def _datum(number: int, datum: Message, loss: str, vocab_size: int, limit: int) -> Datum:
    chunks = datum.get("model_input", [])
    for chunk in chunks:
        for kind in ("image", "dmel"):
            if kind in chunk:
                raise UserError(f"datum {number} has a chunk of {kind}, but only text is trained here: send tokens.")
    parts = [_array(chunk.get("encoded_text", {}).get("tokens", b""), "<i4", "tokens") for chunk in chunks]
    tokens = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    if not 0 < len(tokens) <= limit:
        raise UserError(
            f"datum {number} has {len(tokens)} tokens, but 1 to {limit} are expected, the longest row of this model."
        )
    tensors = datum.get("loss_fn_inputs", {})
    if "target_tokens" not in tensors:
        raise UserError(f"datum {number} has no target_tokens: send one for each token of model_input.")
    targets = _tensor(number, "target_tokens", tensors["target_tokens"], len(tokens)).astype(np.int64)
    for what, ids in (("model_input", tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise UserError(
                f"datum {number} has token {ids.max() if ids.min() >= 0 else ids.min()} in {what}, but the model has "
                f"{vocab_size} tokens, counted from 0."
            )
    inputs = {
        name: _tensor(number, name, tensors[name], len(tokens)).astype(np.float32)
        for name in _INPUTS
        if name in tensors
    }
    for name, values in inputs.items():
        if not np.isfinite(values).all():
            raise UserError(f"datum {number} has a number in {name} that is not finite.")
    if missing := [name for name in _NEEDED[loss] if name not in inputs]:
        raise UserError(f"datum {number} has no {missing[0]}, which {loss} needs: send one number for each token.")
    if unknown := [name for name in tensors if name not in _INPUTS and name != "target_tokens"]:
        raise UserError(f"datum {number} has {unknown[0][:40]} in loss_fn_inputs, which no loss here reads: remove it.")
    return Datum(tokens=tokens, targets=targets, inputs=inputs)


def _tensor(number: int, name: str, tensor: Message, length: int) -> NDArray[Any]:
    if "sparse_csr" in tensor or len(tensor.get("shape", [length])) > 1:
        raise UserError(f"datum {number} has {name} of two dimensions, but one number for each token is read here.")
    dtype = tensor.get("dtype", 0)
    if dtype not in _DTYPES:
        raise UserError(f"datum {number} has {name} of dtype {dtype}, but float32 and int64 are read here.")
    values = _array(tensor.get("dense", b""), _DTYPES[dtype], name)
    if len(values) != length:
        raise UserError(f"datum {number} has {len(values)} numbers in {name}, but {length} tokens: send as many.")
    return values


def _array(data: bytes, dtype: str, name: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise UserError(f"{name} has {len(data)} bytes, which is no whole number of elements.")
    return np.frombuffer(data, dtype=dtype)
