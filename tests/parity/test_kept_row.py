"""Turns of a conversation whose earlier tokens stay in the cache: transformers' greedy answers to each whole prompt,
from the new tokens alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.inference.rows import Answer, Request
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from tests.support.family_models import make_model
from tests.support.generation import Ids, random_prompts, stock_greedy
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

FAMILIES = ("llama fused", "gemma3", "gemma2", "gpt oss", "deepseek v3", "mistral", "qwen3.5")
"""Full attention, with a window, with soft caps, with sinks, latent, and with states."""
WINDOWS = ("gemma3", "gemma2", "gpt oss", "mistral")
NEW = 12
LENGTH = 64


class Talker:
    """A generator that keeps its row, and the tokens that it has computed of prompts."""

    def __init__(self, folder: Path, *, ahead: int = 0, **layout: int) -> None:
        ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        launch = Launch(rank=ranks[0], world_size=ranks[1], device=torch.device("cpu"))
        opened = open_for_generation(ModelChoice(path=folder, **layout), launch, Log(1))
        stage = InferenceStage(
            opened.decoder, tp=opened.mesh.tp, pp=opened.mesh.pp, sampling=Sampling(), slots=1, length=LENGTH,
            device=launch.device,
        )  # fmt: skip
        limits = Limits(max_new_tokens=NEW, slots=1)
        self.generator = Generator(stage, limits, Ids(), keeps_row=True, ahead=ahead)

    def ask(self, ids: list[int], **more: object) -> tuple[Answer, int]:
        before = self.generator.speed.prefill_tokens
        (answer,) = self.generator.run([Request(row=0, ids=tuple(ids))], **more)  # type: ignore[arg-type]
        return answer, self.generator.speed.prefill_tokens - before


def conversation(talker: Talker) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Prompts, answers and computed tokens: three turns, the second one again with other words, and another start."""
    first, second, third, other, apart = random_prompts(67, (13, 9, 5, 7, 11))
    prompts, answers, computed = list[list[int]](), list[list[int]](), list[int]()
    row = first
    for added in (second, third, None):
        answer, count = talker.ask(row)
        prompts, answers, computed = [*prompts, row], [*answers, list(answer.ids)], [*computed, count]
        row = [*row, *answer.ids, *(added or [])]
    for row in ([*first, *answers[0], *other], apart):
        answer, count = talker.ask(row)
        prompts, answers, computed = [*prompts, row], [*answers, list(answer.ids)], [*computed, count]
    return prompts, answers, computed


@pytest.mark.parametrize("name", sampled(FAMILIES, ("gemma3", "gpt oss")))
def test_turns_continue_the_row(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path / "hf")
    prompts, answers, computed = conversation(Talker(tmp_path / "hf", ahead=1))
    assert answers == [stock_greedy(model, [prompt], NEW)[0] for prompt in prompts]
    # the last token of an answer is the input of no pass, and so computed with the next turn
    expected = [13, 9 + 1, 5 + 1, 7, 11 - (prompts[0][0] == prompts[-1][0])]
    if name in (*WINDOWS, "qwen3.5"):  # which have lost the end of the first answer by then
        expected[3:] = len(prompts[3]), len(prompts[4])
    assert computed == expected


def two_ranks(folder: str) -> list[tuple[list[list[int]], list[int]]]:
    return [conversation(Talker(Path(folder), **{axis: 2}))[1:] for axis in ("tensor", "pipeline")]


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    make_model("llama fused", tmp_path / "hf")
    alone = conversation(Talker(tmp_path / "hf"))[1:]
    assert spawn(two_ranks, world=2, args=(str(tmp_path / "hf"),)) == [[alone, alone]] * 2


def test_an_interrupted_answer_is_continued(tmp_path: Path) -> None:
    """The row ends after the passes so far, keeps what it has, and the next turn begins there."""
    model = make_model("llama fused", tmp_path / "hf")
    talker, (prompt, more) = Talker(tmp_path / "hf", ahead=1), random_prompts(67, (13, 9))
    passes = iter([False] * 5 + [True])
    answer, _ = talker.ask(prompt, interrupted=lambda: next(passes))
    (expected,) = stock_greedy(model, [prompt], NEW)
    assert (list(answer.ids), answer.ending) == (expected[:5], "interrupted")
    later, computed = talker.ask([*prompt, *answer.ids, *more])
    assert list(later.ids) == stock_greedy(model, [[*prompt, *answer.ids, *more]], NEW)[0]
    assert computed == len(more) + 1
    assert talker.generator.run([Request(row=0, ids=(1,))], interrupted=lambda: True) == []
