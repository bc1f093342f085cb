"""One short training, by a trainer of TRL's and through the engine's command line, and how close the two came.

Both start from the `model` and `adapter` of `tests.parity.preference_data.save_model_and_adapter` and take AdamW steps
of the same batches.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import options, run_tool

NEEDS_TRL = [
    pytest.mark.distributed,
    # looked up, not imported: that takes seconds, and brings Triton into the process that collects the tests
    pytest.mark.skipif(find_spec("trl") is None, reason="needs trl"),
]
"""The marks of a module that compares with TRL."""

STEPS, LR, BATCH, SEED = 20, 2e-3, 4, 11

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one-process": (1, []),
    "tensor-2": (2, ["--parallel.tensor", "2"]),
    "pipeline-2": (2, ["--parallel.pipeline", "2"]),
    "context-2": (2, ["--parallel.context", "2"]),
    "data-2-sharded": (2, ["--parallel.shard", "parameters"]),
}
"""Name -> ranks, and options of the engine."""


class RecordedSteps:
    """Stands before a trainer of TRL's among the bases of a class, and keeps the figures of every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._logged: list[dict[str, float]] = []
        self._losses: list[float] = []
        super().__init__(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        if "loss" in logs:
            self._logged.append(dict(self.state.log_history[-1]))

    def _compute_loss(self, model, inputs, return_outputs):
        result = super()._compute_loss(model, inputs, return_outputs)
        self._losses.append((result[0] if return_outputs else result).item())
        return result

    def figures(self) -> list[dict[str, float]]:
        """What was logged of each step, but the loss as it was computed, which the log rounds."""
        return [{**logged, "loss": value} for logged, value in zip(self._logged, self._losses, strict=True)]


def trl_settings(out: Path, *, steps: int, length: int) -> dict[str, Any]:
    """What every TRL configuration is given: the engine's settings of `train`, and nothing random, saved or sent."""
    return {
        "output_dir": str(out), "per_device_train_batch_size": BATCH, "max_steps": steps, "learning_rate": LR,
        "lr_scheduler_type": "constant", "weight_decay": 0.01, "max_grad_norm": 1.0, "logging_steps": 1,
        "max_length": length, "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "save_strategy": "no", "gradient_checkpointing": False, "disable_dropout": True, "seed": SEED,
        "dataloader_pin_memory": False,
    }  # fmt: skip


def trl_start(workspace: Path) -> tuple[Any, Any]:
    """The model with its adapter, to be trained, and the tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, workspace / "adapter", is_trainable=True)
    return model, AutoTokenizer.from_pretrained(workspace / "model")


def train(
    workspace: Path, data: str, name: str, ranks: int, settings: dict[str, object], *more: str
) -> list[dict[str, Any]]:
    """Figures of every step of a run of the engine in the folder `name`, with `settings` beside those of all runs."""
    common: dict[str, object] = {
        "model.path": workspace / "model", "lora.init_from": workspace / "adapter", "lora.rank": 4, "lora.alpha": 8,
        "data.train": workspace / data, "train.steps": STEPS, "train.seed": SEED, "train.micro_batch_size": 2,
        "train.global_batch_size": BATCH, "optim.lr": LR, "optim.schedule": "constant", "optim.weight_decay": 0.01,
        "checkpoint.dir": workspace / name, "objective.reference": "initial", "model.dtype": "float32",
    }  # fmt: skip
    run_tool("pretrain_lora", *options({**common, **settings}), *more, ranks=ranks)
    return metrics(workspace / name, "loss")


def metrics(folder: Path, figure: str) -> list[dict[str, Any]]:
    """A run's records that have the figure."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if figure in record]


def check_losses(name: str, found: list[dict[str, Any]], expected: list[dict[str, float]], steps: int) -> None:
    """All steps are there, and their losses agree."""
    assert len(found) == len(expected) == steps, (len(found), len(expected), steps)
    largest = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in zip(found, expected, strict=True))
    print(f"{name}: largest loss deviation {largest:.2e}, loss {found[0]['loss']:.4f} -> {found[-1]['loss']:.4f}")
    assert largest < 1e-4, (name, largest)


BALANCE = 0.5
"""Coefficient of the routers' auxiliary loss, where there is one."""
BALANCED: dict[str, tuple[int, list[str]]] = {
    "one-process": (1, []),
    "experts-2": (2, ["--parallel.expert", "2"]),
    "pipeline-2": (2, ["--parallel.pipeline", "2"]),
    "experts-2-tensor-2": (2, ["--parallel.expert", "2", "--parallel.tensor", "2"]),
}
"""Layouts of a mixture, as `LAYOUTS`."""


def with_balance(found: list[dict[str, Any]], expected: list[dict[str, float]]) -> list[dict[str, Any]]:
    """The engine's records with the auxiliary loss in the loss, as TRL reports it; checks it by itself."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["router_aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-5), ours["step"]
    return [{**ours, "loss": ours["loss"] + BALANCE * ours["router_aux_loss"]} for ours in found]


def check_adapter(workspace: Path, name: str, theirs: Path) -> None:
    """The adapter of the run `name`, exported, is that of the PEFT folder `theirs`."""
    out = workspace / f"{name}-export"
    run_tool("convert", "export", "--source", workspace / name, "--out", out, "--format", "peft")
    ours_adapter, theirs_adapter = (load_file(folder / "adapter_model.safetensors") for folder in (out, theirs))
    assert ours_adapter.keys() == theirs_adapter.keys(), ours_adapter.keys() ^ theirs_adapter.keys()
    relative = {
        key: ((ours_adapter[key] - value).norm() / value.norm()).item() for key, value in theirs_adapter.items()
    }
    print(f"{name}: largest adapter deviation {max(relative.values()):.2e}")
    assert max(relative.values()) < 1e-3, sorted(relative.items(), key=lambda item: -item[1])[:3]
