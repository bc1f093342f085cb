"""Records with a teacher's tokens: the forms of other programs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.build import build_dataset
from engine.data.dataset import TokenDataset
from engine.data.tokenizer import load_tokenizer
from engine.distillation.records import TaughtReader
from engine.distillation.top_tokens import NO_TOKEN, TopTokenColumns
from engine.errors import UserError
from examples.grpo_arithmetic.make_small import write_model

IDS, LABELS = [5, 9, 2, 7], [-100, -100, 2, 7]
"""A text, of which two tokens are targets."""
TOP = [[(2, -0.2), (4, -1.9)], [(7, -0.1), (1, -2.8)]]
PLAIN = {"input_ids": IDS, "labels": LABELS}
VLLM = [{str(token): {"logprob": logp, "rank": 1} for token, logp in entry} for entry in TOP]
AXOLOTL = [[{"token": f"token_id:{token}", "logprob": logp} for token, logp in entry] for entry in TOP]
SPLIT = {
    "target_token_ids": [[token for token, _ in entry] for entry in TOP],
    "target_logprobs": [[logp for _, logp in entry] for entry in TOP],
}
FORMS: dict[str, dict[str, Any]] = {
    "targets alone": SPLIT,
    "logprobs": {"target_token_ids": SPLIT["target_token_ids"], "logprobs": SPLIT["target_logprobs"]},
    "all tokens": {
        "target_token_ids": [None, None, *SPLIT["target_token_ids"]],
        "target_logprobs": [None, None, *SPLIT["target_logprobs"]],
    },
    "all but the first": {"logprobs": [[], *AXOLOTL]},
    "vLLM": {"prompt_logprobs": [None, {"9": {"logprob": -1.0}}, *VLLM]},
    "axolotl": {"logprobs": AXOLOTL},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_model(folder)
    return load_tokenizer(folder)


def read(folder: Path, tokenizer: Any, *records: dict[str, Any], **options: Any) -> TokenDataset:
    path = folder / "taught.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return build_dataset(str(path), TaughtReader(tokenizer), **({"seq_length": 16} | options))


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_other_programs(form: str, tokenizer: Any, tmp_path: Path) -> None:
    dataset = read(tmp_path, tokenizer, PLAIN | FORMS[form])
    columns = dataset.extra(TopTokenColumns)
    assert columns is not None and columns.places.tolist() == [2, 3]
    assert columns.ids.tolist() == [[2, 4], [7, 1]]
    np.testing.assert_allclose(columns.logps, SPLIT["target_logprobs"], rtol=1e-6)


def test_prompts_and_completions_of_other_numbers_of_tokens(tokenizer: Any, tmp_path: Path) -> None:
    """The completion's end token is a target too; the shorter entries are filled up."""
    record = {"prompt": "1+2=", "completion": "3", "logprobs": [[{"token": "4", "logprob": -0.1}], AXOLOTL[0]]}
    columns = read(tmp_path, tokenizer, record, PLAIN | SPLIT).extra(TopTokenColumns)
    assert columns is not None and columns.offsets.tolist() == [0, 2, 4]
    assert columns.ids.tolist() == [[4, NO_TOKEN], [2, 4], [2, 4], [7, 1]]
    assert columns.logps[0, 1] == -np.inf


def test_a_truncated_text_keeps_the_tokens_of_its_targets(tokenizer: Any, tmp_path: Path) -> None:
    columns = read(tmp_path, tokenizer, PLAIN | SPLIT, seq_length=3).extra(TopTokenColumns)
    assert columns is not None and columns.places.tolist() == [2] and columns.ids.tolist() == [[2, 4]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "expected beside a text those of a teacher's tokens"),
        (
            {"logprobs": AXOLOTL[:1]},
            "field 'logprobs' has 1 entries, but the text has 4 tokens here, 2 of them targets",
        ),
        ({"logprobs": "none"}, "field 'logprobs' is missing or no list"),
        ({"logprobs": [AXOLOTL[0], None]}, "field 'logprobs[1]' has no tokens, each with a log-probability"),
        ({"logprobs": [AXOLOTL[0], [{"token": "x", "logprob": -1}]]}, "has no tokens, each with a log-probability"),
        ({"prompt_logprobs": [{"2": 0.5}, {"1": -1}]}, "log-probabilities that are no numbers up to 0"),
        ({"prompt_logprobs": [{"2": -0.1, "3": -0.2}, {"1": -1}]}, "probabilities that add up to 1.7"),
        ({"prompt_logprobs": [{"-2": -0.1}, {"1": -1}]}, "token ids that are no integers from 0"),
        ({"logprobs": [[AXOLOTL[0][0]] * 2, AXOLOTL[1]]}, "has a token twice"),
        ({"target_token_ids": [[1]], "target_logprobs": []}, "has 1 entries and field 'target_logprobs' 0"),
        ({"target_token_ids": [[1], [2, 3]], "target_logprobs": [[-1], [-1]]}, "has no tokens, each with"),
    ],
)
def test_malformed_records(change: dict[str, Any], words: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read(tmp_path, tokenizer, PLAIN | change)
    assert words in str(refused.value) and "taught.jsonl line 1" in str(refused.value)
