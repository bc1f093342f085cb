"""Rows that compute common beginnings once, in every family: against transformers, which runs each document alone.

Losses of every target and the gradients of all parameters; sharing must change neither.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.branches import depths
from engine.data.collate import build_batch
from engine.data.dataset import dataset_of
from engine.data.prefixes import with_shared_prefixes
from tests.distributed.cases import relative_error
from tests.support.family_models import engine_model, losses_and_gradients, make_model, stock_gradient
from tests.support.family_table import FAMILIES
from tests.support.sweeps import sampled

_ROW, _VOCABULARY = 96, 67
QUICK = ["llama", "gemma2", "qwen3 moe", "deepseek v3", "qwen3 next", "falcon h1"]
BOUND = 2e-5


def alike(seed: int, *, count: int = 10, longest: int = 56) -> list[tuple[list[int], list[bool]]]:
    """Returns documents of a few beginnings, some of which have more in common; the same tokens are targets."""
    draw = random.Random(seed)

    def more(tokens: list[int], least: int, most: int) -> list[int]:
        return [*tokens, *(draw.randrange(3, _VOCABULARY) for _ in range(draw.randint(least, most)))]

    begins = [more([1], 18, 24) for _ in range(2)]
    begins += [more(begins[0], 6, 12)]
    texts = [more(draw.choice(begins), 2, 12)[:longest] for _ in range(count)]
    return [(text, [False, *(token % 5 > 1 for token in text[1:])]) for text in texts]


def _stock(model: torch.nn.Module, documents: list[tuple[list[int], list[bool]]]) -> Tensor:
    """Returns the summed loss of all targets, each document alone."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in documents:
        ids = torch.tensor(tokens)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        losses = cross_entropy(logits, ids[1:], reduction="none")
        total = total + (losses * torch.tensor(targets[1:])).sum()
    return total


@pytest.mark.parametrize("name", sampled(FAMILIES, QUICK))
def test_shared_beginnings_change_nothing(name: str, tmp_path: Path) -> None:
    stock = make_model(name, tmp_path)
    documents = alike(5, count=14)
    plain = dataset_of(documents, seq_length=_ROW, packing=True)
    shared = with_shared_prefixes(plain)
    built = engine_model(tmp_path)
    why = built.model.config.branch_obstacle()
    if why is not None:
        assert "deepseek_v32" in why or "glm_moe_dsa" in why, why
        return
    if (built.model.config.max_row_length or _ROW) < _ROW:
        pytest.skip("its rows are shorter")
    batch = build_batch(shared, range(len(shared)), range(len(shared)), length=_ROW)
    assert shared.row_lengths.sum() < 0.75 * plain.row_lengths.sum() and max(depths(batch.document_parents)) == 2
    losses, gradients = losses_and_gradients(built, batch)
    expected = _stock(stock, documents)
    expected.backward()
    assert float((losses.detach() * batch.loss_weights_BS.flatten()).sum()) == pytest.approx(
        float(expected.detach()), rel=2e-6
    )
    for key, gradient in gradients.items():
        wanted = stock_gradient(stock, tmp_path, key)
        if wanted is None or not wanted.any():
            assert ".experts." in key and not gradient.any(), key  # no token chose it
        else:
            assert relative_error(gradient, wanted) < BOUND, key
