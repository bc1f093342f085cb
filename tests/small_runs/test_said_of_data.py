"""What a run says of its data before it trains on it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.data.data_report import context_warning
from engine.models.families.llama import config_from_hf
from tests.small_runs.conftest import SmallRuns
from tests.wrong_inputs.workplace import CONFIG


def test_samples_beyond_the_models_context(run: SmallRuns) -> None:
    run.place.change_config(max_position_embeddings=12)
    said = run(data__seq_length=40)
    assert "training data: 3 records, 3 documents" in said
    assert (
        "warning: data.seq_length is 40, but the model's context is 12 tokens (max_position_embeddings): "
        "2 of 3 samples are longer, up to 17, and the model does not know those positions; set data.seq_length to 12"
    ) in said
    said = run(data__seq_length=12, checkpoint__dir=run.folder.with_name("other"))
    assert "the model's context" not in said
    assert "warning: training data: 2 of 3 documents are longer than data.seq_length 12 and truncated, 7 tokens" in said


def test_a_long_row_is_not_a_long_sample() -> None:
    lengths = np.array([3, 9, 8])
    assert context_warning(8, lengths, 8) is None
    assert "no sample is longer than that so far" in str(context_warning(32, lengths, 9))
    assert "1 of 3 samples is longer, up to 9," in str(context_warning(32, lengths, 8))


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        (
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)  # fmt: skip
def test_scaled_positions_are_known(rope: dict[str, object] | None, length: int) -> None:
    assert config_from_hf({**CONFIG, "max_position_embeddings": 128, "rope_scaling": rope}).context_length == length


def test_the_length_of_an_epoch(run: SmallRuns, texts: list[dict[str, str]]) -> None:
    run.place.records(*texts[:5])
    said = run(train__steps=None, train__epochs=2, train__global_batch_size=4)
    assert "data order: one epoch is 5 rows in 2 steps of 4, the last of 1\n" in said and "run: 4 steps" in said
