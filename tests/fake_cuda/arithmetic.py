"""Shortens what takes hundreds of operations of torch and is arithmetic alone: random bits and fingerprints.

The first calls of a case run whole, and so do the first ones once the run has begun, so that what they would mind is
found. The others read what they are given, and return what has the right shape on the right device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.inference import sampling
from engine.kernels import philox
from engine.training.guards.fingerprint import Fingerprints
from tests.fake_cuda.recorder import Recorder

_WHOLE = 4
"""Calls that run whole."""

_Words = tuple[Tensor, Tensor, Tensor, Tensor]


def install(recorder: Recorder) -> None:
    """Puts the short arithmetic into place, for as long as the process lives."""
    modules: Any = philox, sampling
    rounds = _shortened(philox.philox4x32, _words, recorder)
    for module in modules:
        module.philox4x32 = rounds
    prints: Any = Fingerprints
    prints._of = _shortened(Fingerprints._of, _fingerprint, recorder)


def _shortened(whole: Callable[..., Any], short: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    calls = Counter[bool]()

    def function(*arguments: Any) -> Any:
        calls[recorder.is_running] += 1
        return (whole if calls[recorder.is_running] <= _WHOLE else short)(*arguments)

    return function


def _words(counter: _Words, key: tuple[int, int]) -> _Words:
    first, second, third, fourth = torch.broadcast_tensors(*counter)
    return first ^ key[0], second ^ key[1], third ^ key[0], fourth ^ key[1]


def _fingerprint(prints: Fingerprints, tensor: Tensor) -> Tensor:
    return tensor.detach().sum(dtype=torch.float32).view(torch.int32).long()
