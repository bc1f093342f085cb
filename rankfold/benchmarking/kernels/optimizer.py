"""Cases of AdamW: the update alone, and everything that a step does after backward (norm, clip, update, publish,
clear).

The parameters are those of adapters: pairs of [r, h] and [h, r].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.distributed.mesh import single_process_mesh
from engine.distributed.sharding import replicated_spec
from engine.errors import UserError
from engine.kernels.native.adamw import adamw_step
from engine.kernels.native.loader import native_status
from engine.layers.module import ShardedModule
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import OptimizerBackend, choose_backend
from engine.optim.flat import FlatParameters
from rankfold.benchmarking.case import LIMITS, TORCH, Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.model import ADAMW, CLIP_GRAD_NORM, LEARNING_RATE

_BETAS, _EPS, _WEIGHT_DECAY = ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"]

_FIRST_MOMENT, _SECOND_MOMENT = -1e-3, 1e-6
"""Moments before the step over the gradient (its square). With zero moments a wrong clip factor would hardly show."""
_STATE_BYTES = 7 * 4
"""Bytes per parameter of an fp32 update: weight, gradient and two moments read, weight and moments written."""


class _State:
    """The fp32 weight, gradient and moments of one contestant, which can be reset."""

    def __init__(self, setting: Setting) -> None:
        draws, count = setting.draws("adamw"), setting.options.trained
        self._first = [draws.normal(count, dtype=torch.float32) for _ in range(3)]
        self._first.append(draws.normal(count, dtype=torch.float32).square_())
        self.weight, self.gradient, self.exp_avg, self.exp_avg_sq = (tensor.clone() for tensor in self._first)

    def reset(self) -> None:
        for tensor, first in zip(self.all(), self._first, strict=True):
            tensor.copy_(first)

    def all(self) -> list[Tensor]:
        return [self.weight, self.gradient, self.exp_avg, self.exp_avg_sq]

    def results(self) -> Results:
        return self.weight, self.exp_avg, self.exp_avg_sq


def _torch_update(setting: Setting, **how: bool) -> Contestant:
    """Returns torch.optim's functional AdamW on one flat tensor as a contestant."""
    from torch.optim.adamw import adamw

    state = _State(setting)
    step = torch.zeros((), device=setting.device if how["fused"] else "cpu")  # where torch.optim keeps it

    def run() -> Results:
        adamw(
            *([tensor] for tensor in state.all()),
            [],
            [step],
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=LEARNING_RATE,
            weight_decay=_WEIGHT_DECAY,
            eps=_EPS,
            maximize=False,
            **how,
        )
        return state.results()

    return Contestant(run=run, reset=partial(_reset_all, state.reset, step.zero_))


def _reset_all(*resets: Callable[[], object]) -> None:
    for reset in resets:
        reset()


def _native_update(setting: Setting) -> Contestant:
    state = _State(setting)
    rate, step_count = torch.tensor(LEARNING_RATE), torch.zeros(())

    def run() -> Results:
        adamw_step(*state.all(), lr=rate, step_count=step_count, **ADAMW)
        return state.results()

    return Contestant(run=run, reset=state.reset)


def update(setting: Setting) -> Case:
    contestants: dict[str, Contestant] = {}
    if setting.device.type == "cpu" and native_status().available:
        contestants["native"] = _native_update(setting)
    if TORCH in setting.peers:
        contestants[TORCH] = _torch_update(setting, fused=True, foreach=False)
        contestants["torch, foreach"] = _torch_update(setting, fused=False, foreach=True)

    def answer() -> Results:
        state = _State(setting)
        return _first_update(*(tensor.double() for tensor in state.all()))

    return Case(
        size=f"{setting.options.trained:,}",
        demand=Demand(moved=_STATE_BYTES * setting.options.trained),
        contestants=contestants,
        answer=answer,
        limit=LIMITS[torch.float32],
    )


