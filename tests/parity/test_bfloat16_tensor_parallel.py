"""A bfloat16 base over two tensor ranks: its gradients are as close to exact ones as those of PEFT in one process.

Exact is transformers + PEFT in fp64 on the same weights, which are bfloat16 numbers. Factors B are drawn.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.batch import Batch
from engine.distributed.sharding import ShardSpec
from engine.runtime.launch import Launch
from tests.distributed.cases import cut, make_batch
from tests.parity.test_peft_training import TARGETS
from tests.support.peft_following import build
from tests.support.spawning import spawn

ROWS, LENGTH, SEEDS = 4, 128, 10
LAYOUTS = ({"parallel.sequence": "false"}, {"parallel.sequence": "true"})

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _start(folder: Path, stories_dir: Path, seed: int) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(stories_dir, dtype=torch.bfloat16)
    base.save_pretrained(folder / "hf")
    torch.manual_seed(seed)
    model = get_peft_model(base.float(), LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder / "start")


def _batch(seed: int) -> Batch:
    rows = [(row, (LENGTH,)) for row in range(ROWS)]
    return make_batch(rows, row_length=LENGTH, seq_length=LENGTH, vocab_size=512, seed=seed)


def _of_peft(folder: Path, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder / "hf", dtype=dtype)
    model = PeftModel.from_pretrained(base, folder / "start", is_trainable=True)
    model = model.double() if dtype == torch.float64 else model
    logits = model(input_ids=batch.tokens_BS, position_ids=batch.positions_BS).logits
    logits = logits if dtype == torch.float64 else logits.float()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="none")
    weights = batch.loss_weights_BS.flatten()
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    return {
        name.removeprefix("base_model.model.model.").replace(".default.weight", "").replace("self_attn", "attention"):
            parameter.grad.double()
        for name, parameter in model.named_parameters() if parameter.grad is not None
    }  # fmt: skip


def _on_rank(folder: Path, batch: Batch) -> list[dict[str, tuple[Tensor, ShardSpec]]]:
    found = []
    launch = Launch(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"))
    for layout in LAYOUTS:
        given = {
            **layout, "model.dtype": "bfloat16", "parallel.tensor": 2, "data.seq_length": LENGTH, "lora.rank": 8,
            "lora.alpha": 16, "lora.init_from": folder / "start",
        }  # fmt: skip
        training, _ = build(folder, given, launch)
        training.step.gradients([batch], float(batch.loss_weights_BS.sum()))
        flat = training.optimizer.flat
        found.append({s.entry.name: (s.view(flat.gradient).double().clone(), s.entry.spec) for s in flat.slots})
    return found


def _error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Norm of the difference from the second of each pair, relative to its norm."""
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(apart / sum(float(b.square().sum()) for _, b in pairs))


def test_gradients_are_as_close_as_those_of_peft(stories_dir: Path, tmp_path: Path) -> None:
    theirs: list[float] = []
    ours: list[list[float]] = [[] for _ in LAYOUTS]
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        _start(folder, stories_dir, seed)
        batch = _batch(seed)
        exact = _of_peft(folder, batch, torch.float64)
        rounded = _of_peft(folder, batch, torch.bfloat16)
        theirs.append(_error([(rounded[name], exact[name]) for name in exact]))
        ranks = spawn(_on_rank, world=2, args=(folder, batch))
        for errors, parts in zip(ours, zip(*ranks, strict=True), strict=True):
            pairs = [(grad, cut(exact[name], spec)) for part in parts for name, (grad, spec) in part.items()]
            errors.append(_error(pairs))
    print(f"PEFT {mean(theirs):.4f}, ours {[round(mean(errors), 4) for errors in ours]}")
    for errors in ours:
        assert mean(errors) < 1.15 * mean(theirs)
