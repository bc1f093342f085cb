"""Which runs share the beginnings of their documents, and the sentences of those that cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.config.load import from_yaml
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.rollouts.data.completions import Completion, completion_columns
from engine.training.prefixes import choose_sharing
from engine.vision.layers.fronts import ImageTower
from tests.distributed.cases import small_config
from tests.support.toy_vision import ToyVisionConfig

DECODER: DecoderConfig = small_config()
PAIRS: dict[str, Any] = {"objective.name": "dpo"}
COMPLETIONS: dict[str, Any] = {
    "objective.name": "grpo", "rollout.rewards": ["exact_match"], "rollout.num_generations": 2, "data.seq_length": 1024
}  # fmt: skip
PACKED = {"data.packing": True}


def _config(settings: dict[str, Any], share: bool | str) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "/m"}, "data": {"train": "/d.jsonl", "share_prefixes": share},
        "train": {"steps": 1, "global_batch_size": 2}, "lora": {"rank": 4},
    }  # fmt: skip
    for name, value in settings.items():
        section, option = name.split(".")
        sections.setdefault(section, {})[option] = value
    return from_yaml(json.dumps(sections))


@pytest.mark.parametrize(
    ("settings", "regroups"),
    [(PACKED, True), (PAIRS, False), ({**PAIRS, **PACKED}, True), (COMPLETIONS, True)],
)
def test_runs_that_share(settings: dict[str, Any], regroups: bool) -> None:
    """Pairs without packing keep their rows: two answers to a question each."""
    found = choose_sharing(_config(settings, "auto"), DECODER)
    assert (found.shares, found.least_saved, found.regroups, found.obstacle) == (True, 0.05, regroups, None)
    assert choose_sharing(_config(settings, True), DECODER).least_saved == 0.0
    off = choose_sharing(_config(settings, False), DECODER)
    assert not off.shares and off.obstacle is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_rows_depend_on_ranks_only_where_nothing_is_dropped(dropout: float) -> None:
    prompt = list(range(3, 43))
    completions = [
        Completion(prompt=prompt, tokens=[50 + one, 60], sampled_logps=[0.0, 0.0], advantage=1.0) for one in range(8)
    ]
    dataset = TokenDataset(completion_columns(completions, "tokens"), seq_length=128)
    sharing = choose_sharing(_config({**COMPLETIONS, "lora.dropout": dropout}, "auto"), DECODER)
    rows = [sharing.rows(dataset, ranks=ranks).row_lengths.tolist() for ranks in (1, 2, 3, 8)]
    one = 39 + 8 * 3
    assert rows == ([[one]] * 4 if dropout else [[one], [51] * 2, [48, 48, 45], [42] * 8])


@pytest.mark.parametrize(
    ("settings", "words", "logged"),
    [
        ({}, "with data.packing false a row holds one document", False),
        ({"data.packing": "concatenate"}, "with data.packing concatenate a row is one document", False),
        ({**PACKED, "objective.name": "distillation"}, "records have a teacher's tokens", False),
        ({**COMPLETIONS, "objective.loss_type": "bnpo"}, "the loss is a mean over each micro-batch", True),
        ({**COMPLETIONS, "objective.top_entropy_quantile": 0.5}, "the loss is a mean over each micro-batch", True),
        ({**PACKED, "memory.cuda_graph": "step"}, "the graphs of memory.cuda_graph step are captured", False),
        (
            {**PACKED, "objective.name": "distillation", "distillation.teachers": ["/t"]},
            "a teacher with layers of its own",
            False,
        ),
        (
            {**COMPLETIONS, "rollout.rewards": [], "distillation.teachers": ["/t"], "distillation.whole": True},
            "a teacher with layers of its own",
            True,
        ),
    ],
)
def test_runs_that_cannot(settings: dict[str, Any], words: str, logged: bool) -> None:
    """The log has the reason where all documents are known to begin alike."""
    found = choose_sharing(_config(settings, "auto"), DECODER)
    assert not found.shares and (words in (found.obstacle or "")) == logged
    with pytest.raises(UserError, match=f"data.share_prefixes is true, but {words}"):
        choose_sharing(_config(settings, True), DECODER)


def test_layers_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderConfig, "branch_obstacle", lambda self: "its layers say so")
    found = choose_sharing(_config(PAIRS, "auto"), DECODER)
    assert not found.shares and found.obstacle == "its layers say so"


def test_models_that_read_images_do_not_share() -> None:
    """Equal tokens may stand for other images; nothing is searched in texts of such a model either."""
    decoder = replace(DECODER, fronts=(ImageTower(model=ToyVisionConfig()),))
    found = choose_sharing(_config(PAIRS, "auto"), decoder)
    assert not found.shares and "models, which read images, are not searched" in (found.obstacle or "")
