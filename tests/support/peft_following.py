"""The same few steps of training by stock transformers + PEFT + torch.optim.AdamW and by the engine.

The engine takes its whole way from options to step: what is targeted, fused and decayed is what a run would do. PEFT
computes in fp64, on the modules that it finds in the stock model. Weight decay is large, so that what is decayed shows.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.batch import Batch
from engine.config.load import parse_config
from engine.config.rules import check_config
from engine.data.collate import context_part
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import Training, build_training
from engine.training.reports.summary import announce
from engine.training.start_model import check_model, model_source, start_adapter
from tests.distributed.cases import make_batch
from tests.support.commands import options
from tests.support.family_models import make_model, stock_losses

ROWS = ((9, 1, 22), (32,), (5, 5, 14), (30, 2))
"""Lengths of the documents in each row of a batch; the windows of some families are shorter, of some documents too."""

STEPS, LR, DECAY = 8, 2e-3, 0.5
ALONE = Launch(rank=0, world_size=1, device=torch.device("cpu"))


def batches(step: int, parts: int = 1) -> list[Batch]:
    """The micro-batches of a step, the same tokens for every number of them; two batches take turns."""
    size = len(ROWS) // parts
    rows = list(enumerate(ROWS))
    return [
        make_batch(rows[first : first + size], row_length=32, seq_length=32, vocab_size=67, seed=step % 2)
        for first in range(0, len(rows), size)
    ]


def peft_start(name: str, folder: Path, *, tied: bool = False, **settings: Any) -> nn.Module:
    """A stock model of a family under PEFT; the base lies in `folder`/hf and the adapter in `folder`/start.

    B, biases, magnitudes and what trains in full are drawn, so that nothing starts from zeros or the base's values.
    """
    base = make_model(name, folder / "hf", **({"tie_word_embeddings": True} if tied else {}))
    return peft_on(base, folder, **settings)


def peft_on(base: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    """A stock model under PEFT, with the adapter in `folder`/start, drawn as in `peft_start`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    chosen = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(base, LoraConfig(**chosen))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key or "lora_embedding_A" in key:
                parameter.normal_(std=0.1)
            if "magnitude" in key:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
            if "modules_to_save" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder / "start")
    return model


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that transformers' Trainer decays: all but norms and biases, by their names. Nemotron-H's
    last norm, `norm_f`, is one too, which those patterns miss."""
    from transformers import Trainer

    return {name for name in Trainer.get_decay_parameter_names(None, model) if not name.endswith(".norm_f.weight")}


def their_losses(
    model: nn.Module, *, steps: int = STEPS, rate: Callable[[str], float] = lambda name: LR, eps: float = 1e-8
) -> list[float]:
    """The loss of each step, in fp64; `model` is trained.

    Args:
        rate: name of a parameter -> its learning rate.
        eps: of AdamW.
    """
    model = model.double().train()
    decayed = decayed_names(model)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    groups = [
        {"params": [value], "weight_decay": DECAY if key in decayed else 0.0, "lr": rate(key)}
        for key, value in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=eps)
    losses = []
    for step in range(steps):
        (batch,) = batches(step)
        loss = stock_losses(model, batch)[1].sum() / batch.loss_weights_BS.sum()
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def build(folder: Path, given: dict[str, Any], launch: Launch) -> tuple[Training, list[str]]:
    """A run of the base in `folder`/hf on this rank, ready to train, and what it says first."""
    settings = {
        "model.path": folder / "hf", "model.dtype": "float32", "data.train": "none", "data.seq_length": 32,
        "train.steps": STEPS, "train.micro_batch_size": len(ROWS), "train.global_batch_size": len(ROWS),
        "optim.weight_decay": DECAY, **given,
    }  # fmt: skip
    config = parse_config(options(settings))
    check_config(config)
    source = model_source(config)
    plan = check_model(config, source.model, launch.world_size, source.weights)
    start_adapter(config, source, plan)
    lines = io.StringIO()
    log = Log(launch.rank, lines)
    training = build_training(config, launch, source, plan, log)
    announce(config, launch, training, log, num_micro_batches=len(ROWS) // config.train.micro_batch_size)
    return training, lines.getvalue().splitlines()


def our_losses(
    folder: Path, given: dict[str, Any], launch: Launch | None = None, *, steps: int = STEPS
) -> tuple[list[float], list[str]]:
    """The loss of each step, and what the run said first."""
    training, lines = build(folder, given, launch or ALONE)
    return take_steps(training, given, steps), lines


def take_steps(training: Training, given: dict[str, Any], steps: int = STEPS) -> list[float]:
    """The loss of each step."""
    return [training.step(*rank_batches(training, given, step), LR).loss.item() for step in range(steps)]


def rank_batches(training: Training, given: dict[str, Any], step: int) -> tuple[list[Batch], float]:
    """This rank's micro-batches of a step, and the targets of all ranks."""
    found, mesh = batches(step, len(ROWS) // given.get("train.micro_batch_size", len(ROWS))), training.mesh
    targets = float(sum(batch.loss_weights_BS.sum() for batch in found))
    held = found[mesh.dp.rank :: mesh.dp.size]
    return [context_part(batch, size=mesh.cp.size, rank=mesh.cp.rank) for batch in held], targets
