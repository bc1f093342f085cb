"""Layouts that experts cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.parallel import ParallelOptions
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.expert_ranks import check_expert_ranks
from tests.distributed.cases import small_config
from tests.distributed.run_cases import ROUTED


def _check(parallel: ParallelOptions, decoder: DecoderConfig) -> None:
    check_expert_ranks(decoder, expert=parallel.expert, tensor=parallel.tensor, folds=parallel.has_expert_mesh)


@pytest.mark.parametrize(
    ("decoder", "options", "words"),
    [
        (small_config(), {"expert": 2}, "parallel.expert is 2, but this llama model has no experts"),
        (small_config(), {"tensor": 2, "expert_tensor": 1}, "parallel.expert_tensor is 1, but this llama model has no"),
        (ROUTED, {"expert": 2}, "parallel.expert is 2, which does not divide the model's 5 experts"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    decoder: DecoderConfig, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        _check(ParallelOptions(**options), decoder)


@pytest.mark.parametrize("options", [{"expert": 5}, {"tensor": 2}, {"tensor": 2, "expert_tensor": 1}, {}])
def test_others_are_not(options: dict[str, Any]) -> None:
    _check(ParallelOptions(**options), ROUTED)
