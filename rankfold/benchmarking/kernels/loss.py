"""Cross-entropy of given logits, loss and gradient together; and of a frozen head, which never has all logits.

Legend: T tokens, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import IGNORE_LABEL
from engine.distributed.mesh import Axis
from engine.distributed.sharding import split_spec
from engine.kernels.linear_cross_entropy import arithmetic, bytes_moved
from engine.layers.context import LayerContext, TensorLayout, TrainingPlan
from engine.layers.linear import ColumnParallelLinear, Section
from engine.ops.cross_entropy import cross_entropy
from engine.ops.head_loss import frozen_head_losses
from engine.ops.inputs import GivenInput
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting

_CHUNK = 1024
"""Tokens at a time for the answer in float64."""


def _labels(setting: Setting, name: str) -> Tensor:
    """Returns labels, int64 [T]; every eighth token has none."""
    labels = setting.draws(name).ids(setting.options.tokens, setting.options.vocab)
    labels[::8] = IGNORE_LABEL
    return labels


def _mean(losses_T: Tensor, labels_T: Tensor) -> Tensor:
    return losses_T.sum() / (labels_T != IGNORE_LABEL).sum()


def _contestant(
    leaf: Tensor, loss: Callable[[Tensor], Tensor], reset: Callable[[], object] | None = None
) -> Contestant:
    """Returns the loss and its gradient with respect to `leaf` as a contestant."""

    def run() -> Results:
        value = loss(leaf)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    return Contestant(run=run, reset=reset)


def logits_loss(setting: Setting) -> Case:
    """Returns the case of the mean loss over tokens with a label, and the logits' gradient."""
    options = setting.options
    logits = setting.draws("loss").normal(options.tokens, options.vocab, scale=2.0)
    labels = _labels(setting, "loss, labels")

    def contestant(loss: Callable[[Tensor], Tensor]) -> Contestant:
        # many overwrite the logits: each has its own copy, restored before each run
        leaf = logits.clone().requires_grad_()
        return _contestant(leaf, loss, reset=lambda: leaf.data.copy_(logits))

    def engine(kernels: Kernels) -> Contestant:
        sizes = {"first_id": 0, "num_ids": options.vocab, "axis": Axis("tp")}
        return contestant(lambda leaf: _mean(cross_entropy(leaf, labels, **sizes, kernels=kernels), labels))

    def plain(leaf: Tensor) -> Tensor:
        return functional.cross_entropy(leaf.float(), labels, ignore_index=IGNORE_LABEL)

    def liger() -> Contestant:
        from liger_kernel.ops import LigerCrossEntropyFunction

        return contestant(lambda leaf: LigerCrossEntropyFunction.apply(leaf, labels, None, IGNORE_LABEL)[0])

    def quack() -> Contestant:
        from quack import cross_entropy as quack_loss

        return contestant(lambda leaf: quack_loss(leaf, labels, ignore_index=IGNORE_LABEL, inplace_backward=True))

    moved = setting.moved("cross_entropy", options.tokens, options.vocab)
    return Case(
        size=f"{options.tokens}x{options.vocab}",
        demand=Demand(moved=sum(moved.values())),
        contestants=setting.contestants(
            engine,
            torch=lambda: contestant(plain),
            compile=lambda: contestant(torch.compile(plain, dynamic=False)),
            liger=liger,
            quack=quack,
        ),
        answer=lambda: _answer(logits, labels, lambda part: part),
    )


def _answer(x: Tensor, labels: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Results:
    """Computes the mean loss and the gradient of x in float64, some tokens at a time."""
    count = (labels != IGNORE_LABEL).sum()
    gradient, loss = torch.empty_like(x, dtype=torch.float64), torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in range(0, x.shape[0], _CHUNK):
        part = slice(rows, rows + _CHUNK)
        wide = x[part].double().requires_grad_()
        losses = functional.cross_entropy(logits_of(wide), labels[part], ignore_index=IGNORE_LABEL, reduction="sum")
        share = losses / count
        gradient[part] = torch.autograd.grad(share, wide)[0]
        loss += share.detach()
    return loss, gradient


def _engine_head(setting: Setting, kernels: Kernels, weight: Tensor) -> ColumnParallelLinear:
    """Returns the head as the decoder builds it, without adapters."""
    spec = split_spec(tuple(weight.shape), 0, rank=0, size=1, what="vocabulary")
    head = ColumnParallelLinear(
        [Section(name="lm_head", spec=spec)],
        bias=False,
        site=0,
        build=LayerContext(
            layout=TensorLayout(kernels=kernels), plan=TrainingPlan(), device=setting.device, dtype=setting.dtype
        ),
    )
    head.weight_view().copy_(weight)
    return head


def head_loss(setting: Setting) -> Case:
    """Returns the case of the mean loss under a frozen head, and the gradient of its input."""
    options, draws = setting.options, setting.draws("head")
    x = draws.normal(options.tokens, options.hidden)
    weight = draws.normal(options.vocab, options.hidden, scale=options.hidden**-0.5)
    labels = _labels(setting, "head, labels")

    def contestant(loss: Callable[[Tensor], Tensor]) -> Contestant:
        return _contestant(x.clone().requires_grad_(), loss)

    def engine(kernels: Kernels) -> Contestant:
        operands = _engine_head(setting, kernels, weight).operands
        sizes = {"first_id": 0, "num_ids": options.vocab, "leaves": ()}
        return contestant(lambda leaf: _mean(frozen_head_losses(leaf, GivenInput(), operands, labels, **sizes), labels))

    def plain(leaf: Tensor) -> Tensor:
        return functional.cross_entropy((leaf @ weight.t()).float(), labels, ignore_index=IGNORE_LABEL)

    def liger() -> Contestant:
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        found = contestant(lambda leaf: LigerFusedLinearCrossEntropyFunction.apply(leaf, weight, labels)[0])
        return replace(found, note="liger waits for the host once per call.")

    sizes = (options.tokens, options.hidden, options.vocab)
    return Case(
        size="x".join(map(str, sizes)),
        demand=Demand(moved=bytes_moved(*sizes, setting.itemsize), operations=arithmetic(*sizes)),
        contestants=setting.contestants(
            engine,
            torch=lambda: contestant(plain),
            compile=lambda: contestant(torch.compile(plain, dynamic=False)),
            liger=liger,
        ),
        answer=lambda: _answer(x, labels, lambda part: part @ weight.double().t()),
    )


LOSS_CASES = {"cross-entropy, loss and gradient": logits_loss}
HEAD_CASES = {"frozen head and loss, forward and input gradient": head_loss}
