"""A reward model of each family that transformers has a class for: written, and scored by that class as here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf
from engine.conversion.live_logits import live_logits
from engine.errors import UserError
from engine.judges.model import CLASSES, ENDING, JudgeSource
from tests.support.family_models import make_model
from tests.support.family_table import FAMILIES
from tests.support.sweeps import sampled

_TEXT = {"Gemma3": "Gemma3Text", "Qwen3_5": "Qwen3_5Text"}
HAVE_CLASSES = [
    name
    for name, (prefix, _) in FAMILIES.items()
    if _TEXT.get(prefix, prefix) in CLASSES.values() and name != "llama fused"  # which no class opens
]
QUICK = ("llama", "gemma2", "gemma3", "phi3", "qwen3 moe")


def test_classes_are_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as STOCK

    assert {kind: STOCK.get(kind) for kind in CLASSES} == {kind: name + ENDING for kind, name in CLASSES.items()}


@pytest.mark.parametrize("name", sampled(HAVE_CLASSES, QUICK))
def test_transformers_scores_alike(name: str, tmp_path: Path) -> None:
    """Texts of unequal lengths, padded."""
    from transformers import AutoModelForSequenceClassification

    make_model(name, tmp_path / "model")
    source = JudgeSource(open_source(tmp_path / "model"), seed=3, padding_id=66)
    export_hf(source, tmp_path / "judge")
    stock, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "judge", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(66, (3, 12), generator=torch.Generator().manual_seed(5))
    lengths = (12, 7, 10)
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        expected = stock.eval()(input_ids=torch.where(mask > 0, tokens, 66), attention_mask=mask).logits
    written = open_source(tmp_path / "judge")
    own = torch.cat(
        [
            live_logits(written.model.decoder, written, row[None, :length])[:, -1]
            for row, length in zip(tokens, lengths, strict=True)
        ]
    )
    assert expected.std() > 1e-3
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_class_is_refused(tmp_path: Path) -> None:
    make_model("granite", tmp_path)
    with pytest.raises(UserError, match="a granite model has no class for sequence classification in transformers"):
        JudgeSource(open_source(tmp_path), seed=3)


def test_layers_that_are_not_the_engines_are_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    with pytest.raises(UserError, match="its layers are not the engine's own"):
        JudgeSource(open_source(tmp_path, "adopted"), seed=3)


def test_the_head_is_drawn_as_transformers_draws_it(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) | {"initializer_range": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    heads = [JudgeSource(open_source(tmp_path), seed=seed).read_whole("lm_head.weight") for seed in (3, 3, 4)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.3 < heads[0].std() < 0.7 and heads[0].shape == (1, 40)
