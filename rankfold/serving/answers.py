"""Answers to clients in protobuf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankfold.serving.loss_request import ForwardBackward
from rankfold.serving.protobuf import encode

_FLOAT32 = 1


def forward_backward_answer(request: ForwardBackward, logps: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Returns a ForwardBackwardOutput.

    Args:
        request: that it answers.
        logps: fp32 log-probabilities of the targets of its data, in the shapes of the targets, one after the other.
        metrics: by name, which ends with how clients combine those of several requests.
    """
    values = torch.cat([one.flatten() for one in logps]).float().cpu().numpy()
    return encode(
        "ForwardBackwardOutput",
        {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": list(_records(request, values)),
            "metrics": dict(metrics),
        },
    )


def _records(request: ForwardBackward, values: NDArray[np.float32]) -> Iterator[dict[str, Any]]:
    """Returns a record for consecutive data whose targets have as many columns."""
    place = 0
    for trailing, group in groupby(request.data, lambda datum: datum.targets.shape[1:]):
        ends = np.cumsum([0, *(datum.targets.size for datum in group)], dtype="<i8")
        own = values[place : place + int(ends[-1])]
        place += len(own)
        logps = {
            "data": own.tobytes(),
            "offsets": (ends * own.itemsize).tobytes(),
            "dtype": _FLOAT32,
            "trailing_shape": list(trailing),
        }
        yield {"type_tag": "ArrayRecord", "fields": {"logprobs": logps}, "num_datums": len(ends) - 1}
