"""Backends of flat AdamW's update: torch's fused kernel, the compiled one-pass kernel, or NVIDIA apex's FusedAdam.

A backend is chosen once, when the optimizer is built, and bound to its buffers. All of them compute the same step:
gradients times the clip factor, AdamW (arXiv 1711.05101) with decoupled decay, no change where the step is skipped,
weights published in the dtype the model computes with, the gradient left as zeros. State lies in the same tensors
whichever is used, so a checkpoint of one opens with another. Numbers that change from step to step are device
tensors; no backend waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from engine.errors import UserError
from engine.kernels.native.adamw import adamw_step, square_sum
from engine.kernels.native.loader import native_status
from engine.optim.flat import FlatParameters, Span
from engine.optim.flat_layout import ALIGNMENT, Region, Slot
from engine.optim.publish import CopyPublish
from engine.optim.reduce import plain_square_sum


class Buffers(Protocol):
    """The part of `FlatParameters` that an update needs where it does not write weights itself."""

    master: Tensor
    gradient: Tensor
    spans: tuple[Span, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether the masters are not those of whole parameters."""

    def publish_async(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWState:
    """The tensors that an update reads and writes.

    Args:
        flat: masters, gradients, and where they lie; the gradient is summed over all ranks. `flat.spans` are the parts
            to update: all of it, this rank's own part, or a piece of that.
        exp_avg, exp_avg_sq: fp32 moments, flat like the masters.
        rates: fp32 0-dim learning rate of each factor that spans have.
        step_count: fp32 0-dim count of updates before this one; not changed by the update.
        clip: fp32 0-dim factor of the gradient; None where nothing is clipped.
        skip: fp32 0-dim; where it is 1, weights and moments stay as they are.
        betas, eps, weight_decay: of AdamW; norm weights and biases do not decay.
    """

    flat: Buffers
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rates: Mapping[float, Tensor]
    step_count: Tensor
    clip: Tensor | None
    skip: Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def terms(self, region: Region) -> tuple[float, Tensor]:
        """Returns weight decay and learning rate of a region."""
        return self.weight_decay if region.decays else 0.0, self.rates[region.lr_factor]

    def groups(self) -> Iterator[tuple[float, Tensor, list[Span]]]:
        """Yields weight decay and learning rate of spans that have both in common, and these spans."""
        groups: dict[tuple[bool, float], list[Span]] = {}
        for span in self.flat.spans:
            groups.setdefault((not span.region.decays, span.region.lr_factor), []).append(span)
        for _, spans in sorted(groups.items(), key=lambda item: item[0]):
            yield *self.terms(spans[0].region), spans


class Update(Protocol):
    """Updates masters and moments, publishes the weights, and leaves the gradient as zeros."""

    def __call__(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerBackend:
    """One implementation of the update.

    Args:
        name: as a user asks for it.
        bind: makes the update of given buffers.
        square_sum: fp64 0-dim sum of the squares of a dense fp32 tensor; the gradient's norm is made of it.
    """

    name: str
    bind: Callable[[AdamWState], Update]
    square_sum: Callable[[Tensor], Tensor]


class TorchUpdate:
    """torch's fused AdamW; clipping, publishing and zeroing are passes of their own."""

    def __init__(self, state: AdamWState) -> None:
        self._state = state
        self._groups: list[tuple[float, Tensor, list[list[Tensor]]]] = []
        for decay, rate, spans in state.groups():
            masters, exp_avgs, exp_avg_sqs = (
                [buffer[span.start : span.stop] for span in spans]
                for buffer in (state.flat.master, state.exp_avg, state.exp_avg_sq)
            )
            gradients = [span.gradient for span in spans]
            self._groups.append((decay, rate, [masters, gradients, exp_avgs, exp_avg_sqs]))

    def __call__(self) -> None:
        state = self._state
        for decay, rate, (parameters, gradients, exp_avgs, exp_avg_sqs) in self._groups:
            if state.clip is not None:
                torch._foreach_mul_(gradients, state.clip)
            adamw(
                parameters,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                [],
                [state.step_count.clone() for _ in parameters],  # counted up in place
                foreach=False,
                fused=True,
                found_inf=state.skip,
                amsgrad=False,
                beta1=state.betas[0],
                beta2=state.betas[1],
                lr=rate,
                weight_decay=decay,
                eps=state.eps,
                maximize=False,
            )
        state.flat.publish_async()
        state.flat.gradient.zero_()


_SMALLEST_WRITTEN = 1 << 18
"""Elements. A bf16 parameter that the kernel writes itself takes a call of its own, which pays from here on: a step
over parameters of 2^16 elements took 4.2 ms so and 3.8 ms with all of them copied afterwards; over parameters of 2^18
10.0 and 10.8 ms (two cores, AVX512)."""


class NativeUpdate:
    """The compiled kernel: clipping, update, zeroing and large dense bf16 parameters in one pass over memory."""

    def __init__(self, state: AdamWState) -> None:
        self._state = state
        self._spans: list[tuple[Span, Tensor | None]] = []
        """What a call updates, and the bf16 parameter that it also writes, where there is one."""
        self._publish: Callable[[], None] = state.flat.publish_async
        if state.flat.is_sharded:
            self._spans += [(span, None) for span in state.flat.spans]
            return
        flat = state.flat
        assert isinstance(flat, FlatParameters)
        left: list[Slot] = []
        for region in flat.regions:
            left += self._split(region, flat)
        self._publish = CopyPublish(left, flat.master, [flat.target(slot) for slot in left]).start

    def _split(self, region: Region, flat: FlatParameters) -> list[Slot]:
        """Cuts a region at the parameters that the kernel writes itself; returns the others."""
        start, left = region.start, []

        def add(stop: int, published: Tensor | None = None) -> None:
            if start < stop:
                span = Span(start=start, stop=stop, gradient=flat.gradient[start:stop], region=region)
                self._spans.append((span, published))

        for slot in region.slots:
            parameter = flat.target(slot)
            dense = parameter.dtype == torch.bfloat16 and parameter.is_contiguous()
            if not dense or slot.size < _SMALLEST_WRITTEN:
                left.append(slot)
                continue
            add(slot.offset)
            start, end = slot.offset, slot.offset + slot.size
            add(end, parameter)
            # padding between two parameters is 0 and stays so
            start = -(-end // ALIGNMENT) * ALIGNMENT
        add(region.stop)
        return left

    def __call__(self) -> None:
        state = self._state
        for span, published in self._spans:
            here, (decay, rate) = slice(span.start, span.stop), state.terms(span.region)
            adamw_step(
                state.flat.master[here],
                span.gradient,
                state.exp_avg[here],
                state.exp_avg_sq[here],
                lr=rate,
                step_count=state.step_count,
                betas=state.betas,
                eps=state.eps,
                weight_decay=decay,
                clip=state.clip,
                skip=state.skip,
                low_precision=published,
                zero_gradient=True,
            )
        if state.flat.gradient.numel() > state.flat.master.numel():
            state.flat.gradient.zero_()  # the other ranks' parts
        self._publish()


_LARGEST_PIECE = 1 << 30
"""Elements; FusedAdam's capturable kernel counts the elements of a tensor in 32 bits."""


class _ClipAndSkip:
    """Replaces the torch.amp.GradScaler that FusedAdam asks for the gradient's factor and the skip flag."""

    def __init__(self, state: AdamWState) -> None:
        self._state = state

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return {self._state.skip.device: self._state.skip}

    def _get_scale_async(self) -> Tensor:
        # the gradient is divided by it; in fp64 the factor comes back without a second rounding
        clip = torch.ones_like(self._state.step_count) if self._state.clip is None else self._state.clip
        return clip.double().reciprocal()


class ApexUpdate:
    """NVIDIA apex's FusedAdam on the flat buffers; its lr, step count, skipping and scaling stay on the device."""

    def __init__(self, state: AdamWState) -> None:
        self._state = state
        self._scaler = _ClipAndSkip(state)
        groups, rates = [], []
        moments: dict[nn.Parameter, dict[str, Tensor]] = {}
        for decay, rate, spans in state.groups():
            parameters = []
            for span in spans:
                for start in range(span.start, span.stop, _LARGEST_PIECE):
                    here = slice(start, min(start + _LARGEST_PIECE, span.stop))
                    parameter = nn.Parameter(state.flat.master[here], requires_grad=False)
                    parameter.grad = span.gradient[here.start - span.start : here.stop - span.start]
                    moments[parameter] = {"exp_avg": state.exp_avg[here], "exp_avg_sq": state.exp_avg_sq[here]}
                    parameters.append(parameter)
            groups.append({"params": parameters, "weight_decay": decay})
            rates.append(rate)
        from engine.ops.apex import fused_adam

        self._optimizer = fused_adam()(
            groups,
            lr=0.0,
            betas=state.betas,
            eps=state.eps,
            adam_w_mode=True,
            bias_correction=True,
            set_grad_none=False,
            capturable=True,
            master_weights=False,
        )
        for parameter, held in moments.items():
            self._optimizer.state[parameter] = held
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            group["step"] = torch.zeros(1, dtype=torch.int32, device=state.step_count.device)

    def __call__(self) -> None:
        # FusedAdam counts each group up unless its skip flag is still set from the step before. A run that was resumed
        # has a count of its own, so both are set here: the count's start, and that it counts.
        self._optimizer._dummy_overflow_buf.zero_()
        for group in self._optimizer.param_groups:
            group["step"].copy_(self._state.step_count)
        self._optimizer.step(grad_scaler=self._scaler)
        self._state.flat.publish_async()
        self._state.flat.gradient.zero_()


TORCH = OptimizerBackend(name="torch", bind=TorchUpdate, square_sum=plain_square_sum)
NATIVE = OptimizerBackend(name="native", bind=NativeUpdate, square_sum=square_sum)
APEX = OptimizerBackend(name="apex", bind=ApexUpdate, square_sum=plain_square_sum)


def choose_backend(wanted: str, *, device: torch.device) -> tuple[OptimizerBackend, str]:
    """Chooses the backend for buffers on `device`.

    Args:
        wanted: "auto" (native on a CPU where it is built, else torch), "torch", "native" or "apex".

    Returns:
        The backend, and one sentence with its name and the reason.

    Raises:
        UserError: a backend was asked for by name that cannot run here.
    """
    if wanted == "torch":
        return TORCH, "optimizer: torch (fused AdamW), as asked for"
    if wanted == "apex":
        from engine.ops.apex import apex_status

        status = apex_status("FusedAdam")
        why = status.reason if device.type == "cuda" else f"FusedAdam runs on a GPU, not on {device.type}"
        if device.type != "cuda" or not status.available:
            raise UserError(f"optim.backend is apex, but {why}: set optim.backend to auto or torch.")
        return APEX, f"optimizer: apex ({status.reason}), as asked for"
    native = native_status()
    if device.type == "cpu" and native.available:
        return NATIVE, f"optimizer: native ({native.instruction_set}, one pass over memory)"
    why = native.reason if device.type == "cpu" else f"the native AdamW runs on a CPU, not on {device.type}"
    if wanted == "native":
        raise UserError(f"optim.backend is native, but {why}: set optim.backend to auto or torch.")
    return TORCH, f"optimizer: torch (fused AdamW): {why}"
