"""Scores and completions on several ranks against one: what the harness's tasks are made of."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from engine.inference.options import Limits, ModelChoice, Sampling
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from rankfold.evaluating.model import EvaluatedModel
from rankfold.evaluating.sampling import completions
from rankfold.evaluating.scoring import Continuation, Score, scores
from rankfold.evaluating.watch import Watch
from tests.support.spawning import spawn

LAYOUTS = ({"tensor": 2}, {"tensor": 1, "pipeline": 2})
CONTINUATIONS = [
    Continuation((0, *range(10, 10 + before)), tuple(range(first, first + after)))
    for before, after in ((1, 1), (5, 3), (40, 1), (40, 1), (17, 6), (8, 30))
    for first in (20, 21, 90)
]


class Bytes:
    """Decodes each id as a letter."""

    def decode_many(self, ids: list[list[int]]) -> list[str]:
        return ["".join(chr(97 + one % 26) for one in own) for own in ids]


def found(model: Path, **layout: int) -> tuple[list[Score], list[list[int]]]:
    """Scores and greedy completions in a layout, of batches that hold one row or several."""
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    launch = Launch(rank=ranks[0], world_size=ranks[1], device=torch.device("cpu"))
    opened = open_for_generation(ModelChoice(path=model, **layout), launch, Log(1))
    evaluated = EvaluatedModel.of_opened(opened, launch.device)
    own = scores(evaluated, CONTINUATIONS, 64, Watch())
    limits = Limits(max_new_tokens=8, stop_ids=frozenset({1}), stop_texts=("qz", "e"), slots=2)
    prompts = [tuple(one.before) for one in CONTINUATIONS[::3]]
    texts = completions(evaluated, prompts, limits=limits, sampling=Sampling(), decoder=Bytes(), watch=Watch())
    # the most likely tokens are greedy continuations, and no longer ones with another token at their end
    greedy = [Continuation(before, after) for before, after in zip(prompts, texts, strict=True)]
    spoilt = [Continuation(before, [*after[:-1], after[-1] ^ 1]) for before, after in greedy]
    for given, expected in ((greedy, True), (spoilt, False)):
        assert {score.is_greedy for score in scores(evaluated, given, 64, Watch())} == {expected}
    return own, texts


def found_on_ranks(model: Path) -> list[tuple[list[Score], list[list[int]]]]:
    return [found(model, **layout) for layout in LAYOUTS]


def test_two_ranks_find_what_one_does(model: Path) -> None:
    logps, texts = found(model)
    assert len({score.logp for score in logps}) == len(logps) - 3, "the rows that are given twice have the same"
    assert any(len(ids) > 1 for ids in texts)
    for of_rank in spawn(found_on_ranks, world=2, args=(model,)):
        for layout, (scored, completed) in zip(LAYOUTS, of_rank, strict=True):
            for own, whole in zip(scored, logps, strict=True):
                torch.testing.assert_close(own.logp, whole.logp, atol=1e-5, rtol=0, msg=f"{layout}")
                assert own.is_greedy == whole.is_greedy, layout
            assert completed == texts, layout
