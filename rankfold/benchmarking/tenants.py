"""Section `tenants`: the steps of several adapters on one base, together, against each alone and against PEFT.

All sides read one folder of weights and the same adapters, each in its own process, and take turns. A turn is one step
of every adapter, each on a batch of its own. First, losses and gradient norms must be the same.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from engine.batch import Batch
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions as RunModelOptions
from engine.config.optim import OptimOptions
from engine.config.run import RunConfig
from engine.models.dtypes import TORCH_DTYPES
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.model import (
    ADAMW,
    CLIP_GRAD_NORM,
    LEARNING_RATE,
    LORA_ALPHA_OVER_RANK,
    TARGETS,
    draw,
    draw_batches,
    hf_config,
    packed_batch,
)
from rankfold.benchmarking.processes import Offer, Worker
from rankfold.benchmarking.sections import TenantsOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio, summarise, wait_for

TOGETHER, ALONE, PEER = "together", "one after the other", "transformers + PEFT, switching"
MODEL = "model"
_LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 5e-2)}
"""Relative limits of losses and of gradient norms; see section `step`."""


class _Side(Protocol):
    def step(self, lr: float) -> list[tuple[Tensor, Tensor]]:
        """Takes a step of every adapter; returns the loss and the gradient norm of each."""


def _config(options: TenantsOptions, folder: Path, number: int) -> RunConfig:
    how: dict[str, Any] = {"dtype": options.dtype, "kernels": options.kernels}  # whose words the options checked
    return RunConfig(
        model=RunModelOptions(path=str(folder / MODEL), **how),
        lora=LoraOptions(
            rank=options.rank,
            alpha=options.rank * LORA_ALPHA_OVER_RANK,
            dropout=options.dropout,
            targets=TARGETS,
            init_from=str(folder / _name(number)),
        ),
        optim=OptimOptions(**ADAMW, clip_grad_norm=CLIP_GRAD_NORM),
    )


def _launch(device: torch.device) -> Launch:
    return Launch(rank=0, world_size=1, device=device)


class _Together:
    """Tenants of one base, whose rows are multiplied together."""

    def __init__(self, folder: Path, options: TenantsOptions, device: torch.device) -> None:
        from engine.tenants.tenants import Tenants  # needs packages of training's command line

        self._batches = _batches(options, device)
        self._targets = float(options.rows * (options.length - 1))
        first = _config(options, folder, 0)
        self._tenants = Tenants(first, _launch(device), Log(1), tokens=options.joined)
        self._numbers = [self._tenants.add(_config(options, folder, one)) for one in range(options.adapters)]

    def step(self, lr: float) -> list[tuple[Tensor, Tensor]]:
        batches = {number: [batch] for number, batch in zip(self._numbers, self._batches, strict=True)}
        losses = self._tenants.gradients(batches, dict.fromkeys(batches, self._targets))
        return [(loss, self._tenants.update(number, lr, loss)) for number, loss in losses.items()]


class _Alone:
    """A lone run's step for every adapter in turn, each with a model of its own."""

    def __init__(self, folder: Path, options: TenantsOptions, device: torch.device) -> None:
        from engine.training.build import build_training
        from engine.training.start import refuse_early  # needs packages of training's command line

        self._batches = _batches(options, device)
        self._targets = float(options.rows * (options.length - 1))
        self._steps = []
        for number in range(options.adapters):
            config, launch = _config(options, folder, number), _launch(device)
            self._steps.append(build_training(config, launch, *refuse_early(config, launch), Log(1)).step)

    def step(self, lr: float) -> list[tuple[Tensor, Tensor]]:
        found = []
        for one, batch in zip(self._steps, self._batches, strict=True):
            result = one([batch], self._targets, lr)
            found.append((result.loss, result.grad_norm))
        return found


class _Peft:
    """One base with all adapters, of which one is active at a time."""

    def __init__(self, folder: Path, options: TenantsOptions, device: torch.device) -> None:
        from peft import PeftModel

        self._ids, self._device = draw_batches(options, device, options.adapters), device
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=TORCH_DTYPES[options.dtype])
        names = [_name(number) for number in range(options.adapters)]
        model = PeftModel.from_pretrained(base, str(folder / names[0]), adapter_name=names[0], is_trainable=True)
        for name in names[1:]:
            model.load_adapter(str(folder / name), adapter_name=name, is_trainable=True)
        self._model, self._dtype = model.to(device).train(), options.dtype
        self._trained = {
            name: [leaf for leaf_name, leaf in model.named_parameters() if f".{name}." in leaf_name] for name in names
        }
        self._optimizers = {
            name: torch.optim.AdamW(leaves, lr=LEARNING_RATE, **ADAMW, fused=True)
            for name, leaves in self._trained.items()
        }

    def step(self, lr: float) -> list[tuple[Tensor, Tensor]]:
        found = []
        for (name, optimizer), ids in zip(self._optimizers.items(), self._ids, strict=True):
            self._model.set_adapter(name)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype == "bfloat16"):
                loss = self._model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._trained[name], CLIP_GRAD_NORM)
            optimizer.step()
            found.append((loss.detach(), norm))
        return found


