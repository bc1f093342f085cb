"""A client of three models on a backend in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.telemetry.log import Log
from rankfold.benchmarking.small_run import SMALL_LLAMA, write_small_run
from rankfold.serving.exchange import Outcome, ServedModel, Task
from rankfold.serving.folder import ServerFolder
from rankfold.serving.tenant_backend import ALPHA, TenantBackend
from tests.serving.bodies import adam, forward_backward, read_output
from tests.tenants.test_shared_base import SMALLER, launched

VOCAB = SMALLER["vocab_size"]
MODEL, OTHER, THIRD = "s:train:0", "s:train:1", "s:train:2"
LORA = {
    MODEL: {"rank": 4, "seed": 3},
    OTHER: {"rank": 2, "seed": 9, "train_unembed": False, "train_attn": False},
    THIRD: {"rank": 4, "seed": 5},
}


def write_base(folder: Path) -> Path:
    """Has transformers write a checkpoint with random weights; returns its folder."""
    from transformers import AutoConfig, LlamaForCausalLM

    write_small_run(folder, {**SMALL_LLAMA, **SMALLER})
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder, initializer_range=0.1))
    model.save_pretrained(folder)
    return folder


class Client:
    """Executes commands of three models on a backend.

    Args:
        base: folder of the model.
        state: folder of the server.
        resident: GiB of adapters on the device.
    """

    def __init__(self, base: Path, state: Path, *, resident: float | None = None) -> None:
        self.folder = ServerFolder(state)
        self.backend = TenantBackend(
            ServedModel(path=base, dtype="float32", tokens=40, slots=4, resident=resident),
            self.folder,
            launched(),
            Log(1),
        )
        self.seq = {MODEL: 0, OTHER: 0, THIRD: 0}

    def task(self, model: str, kind: str, body: bytes, **asked: Any) -> Task:
        seq = self.seq[model]
        self.seq[model] = seq + 1
        body = body or json.dumps({"model_id": model, "seq_id": seq, **asked}).encode()
        return Task(request=f"{model}:{seq}", kind=kind, target=model, seq=seq, body=body)

    def do(self, model: str, kind: str, body: bytes = b"", **asked: Any) -> Outcome:
        (outcome,) = self.backend.execute([self.task(model, kind, body, **asked)])
        return outcome

    def create(self, model: str) -> None:
        assert self.do(model, "create_model", lora_config=LORA[model]).good

    def train(self, model: str, data: list[dict[str, Any]], loss: str = "cross_entropy", **numbers: float) -> Outcome:
        return self.do(model, "forward_backward", forward_backward(model, self.seq[model], data, loss, **numbers))

    def score(self, model: str, data: list[dict[str, Any]]) -> tuple[float, list[Any]]:
        body = forward_backward(model, self.seq[model], data, forward_only=True)
        return read_output(self.do(model, "forward_backward", body).body)

    def step(self, model: str, **options: float) -> Outcome:
        return self.do(model, "optim_step", adam(model, self.seq[model], **options))

    def samples(self, path: str, *bodies: bytes) -> list[Outcome]:
        tasks = [Task(request=f"t:{n}", kind="asample", target=path, seq=n, body=one) for n, one in enumerate(bodies)]
        return self.backend.execute(tasks)

    def weights(self, model: str) -> dict[str, Tensor]:
        entries = self.backend._training(model).stages.entries()
        return {entry.name: entry.parameter.data for entry in entries if entry.sink is not None}


def peft_model(base: Path, weights: Mapping[str, Tensor]) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = LoraConfig(r=4, lora_alpha=ALPHA, target_modules=linears)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, tensor in peft_tensors(model).items():
        tensor.data.copy_(weights[name])
    return model


def peft_tensors(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            name = (
                name.removeprefix("base_model.model.")
                .removeprefix("model.")
                .replace(".default.weight", "")
                .replace("self_attn", "attention")
            )
            found[name] = tensor
    return found
