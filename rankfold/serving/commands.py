"""What clients ask of a model, read from the bodies of their requests. Needs no torch.

A body is kept in the journal as it came, and read where it is executed, so that after a restart it means the same.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from engine.files.strict_json import ANSWER_LIMITS, JsonFlaw, parse_json
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
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"tinker://([A-Za-z0-9:._-]{1,200})/(weights|sampler_weights)/([A-Za-z0-9._-]{1,128})")


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
class Sample:
    """A request for completions of one prompt.

    Args:
        prompt: tokens.
        count: completions.
        max_tokens: of each; None for as many as the context takes.
        seed: of its random numbers; None where the server chooses.
        stop_ids, stop_texts: what ends a completion.
        ends: whether the model's own end tokens do, too.
        prompt_logprobs: whether the prompt is scored; `last` of its tokens, None for all.
    """

    prompt: tuple[int, ...]
    count: int
    max_tokens: int | None
    seed: int | None
    temperature: float
    top_k: int | None
    top_p: float
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    ends: bool
    prompt_logprobs: bool
    last: int | None


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
        UserError: it holds none.
    """
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
        raise UserError(f"{name} is {_shown(value)}, but a whole number from {low} to {high} is expected.")
    return value


def _number(request: Mapping[str, Any], name: str, default: float, low: float, high: float = math.inf) -> float:
    value = request.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(f"{name} is {_shown(value)}, but a number from {low:g} to {high:g} is expected.")
    return float(value)


def _flag(request: Mapping[str, Any], name: str, default: bool) -> bool:
    value = request.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name} is {_shown(value)}, but true or false is expected.")
    return default if value is None else value


def _shown(value: object) -> str:
    return "not given" if value is None else repr(value)[:60]


def read_adapter(request: Mapping[str, Any], seed: int) -> Adapter:
    """Returns the adapter of a create_model request.

    Args:
        request: its body.
        seed: where it gives none.

    Raises:
        UserError: a number out of its range, an adapter without linears, or another optimizer than AdamW.
    """
    optimizer = request.get("optimizer_config") or {}
    if not isinstance(optimizer, dict) or optimizer.get("type", "adamw") != "adamw":
        raise UserError(
            f"optimizer_config has type {_shown(dict(optimizer).get('type'))}, but models are trained with adamw here: "
            "leave optimizer_config out."
        )
    lora = request.get("lora_config")
    if not isinstance(lora, dict):
        raise UserError("lora_config is missing, but models are trained by adapters alone here: give it with a rank.")
    adapter = Adapter(
        rank=whole_of(lora, "rank", 1, 1024),
        seed=seed if lora.get("seed") is None else whole_of(lora, "seed", 0, 2**63 - 1) % 2**31,
        train_unembed=_flag(lora, "train_unembed", True),
        train_mlp=_flag(lora, "train_mlp", True),
        train_attn=_flag(lora, "train_attn", True),
    )
    if not (adapter.train_unembed or adapter.train_mlp or adapter.train_attn):
        raise UserError(
            "train_unembed, train_mlp and train_attn are false, so that there is nothing to train: set one of them to "
            "true."
        )
    return adapter


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


def read_adam(request: Mapping[str, Any]) -> AdamOptions:
    """Returns the options of an optim_step request.

    Raises:
        UserError: one out of its range, or of another optimizer.
    """
    given = request.get("adam_params", request.get("optimizer_params"))
    if not isinstance(given, dict) or given.get("type", "adamw") != "adamw":
        raise UserError("the step has no adam_params, but models are trained with adamw here: send adam_params.")
    options = AdamOptions()
    return AdamOptions(
        learning_rate=_number(given, "learning_rate", options.learning_rate, 0.0, 1e6),
        beta1=_number(given, "beta1", options.beta1, 0.0, 1 - 1e-9),
        beta2=_number(given, "beta2", options.beta2, 0.0, 1 - 1e-9),
        eps=_number(given, "eps", options.eps, 0.0, 1e6),
        weight_decay=_number(given, "weight_decay", options.weight_decay, 0.0, 1e6),
        grad_clip_norm=max(0.0, _number(given, "grad_clip_norm", options.grad_clip_norm, -math.inf)),
    )


