"""Scores of continuations against the logits of transformers, for every family and for transformers' own modules:
rows of different lengths in one batch, and several continuations of one text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.inference.options import ModelChoice
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from rankfold.evaluating.model import EvaluatedModel
from rankfold.evaluating.scoring import Continuation, scores
from rankfold.evaluating.watch import Watch
from tests.adopted.saved_models import save_small
from tests.support.family_models import make_model
from tests.support.family_table import FAMILIES

ADOPTED = ("gpt_neox", "cohere", "bloom", "mamba")
QUICK = ("gemma3", "falcon h1", "deepseek v3", "bloom")
"""Windows and two ropes; states; latent attention and experts; transformers' own modules."""
INDEXED = ("deepseek v32", "glm moe dsa")
"""A query sees few keys there, and which ones hangs on the last bit of a random model's scores."""
GIVEN = [
    Continuation(range(3, 3 + before), tuple((first + 5 * place) % 60 for place in range(after)))
    for before, after in ((1, 1), (6, 2), (21, 1), (30, 7), (11, 12))
    for first in (7, 8)
]


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*FAMILIES, *ADOPTED)
        if name not in INDEXED
    ],
)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    stock = (save_small(name, tmp_path) if name in ADOPTED else make_model(name, tmp_path)).eval().float()
    launch = Launch(rank=0, world_size=1, device=torch.device("cpu"))
    opened = open_for_generation(ModelChoice(path=tmp_path, dtype="float32"), launch, Log(1))
    found = scores(EvaluatedModel.of_opened(opened, launch.device), GIVEN, 96, Watch())
    for (before, after), own in zip(GIVEN, found, strict=True):
        with torch.no_grad():
            logits_SV = stock(torch.tensor([[*before, *after[:-1]]])).logits[0, -len(after) :].double()
        labels = torch.tensor(after)
        expected = logits_SV.log_softmax(1).gather(1, labels[:, None]).sum()
        assert own.logp == pytest.approx(float(expected), abs=2e-5, rel=2e-6)
        assert own.is_greedy == bool((logits_SV.argmax(1) == labels).all())
