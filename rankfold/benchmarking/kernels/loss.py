"""Cross-entropy of given logits, loss and gradient together; and of a frozen head, which never has all logits.

Legend: T tokens, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import IGNORE_LABEL
from engine.distributed.mesh import Axis
from engine.distributed.sharding import split_spec
from engine.layers.context import LayerContext, TensorLayout, TrainingPlan
from engine.layers.linear import ColumnParallelLinear, Section
from engine.ops.cross_entropy import cross_entropy
from engine.ops.head_loss import frozen_head_losses
from engine.ops.inputs import GivenInput
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results
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


def _with_gradient(leaf: Tensor, loss: Callable[[Tensor], Tensor]) -> Results:
    """Returns the loss and its gradient with respect to `leaf`."""
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def logits_loss(setting: Setting) -> Case:
    """Returns the case of the mean loss over tokens with a label, and the logits' gradient."""
    options = setting.options
    logits = setting.draws("loss").normal(options.tokens, options.vocab, scale=2.0)
    labels = _labels(setting, "loss, labels")

    def contestant(loss: Callable[[Tensor], Tensor], note: str = "") -> Contestant:
        # many overwrite the logits: each has its own copy, restored before each run
        leaf = logits.clone().requires_grad_()
        return Contestant(run=lambda: _with_gradient(leaf, loss), reset=lambda: leaf.data.copy_(logits), note=note)

    def engine(kernels: Kernels, leaf: Tensor) -> Tensor:
        losses = cross_entropy(leaf, labels, first_id=0, num_ids=options.vocab, axis=Axis("tp"), kernels=kernels)
        return _mean(losses, labels)

    def plain(leaf: Tensor) -> Tensor:
        return functional.cross_entropy(leaf.float(), labels, ignore_index=IGNORE_LABEL)

    contestants = {
        name: contestant(lambda leaf, kernels=kernels: engine(kernels, leaf))
        for name, kernels in setting.backends.items()
    }
    if TORCH in setting.peers:
        contestants[TORCH] = contestant(plain)
    if "compile" in setting.peers:
        contestants["torch.compile"] = contestant(setting.compiled(plain))
    if "liger" in setting.peers:
        from liger_kernel.ops import LigerCrossEntropyFunction

        contestants["liger"] = contestant(
            lambda leaf: LigerCrossEntropyFunction.apply(leaf, labels, None, IGNORE_LABEL)[0]
        )
    if "quack" in setting.peers:
        from quack import cross_entropy as quack_loss

        contestants["quack"] = contestant(
            lambda leaf: quack_loss(leaf, labels, ignore_index=IGNORE_LABEL, inplace_backward=True)
        )
    return Case(
        size=f"{options.tokens}x{options.vocab}",
        demand=_logits_demand(setting),
        contestants=contestants,
        answer=lambda: _logits_answer(logits, labels),
    )


def _logits_demand(setting: Setting) -> Demand:
    from engine.kernels.triton.cross_entropy import bytes_moved

    return Demand(moved=sum(bytes_moved(setting.options.tokens, setting.options.vocab, setting.itemsize).values()))


def _logits_answer(logits: Tensor, labels: Tensor) -> Results:
    count = (labels != IGNORE_LABEL).sum()
    gradient, loss = torch.empty_like(logits, dtype=torch.float64), 0.0
    for rows in range(0, logits.shape[0], _CHUNK):
        part = slice(rows, rows + _CHUNK)
        wide = logits[part].double().requires_grad_()
        share = functional.cross_entropy(wide, labels[part], ignore_index=IGNORE_LABEL, reduction="sum") / count
        gradient[part] = torch.autograd.grad(share, wide)[0]
        loss = loss + share.detach()
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

    def contestant(loss: Callable[[Tensor], Tensor], note: str = "") -> Contestant:
        leaf = x.clone().requires_grad_()
        return Contestant(run=lambda: _with_gradient(leaf, loss), note=note)

    def engine(kernels: Kernels) -> Contestant:
        operands = _engine_head(setting, kernels, weight).operands

        def loss(leaf: Tensor) -> Tensor:
            losses = frozen_head_losses(
                leaf, GivenInput(), operands, labels, first_id=0, num_ids=options.vocab, leaves=()
            )
            return _mean(losses, labels)

        return contestant(loss)

    def plain(leaf: Tensor) -> Tensor:
        return functional.cross_entropy((leaf @ weight.t()).float(), labels, ignore_index=IGNORE_LABEL)

    contestants = {name: engine(kernels) for name, kernels in setting.backends.items()}
    if TORCH in setting.peers:
        contestants[TORCH] = contestant(plain)
    if "compile" in setting.peers:
        contestants["torch.compile"] = contestant(setting.compiled(plain))
    if "liger" in setting.peers:
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        contestants["liger"] = contestant(
            lambda leaf: LigerFusedLinearCrossEntropyFunction.apply(leaf, weight, labels)[0],
            note="liger waits for the host once per call.",
        )
    return Case(
        size=f"{options.tokens}x{options.hidden}x{options.vocab}",
        demand=_head_demand(setting),
        contestants=contestants,
        answer=lambda: _head_answer(x, weight, labels),
    )


def _head_demand(setting: Setting) -> Demand:
    from engine.kernels.linear_cross_entropy import arithmetic, bytes_moved

    sizes = (setting.options.tokens, setting.options.hidden, setting.options.vocab)
    return Demand(moved=bytes_moved(*sizes, setting.itemsize), operations=arithmetic(*sizes))


def _head_answer(x: Tensor, weight: Tensor, labels: Tensor) -> Results:
    count, wide_weight = (labels != IGNORE_LABEL).sum(), weight.double()
    gradients, loss = [], 0.0
    for rows in range(0, x.shape[0], _CHUNK):
        part = slice(rows, rows + _CHUNK)
        wide = x[part].double().requires_grad_()
        share = functional.cross_entropy(
            wide @ wide_weight.t(), labels[part], ignore_index=IGNORE_LABEL, reduction="sum"
        )
        share = share / count
        gradients.append(torch.autograd.grad(share, wide)[0])
        loss = loss + share.detach()
    return loss, torch.cat(gradients)


LOSS_CASES = {"cross-entropy, loss and gradient": logits_loss}
HEAD_CASES = {"frozen head and loss, forward and input gradient": head_loss}