def read_sample(request: Mapping[str, Any], *, vocab_size: int, limit: int) -> Sample:
    """Returns an asample request.

    Args:
        request: its body.
        vocab_size: of the model.
        limit: tokens of its context.

    Raises:
        UserError: what it asks for is not there, or does not fit the model.
    """
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
        if request.get(name):
            raise UserError(f"{name} is set, but it is not computed here: leave it out.")
    if request.get("record_stability_info"):
        raise UserError(
            "record_stability_info is set for the loss stable_reinforce, which is not computed here: set loss_fn to "
            "importance_sampling, ppo or cispo."
        )
    prompt = _prompt(request, vocab_size)
    settings = request.get("sampling_params")
    if not isinstance(settings, dict):
        raise UserError("sampling_params is missing: send it, {} for the defaults.")
    room = limit - len(prompt)
    if room < 1:
        raise UserError(f"the prompt has {len(prompt)} tokens, but the context is {limit}: shorten it.")
    max_tokens = None if settings.get("max_tokens") is None else whole_of(settings, "max_tokens", 1, 2**31)
    if max_tokens is not None and max_tokens > room:
        raise UserError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, but the context is {limit}: set "
            f"max_tokens to {room} or less."
        )
    top_k = settings.get("top_k", -1)
    stop_ids, stop_texts, ends = _stops(settings.get("stop"))
    scored = _flag(request, "prompt_logprobs", False)
    last = request.get("prompt_logprobs_last_n")
    return Sample(
        prompt=prompt,
        count=whole_of({"num_samples": 1, **request}, "num_samples", 1, 1024),
        max_tokens=max_tokens,
        seed=None if settings.get("seed") is None else whole_of(settings, "seed", 0, 2**64 - 1),
        temperature=_number(settings, "temperature", 1.0, 0.0, 1e6),
        top_k=None if top_k in (-1, None) else whole_of(settings, "top_k", 1, 2**31),
        top_p=_number(settings, "top_p", 1.0, 1e-9, 1.0),
        stop_ids=stop_ids,
        stop_texts=stop_texts,
        ends=ends,
        prompt_logprobs=scored,
        last=None if last is None else whole_of(request, "prompt_logprobs_last_n", 1, max(1, len(prompt) - 1)),
    )


def _prompt(request: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    prompt = request.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise UserError("prompt has no chunks: send {chunks: [{type: encoded_text, tokens: [...]}]}.")
    found: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if kind != "encoded_text" or not isinstance(tokens, list):
            raise UserError(f"prompt has a chunk of {_shown(kind)}, but only text is read here: send tokens.")
        found += tokens
    if not found or not all(type(one) is int and 0 <= one < vocab_size for one in found):
        raise UserError(f"prompt is to have at least one token, and all of them from 0 to {vocab_size - 1}.")
    return tuple(found)


def _stops(stop: object) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """Returns token ids and texts that end a completion, and whether the model's own end tokens do."""
    if stop is None:
        return (), (), True
    given = [stop] if isinstance(stop, str) else stop
    if isinstance(given, list) and len(given) <= 64:
        if all(type(one) is int and one >= 0 for one in given):
            return tuple(given), (), bool(given)
        if all(isinstance(one, str) and 0 < len(one) <= 1000 for one in given):
            return (), tuple(given), True
    raise UserError("stop is to be a text, a list of at most 64 texts, or one of token ids.")


def read_path(path: object) -> Saved:
    """Returns the parts of a path of saved weights.

    Raises:
        UserError: it is none.
    """
    match = _PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise UserError(f"{_shown(path)} is no path of saved weights, such as tinker://MODEL/weights/NAME.")
    return Saved(model=match[1], kind=match[2], name=match[3])


def read_expiry(request: Mapping[str, Any]) -> float | None:
    """Returns when weights that a request saves expire, in seconds since 1970; None for never.

    Raises:
        UserError: ttl_seconds is out of its range.
    """
    if request.get("ttl_seconds") is None:
        return None
    return time.time() + whole_of(request, "ttl_seconds", 3600, 10 * 366 * 86400)


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
            f"path is {_shown(name)}, but a name of at most 128 letters, digits, dots, hyphens and underscores is "
            "expected."
        )
    return name
