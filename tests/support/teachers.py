"""Models and adapters for a run to learn from, written by transformers and PEFT, and their probabilities by both."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.rollout_runs import rollout_settings


def distilled_settings(
    folder: Path, teachers: tuple[str, ...], *, vocab_size: int | None = None, **changes: object
) -> dict[str, object]:
    """Options of a run whose model has weights on the disk, and which learns from teachers alone: `other`, a model with
    more layers, `adapter`, a PEFT adapter on the run's model, or `base`."""
    settings = rollout_settings(folder, **changes)
    for name in ("rollout.rewards", "rollout.reward_weights", "model.init"):
        if name.replace(".", "__") not in changes:
            del settings[name]
    _draw_model(folder / "model", folder / "model", seed=1)
    if "other" in teachers:
        more = {} if vocab_size is None else {"vocab_size": vocab_size}
        _draw_model(folder / "model", folder / "other", seed=2, num_hidden_layers=6, **more)
    if "adapter" in teachers:
        _draw_adapter(folder / "model", folder / "adapter", seed=3)
    paths = [name if name == "base" else str(folder / name) for name in teachers]
    return settings | {"distillation.teachers": f"[{','.join(paths)}]", "rollout.num_generations": 1}


def stock_logps(folder: Path, teacher: str, rows: list[tuple[list[int], int]], temperature: float) -> list[Tensor]:
    """The log-probabilities of the last tokens of some rows, by transformers and PEFT.

    Args:
        folder: of `distilled_settings`.
        rows: the ids of each, and how many of its last tokens are wanted.
    """
    model = AutoModelForCausalLM.from_pretrained(folder / ("other" if teacher == "other" else "model"))
    if teacher == "adapter":
        model = PeftModel.from_pretrained(model, folder / "adapter")
    found = []
    for ids, count in rows:
        with torch.no_grad():
            logits = model.eval()(torch.tensor([ids])).logits[0].float() / temperature
        logps = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        found.append(logps[-count:])
    return found


def _draw(model: nn.Module, std: float) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)


def _draw_model(like: Path, folder: Path, *, seed: int, **changes: object) -> None:
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(like, **changes)
    model = AutoModelForCausalLM.from_config(config)
    _draw(model, 0.15)
    model.save_pretrained(folder)
    if folder != like:
        for path in like.glob("*token*"):
            shutil.copy(path, folder)


def _draw_adapter(model: Path, folder: Path, *, seed: int) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    _draw(nn.ParameterList(p for name, p in adapted.named_parameters() if "lora_" in name), 0.3)
    adapted.save_pretrained(folder)
