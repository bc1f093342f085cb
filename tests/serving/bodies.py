"""Bodies of requests, as the SDK sends them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankfold.serving.protobuf import decode, encode


def tensor(values: Any, *, whole: bool = False) -> dict[str, Any]:
    data = np.asarray(values, "<i8" if whole else "<f4")
    return {"dense": data.tobytes(), "dtype": 2 if whole else 1, "shape": list(data.shape)}


def datum(tokens: Sequence[int], targets: Any, **inputs: Any) -> dict[str, Any]:
    return {
        "model_input": [{"encoded_text": {"tokens": np.asarray(tokens, "<i4").tobytes()}}],
        "loss_fn_inputs": {
            "target_tokens": tensor(targets, whole=True),
            **{name: tensor(own) for name, own in inputs.items()},
        },
    }


def random_datum(length: int, seed: int, vocab_size: int, **inputs: Sequence[float]) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(3, vocab_size, length + 1).tolist()
    return datum(ids[:-1], ids[1:], **inputs)


def forward_backward(
    model: str,
    seq: int,
    data: Sequence[Mapping[str, Any]],
    loss: str = "cross_entropy",
    *,
    forward_only: bool = False,
    **numbers: float,
) -> bytes:
    message = {
        "model_id": model, "seq_id": seq, "data": list(data), "loss_fn": loss, "forward_only": forward_only,
        "loss_fn_config": numbers,
    }  # fmt: skip
    return encode("ForwardBackwardRequest", message)


def adam(model: str, seq: int, **options: float) -> bytes:
    return json.dumps({"model_id": model, "seq_id": seq, "adam_params": options}).encode()


def sample(sampler: str, seq: int, prompt: Sequence[int], count: int = 1, **more: Any) -> bytes:
    settings = {name: more.pop(name) for name in [*more] if not name.startswith("prompt_logprobs")}
    return json.dumps(
        {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "num_samples": count,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": settings,
            **more,
        }
    ).encode()


def read_output(body: bytes) -> tuple[float, list[np.ndarray[Any, Any]]]:
    """Returns the loss of a ForwardBackwardOutput, and the log-probabilities of each datum."""
    message, logps = decode("ForwardBackwardOutput", body), list[np.ndarray[Any, Any]]()
    for record in message["loss_fn_outputs"]:
        found = record["fields"]["logprobs"]
        ends = np.frombuffer(found["offsets"], "<i8") // 4
        trailing = found.get("trailing_shape", [])
        own = np.split(np.frombuffer(found["data"], "<f4"), ends[1:-1])
        logps += [one.reshape(-1, *trailing) for one in own]
    return message["metrics"]["loss:sum"], logps


def read_samples(body: bytes) -> tuple[list[tuple[list[int], list[float], int]], list[float]]:
    """Returns tokens, log-probabilities and the reason of the end of each sequence, and the prompt's."""
    message = decode("SampleResponse", body)
    sequences = [
        (
            np.frombuffer(one["tokens"], "<i4").tolist(),
            np.frombuffer(one["logprobs"], "<f4").tolist(),
            one["stop_reason"],
        )
        for one in message["sequences"]
    ]
    return sequences, np.frombuffer(message.get("prompt_logprobs", b""), "<f4").tolist()