def _first_update(weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Results:
    """Computes AdamW's formula at t = 1: weight and both moments."""
    exp_avg = _BETAS[0] * exp_avg + (1 - _BETAS[0]) * gradient
    exp_avg_sq = _BETAS[1] * exp_avg_sq + (1 - _BETAS[1]) * gradient.square()
    denominator = (exp_avg_sq / (1 - _BETAS[1])).sqrt() + _EPS
    decayed = weight * (1 - LEARNING_RATE * _WEIGHT_DECAY)
    return decayed - LEARNING_RATE / (1 - _BETAS[0]) * exp_avg / denominator, exp_avg, exp_avg_sq


class _Adapters(ShardedModule):
    """Pairs of factors, with about the requested number of parameters in all."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        options, draws = setting.options, setting.draws("after backward")
        for index in range(max(1, round(options.trained / (2 * options.rank * options.hidden)))):
            for leaf, shape in (("lora_A", (options.rank, options.hidden)), ("lora_B", (options.hidden, options.rank))):
                spec = replicated_spec(shape, rank=0, size=1)
                self.own(f"layers.{index}.{leaf}", draws.normal(*shape), spec, trainable=True)


def _engine_after(setting: Setting, backend: OptimizerBackend) -> Contestant:
    flat = FlatParameters(_Adapters(setting).entries, setting.device)
    optimizer = FlatAdamW(flat, single_process_mesh(), **ADAMW, clip_grad_norm=CLIP_GRAD_NORM, backend=backend)
    masters = flat.master.clone()
    gradients = _gradients(setting, [slot.entry.parameter.shape for slot in reversed(flat.slots)])

    def reset() -> None:
        flat.master.copy_(masters)
        for slot, gradient in zip(reversed(flat.slots), gradients, strict=True):
            slot.view(flat.gradient).copy_(gradient)
            slot.view(optimizer.exp_avg).copy_(gradient).mul_(_FIRST_MOMENT)
            slot.view(optimizer.exp_avg_sq).copy_(gradient.square()).mul_(_SECOND_MOMENT)
        optimizer.step_count.zero_()

    def run() -> Results:
        optimizer.step(LEARNING_RATE)
        return [slot.view(flat_) for flat_ in (flat.master, optimizer.exp_avg) for slot in reversed(flat.slots)]

    return Contestant(run=run, reset=reset)


def _gradients(setting: Setting, shapes: list[torch.Size]) -> list[Tensor]:
    draws = setting.draws("after backward, gradients")
    return [draws.normal(*shape, dtype=torch.float32) for shape in shapes]


def _torch_after(setting: Setting) -> Contestant:
    """Returns clip_grad_norm_, fused AdamW and zero_grad over fp32 parameters, one tensor each, as a contestant."""
    first = [entry.parameter.detach().float() for entry in _Adapters(setting).entries]
    gradients = _gradients(setting, [tensor.shape for tensor in first])
    weights = [tensor.clone().requires_grad_() for tensor in first]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, **ADAMW, fused=True)

    def reset() -> None:
        for weight, start, gradient in zip(weights, first, gradients, strict=True):
            weight.data.copy_(start)
            weight.grad = gradient.clone()
            state = optimizer.state[weight]
            state["step"].zero_()
            state["exp_avg"].copy_(gradient).mul_(_FIRST_MOMENT)
            state["exp_avg_sq"].copy_(gradient.square()).mul_(_SECOND_MOMENT)

    def run() -> Results:
        torch.nn.utils.clip_grad_norm_(weights, CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [weight.detach() for weight in weights] + [optimizer.state[weight]["exp_avg"] for weight in weights]

    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # makes the state that `reset` sets
    return Contestant(run=run, reset=reset)


def after_backward(setting: Setting) -> Case:
    contestants: dict[str, Contestant] = {}
    for name in ("torch", "native", "apex"):
        try:
            backend, _ = choose_backend(name, device=setting.device)
        except UserError:
            continue
        contestants[f"engine, {name}"] = _engine_after(setting, backend)
    if TORCH in setting.peers:
        contestants[TORCH] = _torch_after(setting)
    entries = _Adapters(setting).entries

    def answer() -> Results:
        first = [entry.parameter.detach().double() for entry in entries]
        gradients = [gradient.double() for gradient in _gradients(setting, [tensor.shape for tensor in first])]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        factor = (CLIP_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0)
        weights, averages = [], []
        for weight, gradient in zip(first, gradients, strict=True):
            moments = gradient * _FIRST_MOMENT, gradient.square() * _SECOND_MOMENT
            new, average, _ = _first_update(weight, factor * gradient, *moments)
            weights.append(new)
            averages.append(average)
        return weights + averages

    count = sum(entry.parameter.numel() for entry in entries)
    return Case(
        size=f"{count:,} in {len(entries)} tensors",
        # the gradient is read once more for its norm and cleared; the weights are published in the activations' dtype
        demand=Demand(moved=(_STATE_BYTES + 8 + setting.itemsize) * count),
        contestants=contestants,
        answer=answer,
        limit=LIMITS[torch.float32],
    )


CASES = {"AdamW update": update, "AdamW after backward: norm, clip, update, publish, clear": after_backward}