_SIDES: dict[str, Callable[[Path, TenantsOptions, torch.device], _Side]] = {
    TOGETHER: _Together,
    ALONE: _Alone,
    PEER: _Peft,
}


def _name(number: int) -> str:
    return f"adapter{number}"


def _batches(options: TenantsOptions, device: torch.device) -> list[Batch]:
    lengths = [options.length] * options.rows
    return [packed_batch(ids, lengths) for ids in draw_batches(options, device, options.adapters)]


def write_folder(options: TenantsOptions, folder: Path) -> None:
    """Writes a random model, and adapters on all linears of its blocks, whose factors B are drawn."""
    from peft import LoraConfig, get_peft_model

    config = transformers.AutoConfig.for_model(**hf_config(options))
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[options.dtype])
    for name, parameter in base.named_parameters():
        draw(name, parameter.data)
    base.save_pretrained(folder / MODEL)
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=options.rank * LORA_ALPHA_OVER_RANK,
        lora_dropout=options.dropout,
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora, adapter_name=_name(0))
    for number in range(1, options.adapters):
        model.add_adapter(_name(number), lora)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            leaf = "lora_A" if ".lora_A." in name else "lora_B"
            draw(f"{name}.{leaf}", parameter.data)
    model.save_pretrained(str(folder))


def offer(side: str, folder: Path, options: TenantsOptions) -> Offer:
    """Returns the calls that the process of a side offers: losses and gradient norms, and the seconds of a turn."""
    device = set_up(options, keeps_freed_memory=side != PEER)
    work = _SIDES[side](folder, options, device)

    def figures() -> list[tuple[float, float]]:
        return [(float(loss), float(norm)) for loss, norm in work.step(0.0)]

    def seconds() -> float:
        gc.collect()
        wait_for(device)
        began = time.perf_counter()
        work.step(LEARNING_RATE)
        wait_for(device)
        return time.perf_counter() - began

    return {"figures": figures, "seconds": seconds}


def _agreement(options: TenantsOptions, figures: dict[str, list[tuple[float, float]]]) -> str:
    """Returns the sentence about an agreement.

    Raises:
        RuntimeError: two sides compute different things.
    """
    errors = [0.0, 0.0]
    for side in (ALONE, PEER):
        if side not in figures or (options.dropout and side == PEER):
            continue  # masks differ
        for ours, theirs in zip(figures[TOGETHER], figures[side], strict=True):
            apart = [abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)]
            errors = [max(*pair) if pair[1] == pair[1] else float("inf") for pair in zip(errors, apart, strict=True)]
    if any(error > limit for error, limit in zip(errors, _LIMITS[options.dtype], strict=True)):
        raise RuntimeError(
            f"the sides compute different things: losses differ by {errors[0]:.1e} and gradient norms by "
            f"{errors[1]:.1e}, relative."
        )
    return (
        f"Of every adapter, losses agree within {errors[0]:.1e} and gradient norms within {errors[1]:.1e}, relative"
        + (", masks of the peer aside." if options.dropout else ".")
    )


def run(options: TenantsOptions) -> Table:
    """Measures all sides in turn.

    Raises:
        UserError: a missing device.
        RuntimeError: two sides compute different things.
    """
    device = set_up(options, keeps_freed_memory=False)
    names: Sequence[str] = [TOGETHER, ALONE, *([PEER] if options.peers != "none" else [])]
    times: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(options, Path(folder))
        sides = {name: Worker(offer, name, Path(folder), options) for name in names}
        try:
            agreement = _agreement(options, {name: side.ask("figures") for name, side in sides.items()})
            for turn in range(options.warmup + options.repeats):
                for name in (names, names[::-1])[turn % 2]:
                    taken = sides[name].ask("seconds")
                    if turn >= options.warmup:
                        times[name].append(taken)
                progress("tenants", f"{max(0, turn + 1 - options.warmup)} of {options.repeats}")
        finally:
            for side in sides.values():
                side.close()
    tokens = options.adapters * options.tokens
    ratios = {name: paired_ratio(times[name], times[TOGETHER]) for name in names[1:]}
    return Table(
        title=f"A step of each of {options.adapters} adapters, {options.rows} x {options.length} tokens: hidden "
        f"{options.hidden}, {options.layers} layers, {options.heads}/{options.kv_heads} heads, MLP "
        f"{options.intermediate}, vocabulary {options.vocab}, rank {options.rank}, {options.dtype}",
        columns=("side", "seconds", "tokens/s"),
        rows=tuple(
            (name, f"{summarise(taken).median:.3f}", f"{tokens / summarise(taken).median:,.0f}")
            for name, taken in times.items()
        ),
        findings=(
            *(
                f"{name} / {TOGETHER}: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), the median and "
                f"extremes of {options.repeats} turns; above 1, together is faster."
                for name, ratio in ratios.items()
            ),
            agreement,
        ),
        machine=describe(device, ("transformers", "peft")),
        data={"section": "tenants", "options": asdict(options), "seconds": times},
    )
