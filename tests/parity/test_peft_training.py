"""A whole LoRA training, through the command line, against transformers + PEFT on a real model and real text.

Both start from one PEFT adapter folder whose B is drawn non-zero, see the same batches, and take 50 AdamW steps. The
engine's batches come from its own loader; what PEFT does with them is transformers', PEFT's and torch's arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.batch import Batch
from engine.data.loader import DataLoader
from engine.data.row_shape import RowShape
from engine.data.text_reader import build_texts
from engine.data.tokenizer import load_tokenizer
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays
from tests.support.sweeps import sampled

STEPS, LR, ROWS, LENGTH, SEED = 50, 1e-3, 4, 128, 7
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

pytestmark = pytest.mark.distributed


def _peft_model(stories_dir: Path, adapter: Path | None = None):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(stories_dir, dtype=torch.float32)
    if adapter is not None:
        return PeftModel.from_pretrained(base, adapter, is_trainable=True)
    settings = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(base, settings)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> Path:
    """An adapter with non-zero B, and a piece of real text."""
    folder = tmp_path_factory.mktemp("parity")
    torch.manual_seed(SEED)
    model = _peft_model(stories_dir)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder / "adapter")
    write_plays(folder / "text.txt", data_dir, 60000)
    return folder


def _batches(workspace: Path, stories_dir: Path) -> list[tuple[list[Batch], float]]:
    tokenizer = load_tokenizer(stories_dir)
    dataset = build_texts(workspace / "text.txt", tokenizer=tokenizer, seq_length=LENGTH)
    loader = DataLoader(dataset, RowShape(micro_batch_size=ROWS // 2), global_batch_size=ROWS, seed=SEED, num_workers=0)
    return [(loader.batches(step * ROWS), loader.target_count(step * ROWS)) for step in range(STEPS)]


@pytest.fixture(scope="module")
def reference(workspace: Path, stories_dir: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final adapter of transformers + PEFT + torch.optim.AdamW."""
    model = _peft_model(stories_dir, workspace / "adapter")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    curve = []
    for batches, targets in _batches(workspace, stories_dir):
        total = 0.0
        for batch in batches:
            logits = model(input_ids=batch.tokens_BS, position_ids=batch.positions_BS).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / targets).backward()
            total += loss.item()
        curve.append(total / targets)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(workspace / "reference")
    return curve, load_file(workspace / "reference" / "adapter_model.safetensors")


def _train(workspace: Path, model: Path, run_dir: Path, ranks: int, *more: str) -> None:
    settings: dict[str, object] = {
        "model.path": model, "lora.init_from": workspace / "adapter", "lora.rank": 8, "lora.alpha": 16,
        "data.train": workspace / "text.txt", "data.seq_length": LENGTH, "train.steps": STEPS, "train.seed": SEED,
        "train.micro_batch_size": ROWS // 2, "train.global_batch_size": ROWS, "optim.lr": LR,
        "optim.schedule": "constant", "optim.weight_decay": 0.01, "checkpoint.dir": run_dir,
    }  # fmt: skip
    run_tool("pretrain_lora", *options(settings), *more, ranks=ranks)


LAYOUTS = {
    "one-process": (1, []),
    "tensor-2": (2, ["--parallel.tensor", "2", "--parallel.sequence", "false"]),
    "tensor-2-sequence": (2, ["--parallel.tensor", "2"]),
    "pipeline-2-virtual": (2, ["--parallel.pipeline", "2", "--parallel.virtual", "2"]),
    "context-2": (2, ["--parallel.context", "2"]),
}


@pytest.mark.parametrize("layout", sampled(LAYOUTS, ["one-process"]))
def test_losses_and_adapter_follow_peft(
    layout: str, workspace: Path, stories_dir: Path, reference: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    """Every step's loss within 1e-4; each final factor within 1e-3 of PEFT's, as norm of the difference over norm."""
    ranks, arguments = LAYOUTS[layout]
    run_dir = workspace / layout
    _train(workspace, stories_dir, run_dir, ranks, *arguments)
    found = list(losses(run_dir).values())
    expected_losses, expected = reference
    assert len(found) == STEPS
    deviations = [abs(ours - theirs) for ours, theirs in zip(found, expected_losses, strict=True)]
    print(f"{layout}: largest loss deviation {max(deviations):.2e}, loss {found[0]:.4f} -> {found[-1]:.4f}")
    assert max(deviations) < 1e-4
    assert found[-1] < found[0] - 0.1, "the run learned nothing, so agreement would say little"

    out = workspace / f"{layout}-export"
    run_tool("convert", "export", "--source", run_dir, "--out", out, "--format", "peft")
    ours = load_file(out / "adapter_model.safetensors")
    assert ours.keys() == expected.keys()
    relative = {key: ((ours[key] - expected[key]).norm() / expected[key].norm()).item() for key in expected}
    print(f"{layout}: largest adapter deviation {max(relative.values()):.2e}")
    assert max(relative.values()) < 1e-3, sorted(relative.items(), key=lambda item: -item[1])[:3]
