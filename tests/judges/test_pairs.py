"""Pairs with margins: records, the token that has an answer's score, batches, losses, and options that clash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.api import load_config
from engine.batch import IGNORE_LABEL, Batch
from engine.data.collate import rank_batch
from engine.data.record_files import Place
from engine.data.row_shape import RowShape
from engine.data.tokenizer import load_tokenizer
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.judges.batch_parts import ScoredAnswers
from engine.judges.bradley_terry import BradleyTerry
from engine.judges.pairs import ScoredPairReader, last_token, parse_margin_pair
from tests.support.answer_data import build_records
from tests.support.character_tokenizer import write_character_tokenizer

PLACE = Place(Path("pairs.jsonl"), "line", 1)
PAIR = {"prompt": "what is it? ", "chosen": "good", "rejected": "bad day"}


def test_margins() -> None:
    assert parse_margin_pair(PLACE, PAIR).margin == 0.0
    assert parse_margin_pair(PLACE, {**PAIR, "margin": 2}).margin == 2.0


@pytest.mark.parametrize("margin", ["much", True, [1.0], math.nan])
def test_wrong_margins(margin: Any) -> None:
    with pytest.raises(UserError, match="line 1: field 'margin' is .*, expected a number"):
        parse_margin_pair(PLACE, {**PAIR, "margin": margin})


def test_the_last_token_that_is_no_padding() -> None:
    tokens = np.array([7, 0, 5, 9, 0, 0], dtype=np.int32)
    assert [last_token(tokens, padding) for padding in (0, 9, None)] == [3, 5, 5]
    assert last_token(np.zeros(3, dtype=np.int32), 0) == 0, "as an argmax over places has it"


def write_pairs(folder: Path) -> Path:
    records = [{**PAIR, "chosen": "good" + " so" * number, "margin": number / 4} for number in range(5)]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def make_batch(folder: Path, **settings: object) -> Batch:
    """All pairs packed into rows, as one micro-batch."""
    write_character_tokenizer(folder, **settings)
    tokenizer = load_tokenizer(folder)
    dataset = build_records(ScoredPairReader, write_pairs(folder), tokenizer=tokenizer, seq_length=40, packing=True)
    assert len(dataset) < 5 and dataset.target_counts.sum() == 5, "a pair counts once, however long"
    shape = RowShape(micro_batch_size=len(dataset))
    return rank_batch(dataset, range(len(dataset)), range(len(dataset)), shape)


@pytest.mark.parametrize(("settings", "follows"), [({}, True), ({"pad_token": "Q"}, False)])
def test_a_tokenizer_without_padding_pads_with_its_end(settings: dict[str, str], follows: bool, tmp_path: Path) -> None:
    """So that the end token of a text is behind its score, as in TRL."""
    batch = make_batch(tmp_path, **settings)
    answers, tokens = batch.part(ScoredAnswers), batch.tokens_BS.flatten()
    assert answers is not None
    assert sorted(answers.margins.tolist()) == [0.0, 0.25, 0.5, 0.75, 1.0]
    places = [int((answers.numbers_BS.flatten() == number).nonzero()) for number in range(10)]
    assert int((answers.numbers_BS >= 0).sum()) == 10
    end = 0
    for place in places:
        assert (tokens[place] == end) != follows and (tokens[place + int(follows)] == end)
        assert batch.labels_BS.flatten()[place + int(follows)] == IGNORE_LABEL, "nothing follows in the document"


@pytest.mark.parametrize("centre", [0.0, 0.3])
def test_losses_in_rows_and_over_context_ranks(centre: float, tmp_path: Path) -> None:
    """Losses are of the tokens that hold scores alone; figures of ranks that share rows add up to those of one."""
    batch = make_batch(tmp_path)
    answers = batch.part(ScoredAnswers)
    assert answers is not None
    scores = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3), requires_grad=True)
    found = BradleyTerry(centre=centre, cp=Axis("cp")).sums(scores, batch, None)
    numbers = answers.numbers_BS.flatten()
    chosen, rejected = (
        torch.stack([scores[numbers == number].sum() for number in range(first, 10, 2)]) for first in (0, 1)
    )
    expected = F.softplus(answers.margins - (chosen - rejected)).sum() + centre * (chosen + rejected).square().sum()
    torch.testing.assert_close(found.loss, expected)
    (own,), (wanted,) = (torch.autograd.grad(loss, scores, retain_graph=True) for loss in (found.loss, expected))
    torch.testing.assert_close(own, wanted)
    assert own[numbers < 0].abs().max() == 0 and own[numbers >= 0].abs().min() > 0
    figures = BradleyTerry(centre=centre, cp=Axis("cp")).named((found.figures[1:] / 5).tolist())
    assert figures["accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert figures["margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-5)
    assert figures["reward"] == pytest.approx(torch.cat((chosen, rejected)).mean().item(), rel=1e-5)


def test_long_pairs_are_left_out_and_not_cut(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    options: dict[str, Any] = {"tokenizer": load_tokenizer(tmp_path), "seq_length": 23}
    dataset = build_records(ScoredPairReader, write_pairs(tmp_path), **options)
    assert (len(dataset), dataset.report.dropped_overlong, dataset.report.truncated) == (3, 2, 0)
    with pytest.raises(UserError, match="an answer with its question has .* set data.overlong to drop"):
        build_records(ScoredPairReader, write_pairs(tmp_path), overlong="error", **options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": {"overlong": "cut"}}, "data.overlong is cut, but an answer in pieces cannot be scored"),
    ({"objective": {"beta": 0.2}}, "objective.beta is 0.2, which its loss does not have: remove it"),
    ({"train": {"sample_prompts": ["a"], "sample_every": 1}}, "scores texts and writes none: remove them"),
    ({"data": {"packing": "concatenate"}}, "data.packing is concatenate, which would split answers"),
    ({"data": {"mix": ["b.jsonl=1"]}}, "answers that are compared come from one file"),
    ({"data": {"mask_prompt": False}}, "whole texts are scored: leave both out"),
    ({"train": {"eval_mean": "rows"}}, "train.eval_mean is rows, but the loss is a mean over pairs"),
    ({"memory": {"cuda_graph": "step"}, "data": {"packing": True}}, "which tokens are scored is known on the host"),
    ({"objective": {"center_rewards_coefficient": -1.0}}, "objective.center_rewards_coefficient is -1.0"),
    ({"objective": {"name": "dpo", "center_rewards_coefficient": 0.1}}, "but it belongs to reward"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_options_that_clash(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"objective": {"name": "reward"}, "data": {"train": str(write_pairs(tmp_path))}}
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    with pytest.raises(UserError) as refused:
        load_config(sections, model={"path": str(tmp_path)})
    assert sentence in str(refused.value)
