"""DPO on pairs of answers about images, against transformers and PEFT in fp64 with the formula of the paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from engine.batch import IGNORE_LABEL, Batch
from engine.checkpoint.loading import load_parameters
from engine.conversion.peft_read import AdapterSource
from engine.data.collate import rank_batch
from engine.data.row_shape import RowShape
from engine.data.tokenizer import load_tokenizer
from engine.vision.batch_parts import Images
from engine.vision.data.families import read_vision_family
from engine.vision.data.reader import ImageReader
from tests.support.answer_data import build_pairs
from tests.support.peft_following import ALONE, DECAY, LR, build
from tests.support.qwen_vl import PAD, make_model, stock_outputs

STEPS, BETA, LENGTH = 5, 0.3, 256
TARGETS = r"q_proj|v_proj|down_proj"
TOWER = r"visual\.blocks\..*(qkv|proj)"
PAIRS: list[dict[str, Any]] = [
    {"images": ["0.png", "1.png"], "question": "<image><image>Which is larger?", "answers": ("The first.", "I see.")},
    {"question": "Say something.", "answers": ("Good day to you!", "No.")},
    {"images": ["1.png"], "question": "<image>\nWho is this?", "answers": ("He.", "Nobody at all, or somebody.")},
]
"""With two images, with none, with one."""


def _records() -> list[dict[str, Any]]:
    return [
        {
            **({"images": pair["images"]} if "images" in pair else {}),
            "messages": [{"role": "user", "content": pair["question"]}],
            **{
                side: [{"role": "assistant", "content": answer}]
                for side, answer in zip(("chosen", "rejected"), pair["answers"], strict=True)
            },
        }
        for pair in PAIRS
    ]


def _batch(folder: Path) -> Batch:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in _records()))
    tokenizer = load_tokenizer(folder)
    family = read_vision_family(folder, tokenizer)
    assert family is not None
    data = build_pairs(folder / "pairs.jsonl", tokenizer=tokenizer, seq_length=LENGTH, images=ImageReader(family))
    rows = range(len(PAIRS))
    return rank_batch(data, rows, rows, RowShape(pad_multiple=4))


def _with_adapters(base: nn.Module, start: Path) -> nn.Module:
    """The stock model under PEFT, on language model and tower, every B drawn; saved in `start`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    targets = rf".*language_model.*\.({TARGETS})|.*{TOWER}"
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules=targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(start)
    return model.double()


def _likelihoods(model: Any, batch: Batch, pad: int) -> Tensor:
    """[chosen, rejected, chosen ...], summed over each answer's tokens."""
    return torch.stack(
        [
            -cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_LABEL)
            for _, logits, labels in stock_outputs(model, batch, pad)
        ]
    )


def _their_losses(model: Any, batch: Batch, pad: int) -> list[float]:
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    losses = []
    with torch.no_grad(), model.disable_adapter():
        reference = _likelihoods(model, batch, pad)
    for _ in range(STEPS):
        gain = (_likelihoods(model, batch, pad) - reference).view(-1, 2)
        loss = -logsigmoid(BETA * (gain[:, 0] - gain[:, 1])).mean()
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_losses_follow_peft(tmp_path: Path) -> None:
    """The reference is the base, whose tower has no adapters either."""
    folder = tmp_path / "hf"
    folder.mkdir()
    model, batch = _with_adapters(make_model("qwen2_5_vl", folder), tmp_path / "start"), _batch(folder)
    assert batch.part(Images) is not None and batch.part(Images).documents == (0, 0, 1, 1, 4, 5)
    given = {
        "lora.rank": 3, "lora.alpha": 5, "lora.targets": f"{TARGETS.replace('|', ',')},{TOWER}",
        "data.seq_length": LENGTH, "objective.name": "dpo", "objective.beta": BETA,
        "train.micro_batch_size": len(PAIRS), "train.global_batch_size": len(PAIRS),
    }  # fmt: skip
    training, _ = build(tmp_path, given, ALONE)
    # an adapter to start from would be the reference
    flat, known = training.optimizer.flat, training.source.model
    start = AdapterSource(tmp_path / "start", names=known.names, decoder=known.decoder, with_saved_modules=True)
    load_parameters(flat.master_shards(), start)
    flat.publish()
    found = [training.step([batch], float(len(PAIRS)), LR).loss.item() for _ in range(STEPS)]
    expected = _their_losses(model, batch, load_tokenizer(folder).encode(PAD)[0])
    assert abs(expected[0] - 0.6931) > 1e-3 and expected[-1] < expected[0] - 0.1, "too little to compare"
    assert found == pytest.approx(expected, abs=1e-4)
