"""What clients ask of a model, read from the bodies of their requests. Needs no torch.

A body is kept in the journal as it came, and read where it is executed, so that after a restart it means the same.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError
from engine.files.strict_json import ANSWER_LIMITS, JsonFlaw, parse_json

_MOST_BRACKETS = 100_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
KINDS = ("weights", "sampler_weights", "external_weights")
"""Kinds of saved weights: to train on, to sample from, and a PEFT adapter to download."""
_PATH = re.compile(
    rf"tinker://([A-Za-z0-9][A-Za-z0-9:._-]{{0,199}})/({'|'.join(KINDS)})/([A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The adapter that a model trains.

    Args:
        rank: of all its linears.
        seed: of its first values.
        train_unembed, train_mlp, train_attn: where it sits.
    """

    rank: int
    seed: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamOptions:
    """The numbers of one optimizer step; the defaults are the protocol's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A path of saved weights, tinker://MODEL/KIND/NAME."""

    model: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


def read_json(body: bytes) -> dict[str, Any]:
    """Returns the mapping that a body holds.

    Raises:
        UserError: it holds none, or as many lists and objects as no request has.
    """
    if body.count(b"[") + body.count(b"{") > _MOST_BRACKETS:  # each takes many times its bytes in memory
        raise UserError(f"the body of the request has more than {_MOST_BRACKETS} lists and objects: send less in it.")
    try:
        found = parse_json(body, ANSWER_LIMITS)
    except JsonFlaw as flaw:
        raise UserError(f"the body of the request is no JSON that is read here: {flaw}.") from None
    if not isinstance(found, dict):
        raise UserError("the body of the request is JSON, but no mapping: send an object.")
    return found


def text_of(request: Mapping[str, Any], name: str, *, limit: int = 200) -> str:
    """Returns a text of a request.

    Raises:
        UserError: it is missing, no text, or longer than `limit` characters.
    """
    value = request.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        raise UserError(f"{name} is missing, or no text of 1 to {limit} characters: send one.")
    return value


def whole_of(request: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Returns a whole number of a request.

    Raises:
        UserError: it is missing, or not in [low, high].
    """
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(f"{name} is {shown(value)}, but a whole number from {low} to {high} is expected.")
    return value


def number_of(request: Mapping[str, Any], name: str, default: float, low: float, high: float = math.inf) -> float:
    """Returns a number of a request.

    Raises:
        UserError: it is none, or not in [low, high].
    """
    value = request.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(f"{name} is {shown(value)}, but a number from {low:g} to {high:g} is expected.")
    return float(value)


def flag_of(request: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns a flag of a request.

    Raises:
        UserError: it is neither true nor false.
    """
    value = request.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}, but true or false is expected.")
    return default if value is None else value


def shown(value: object) -> str:
    """Returns how a sentence shows a value of a request."""
    return "not given" if value is None else repr(value)[:60]


def check_optimizer(request: Mapping[str, Any]) -> None:
    """Checks the optimizer_config of a request.

    Raises:
        UserError: it is another one than AdamW.
    """
    optimizer = request.get("optimizer_config") or {}
    if not isinstance(optimizer, dict) or optimizer.get("type", "adamw") != "adamw":
        given = optimizer.get("type") if isinstance(optimizer, dict) else optimizer
        raise UserError(
            f"optimizer_config has type {shown(given)}, but models are trained with adamw here: leave optimizer_config "
            "out."
        )


