"""The kinds of pass that micro-batches take through the stages of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engine.batch import Batch
from engine.models.decoder import Decoder
from engine.ops.attention.token_context import TokenContext

ReadHead = Callable[[Decoder, Tensor, Batch, TokenContext], Tensor]
"""Computes a result from the last layer's output [T, hidden], in place of a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A kind of pass.

    Args:
        training: whether layers run as they do in training, with dropout and counted routers.
        gradients: whether a backward follows.
        adapters: False leaves them out; not in training.
        head: the result on the last stage. The "loss" of the objective, its "reference" (which the next pass of the
            same micro-batches is compared with), "nothing", or the result of a function of the last layer's output.
    """

    training: bool = False
    gradients: bool = False
    adapters: bool = True
    head: Literal["loss", "reference", "nothing"] | ReadHead = "loss"


TRAINING = Pass(training=True, gradients=True)
COUNTING_PASS = Pass(training=True, head="nothing")
"""Training's layers without a backward: routers are counted."""
EVALUATION = Pass()
REFERENCE = Pass(head="reference")
BASE_REFERENCE = Pass(adapters=False, head="reference")
"""The reference is the model without adapters."""
