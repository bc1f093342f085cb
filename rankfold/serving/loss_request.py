"""Requests for gradients, read from their bodies. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from rankfold.serving.chunks import PlacesImages, read_chunks
from rankfold.serving.protobuf import Message, WireError, decode
from rankfold.serving.tensors import read_tensor

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""Names of the losses that are computed here."""
CUSTOM = "custom"
"""The name of a loss that the client has traced; loss_id says which."""
_POLICY = ("logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_NEEDED = {"cross_entropy": (), **dict.fromkeys(LOSSES[1:], _POLICY)}
_INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": _POLICY,
    "ppo": (*_POLICY, *_CLIPS),
    "cispo": (*_POLICY, *_CLIPS),
    "dro": _POLICY,
    "gspo": (*_POLICY, *_CLIPS, "sequence_ratio_mask"),
}
_KNOWN = {"target_tokens", *(name for names in _INPUTS.values() for name in names)}
"""What some loss reads; those that do not leave it aside, as recipes send what they have."""
_NUMBERS = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "gspo": _CLIPS,
    "dro": ("beta",),
}
_SEVERAL = ("cross_entropy", CUSTOM)
"""Losses that take several targets of a token."""
_MOST_DATA = 20_000
"""Data of a request, with its other fields; the SDK sends 1,024 at a time."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_ALL_CELLS = 1 << 24
"""Elements of the targets of a request, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """One document with what its loss needs.

    Args:
        tokens: int64 [T].
        targets: int64 [T] or [T, K], the tokens that each position is to predict.
        inputs: float32 of the shape of `targets` each, by name; of a traced loss float32 or int64 of any shape.
        images: of the document, with the places of their features.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[Any]]
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackward:
    """A request for gradients, or for log-probabilities alone.

    Args:
        loss: its name.
        numbers: of loss_fn_config.
        forward_only: whether no gradient is wanted.
        data: at least one.
        loss_id: of a traced loss; "" for others.
        program: that computes a traced loss, once it is known.
        images: places those of the data; None where they have none.
    """

    loss: str
    numbers: Mapping[str, float]
    forward_only: bool
    data: tuple[Datum, ...]
    loss_id: str = ""
    program: Any = None
    images: Any = None


def head_of(body: bytes) -> tuple[str, int]:
    """Returns the model and seq_id of a forward_backward request.

    Raises:
        UserError: the body is no such request.
    """
    # its data are read where it is executed, and who reads a head keeps others waiting
    message = _message(body, only=("model_id", "seq_id"), most=_MOST_DATA)
    model, seq = message.get("model_id", ""), message.get("seq_id", 0)
    if not model or not 1 <= seq < 2**31:
        raise UserError("the request has no model_id, or no seq_id of 1 or more, which orders a model's requests.")
    return model, seq


def _message(body: bytes, only: Collection[str] | None = None, most: int | None = None) -> Message:
    try:
        return decode("ForwardBackwardRequest", body, only=only, most=most)
    except WireError as flaw:
        raise UserError(
            f"the body is no ForwardBackwardRequest in protobuf: {flaw}. SDK 0.25 and newer send one: install one of "
            "them."
        ) from None


def read_forward_backward(
    body: bytes, *, vocab_size: int, limit: int, images: PlacesImages | None = None
) -> ForwardBackward:
    """Returns a forward_backward request.

    Args:
        body: protobuf.
        vocab_size: of the model.
        limit: tokens of the longest document.
        images: places those of the data; None where only text is read.

    Raises:
        UserError: what it asks for is not there, or its tensors do not fit each other.
    """
    message = _message(body)
    loss = message.get("loss_fn", "")
    if loss not in (*LOSSES, CUSTOM):
        advice = "set loss_fn to importance_sampling, ppo or cispo" if loss == "stable_reinforce" else "choose one"
        raise UserError(f"loss_fn is {loss[:40]!r}, but it must be one of {', '.join(LOSSES)} here: {advice}.")
    numbers, texts = dict(message.get("loss_fn_config", {})), dict[str, str]()
    for name, value in message.get("loss_fn_config_v2", {}).items():
        if "number" in value:
            numbers[name] = value["number"]
        else:
            texts[name] = value.get("text", "")
    traced = texts.pop("loss_id", "") if loss == CUSTOM else ""
    if loss == CUSTOM and not traced:
        raise UserError("loss_fn is custom, but loss_fn_config has no loss_id: send that of create_custom_loss.")
    if texts:
        raise UserError(f"loss_fn_config has a text for {min(texts)[:40]}, but {loss} takes numbers alone: remove it.")
    for name, number in numbers.items():
        if name not in _NUMBERS.get(loss, ()) or not 0 <= number <= _FLOAT32_MAX:
            known = ", ".join(_NUMBERS.get(loss, ())) or "nothing"
            raise UserError(
                f"loss_fn_config has {name[:40]} = {number:g}, but {loss} takes {known}, of 0 to 3e38: leave it out."
            )
    data = message.get("data", [])
    if not data:
        raise UserError("the request has no data, but at least one datum is expected.")
    read: list[Datum] = []
    cells = 0
    for number, one in enumerate(data):
        read.append(_datum(number, one, loss, vocab_size, limit, images))
        cells += read[-1].targets.size + sum(one.size for one in read[-1].inputs.values() if loss == CUSTOM)
        if cells > _ALL_CELLS:  # before the next: a sparse tensor says in few bytes that it is large
            raise UserError(
                f"the request has more than {_ALL_CELLS} targets, as many as are read at a time: send its data in "
                "several requests."
            )
    for number, datum in enumerate(read):
        if datum.inputs.keys() != read[0].inputs.keys():
            raise UserError(
                f"datum {number} has other loss_fn_inputs than datum 0: send the same ones in all data of a request."
            )
    return ForwardBackward(
        loss=loss,
        numbers=numbers,
        forward_only=bool(message.get("forward_only", False)),
        data=tuple(read),
        loss_id=traced,
        images=images if any(datum.images for datum in read) else None,
    )


def _datum(number: int, datum: Message, loss: str, vocab_size: int, limit: int, images: PlacesImages | None) -> Datum:
    tokens, placed = read_chunks(f"datum {number}", datum.get("model_input", []), images)
    if not 0 < len(tokens) <= limit:
        raise UserError(
            f"datum {number} has {len(tokens)} tokens, but 1 to {limit} are expected, the longest row of this model."
        )
    tensors = datum.get("loss_fn_inputs", {})
    if "target_tokens" not in tensors:
        raise UserError(f"datum {number} has no target_tokens: send one for each token of model_input.")
    targets = _targets(number, tensors["target_tokens"], loss, len(tokens))
    for what, ids in (("model_input", tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise UserError(
                f"datum {number} has token {ids.max() if ids.min() >= 0 else ids.min()} in {what}, but the model has "
                f"{vocab_size} tokens, counted from 0."
            )
    if loss == CUSTOM:
        own: dict[str, NDArray[Any]] = {}
        for name, one in tensors.items():
            if name == "target_tokens":
                continue
            own[name] = read_tensor(f"{name[:64]} of datum {number}", one)
            if sum(values.size for values in own.values()) > _ALL_CELLS:
                raise UserError(
                    f"datum {number} has more than {_ALL_CELLS} numbers in loss_fn_inputs, as many as are read at a "
                    "time: send less in it."
                )
        return Datum(tokens=tokens, targets=targets, inputs=own, images=placed)
    inputs = {
        name: _input(number, name, tensors[name], targets.shape).astype(np.float32)
        for name in _INPUTS[loss]
        if name in tensors
    }
    for name, values in inputs.items():
        if not np.isfinite(values).all():
            raise UserError(f"datum {number} has a number in {name} that is not finite.")
    if missing := [name for name in _NEEDED[loss] if name not in inputs]:
        raise UserError(f"datum {number} has no {missing[0]}, which {loss} needs: send one number for each token.")
    if unknown := [name for name in tensors if name not in _KNOWN]:
        raise UserError(f"datum {number} has {unknown[0][:40]} in loss_fn_inputs, which no loss here reads: remove it.")
    return Datum(tokens=tokens, targets=targets, inputs=inputs, images=placed)


def _targets(number: int, tensor: Message, loss: str, length: int) -> NDArray[np.int64]:
    found = read_tensor(f"target_tokens of datum {number}", tensor)
    if found.ndim not in (1, 2) or len(found) != length or found.size == 0:
        raise UserError(
            f"datum {number} has target_tokens of shape {list(found.shape)}, but {length} tokens: send a target, or a "
            "row of them, for each."
        )
    if found.ndim == 2 and loss not in _SEVERAL:
        raise UserError(
            f"datum {number} has target_tokens of two dimensions, but {loss} takes one target of a token: send one, or "
            f"set loss_fn to {' or '.join(_SEVERAL)}."
        )
    if found.dtype != np.int64:
        raise UserError(f"datum {number} has target_tokens of float numbers, but they are token ids: send int64.")
    return found


def _input(number: int, name: str, tensor: Message, shape: tuple[int, ...]) -> NDArray[Any]:
    found = read_tensor(f"{name} of datum {number}", tensor)
    if found.shape != shape:
        raise UserError(
            f"datum {number} has {name} of shape {list(found.shape)}, but target_tokens of shape {list(shape)}: send "
            "as many, in the same shape."
        )
    return found