def read_adapter(request: Mapping[str, Any], seed: int) -> Adapter:
    """Returns the adapter of a create_model request.

    Args:
        request: its body.
        seed: where it gives none.

    Raises:
        UserError: a number out of its range, an adapter without linears, or another optimizer than AdamW.
    """
    check_optimizer(request)
    lora = request.get("lora_config")
    if not isinstance(lora, dict):
        raise UserError("lora_config is missing, but models are trained by adapters alone here: give it with a rank.")
    adapter = Adapter(
        rank=whole_of(lora, "rank", 1, 1024),
        seed=seed if lora.get("seed") is None else whole_of(lora, "seed", 0, 2**63 - 1) % 2**31,
        train_unembed=flag_of(lora, "train_unembed", True),
        train_mlp=flag_of(lora, "train_mlp", True),
        train_attn=flag_of(lora, "train_attn", True),
    )
    if not (adapter.train_unembed or adapter.train_mlp or adapter.train_attn):
        raise UserError(
            "train_unembed, train_mlp and train_attn are false, so that there is nothing to train: set one of them to "
            "true."
        )
    return adapter


def read_adam(request: Mapping[str, Any]) -> AdamOptions:
    """Returns the options of an optim_step request, in adam_params or, with a type, in optimizer_params.

    Raises:
        UserError: one out of its range, or of another optimizer.
    """
    given = request.get("adam_params")
    if given is None:
        given = request.get("optimizer_params")
    if not isinstance(given, dict):
        raise UserError("the step has neither adam_params nor optimizer_params: send adam_params.")
    if (kind := given.get("type", "adamw")) != "adamw":
        raise UserError(
            f"optimizer_params are those of {shown(kind)}, but models are trained with adamw here: send adam_params."
        )
    options = AdamOptions()
    return AdamOptions(
        learning_rate=number_of(given, "learning_rate", options.learning_rate, 0.0, 1e6),
        beta1=number_of(given, "beta1", options.beta1, 0.0, 1 - 1e-9),
        beta2=number_of(given, "beta2", options.beta2, 0.0, 1 - 1e-9),
        eps=number_of(given, "eps", options.eps, 0.0, 1e6),
        weight_decay=number_of(given, "weight_decay", options.weight_decay, 0.0, 1e6),
        grad_clip_norm=max(0.0, number_of(given, "grad_clip_norm", options.grad_clip_norm, -math.inf)),
    )


def read_path(path: object) -> Saved:
    """Returns the parts of a path of saved weights.

    Raises:
        UserError: it is none.
    """
    match = _PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise UserError(f"{shown(path)} is no path of saved weights, such as tinker://MODEL/weights/NAME.")
    return Saved(model=match[1], kind=match[2], name=match[3])


def read_expiry(request: Mapping[str, Any]) -> float | None:
    """Returns when weights that a request saves expire, in seconds since 1970; None for never.

    Raises:
        UserError: ttl_seconds is out of its range.
    """
    if request.get("ttl_seconds") is None:
        return None
    return time.time() + whole_of(request, "ttl_seconds", 3600, 10 * 366 * 86400)


def read_metadata(request: Mapping[str, Any]) -> str:
    """Returns the user_metadata of a request, as JSON.

    Raises:
        UserError: it is no mapping, or has more than 64 KiB.
    """
    given = request.get("user_metadata") or {}
    text = json.dumps(given)
    if not isinstance(given, dict) or len(text) > 65536:
        raise UserError("user_metadata is to be a mapping of at most 65536 characters of JSON: send less of it.")
    return text


def read_follows(request: Mapping[str, Any]) -> bool:
    """Returns whether a sampler is to have the weights that are saved later on, too, for samplers of its kind.

    Raises:
        UserError: the kind is unknown, or weights that are replaced are to have a name.
    """
    kind = request.get("kind", "snapshot")
    if kind not in ("snapshot", "inflight"):
        raise UserError(f"kind is {shown(kind)}, but snapshot or inflight is expected.")
    if kind == "inflight" and request.get("path") is not None:
        raise UserError("weights of kind inflight are replaced by later ones, and have no name: leave path out.")
    return bool(kind == "inflight")


def read_name(request: Mapping[str, Any], default: str) -> str:
    """Returns the name that weights are saved under.

    Raises:
        UserError: it has other characters than those that names of files have everywhere.
    """
    name = request.get("path")
    if name is None:
        return default
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"path is {shown(name)}, but a name of at most 128 letters, digits, dots, hyphens and underscores is "
            "expected."
        )
    return name
