"""Documents end to end in rows: what is learnt, what is left over, what a batch of it looks like."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.batch import IGNORE_LABEL
from engine.config.load import from_yaml, parse_config, to_yaml
from engine.config.rules import check_objective
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader
from engine.data.row_shape import RowShape
from engine.data.text_reader import build_texts
from engine.errors import UserError


class Letters:
    """A tokenizer that a hand can follow: one token a character."""

    vocab_size, bos_id, eos_id, adds_bos, has_chat_template = 128, 1, 2, True, False

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        return [1] * bos + [ord(letter) for letter in text] + [2] * eos

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def _build(path: Path, records: list[dict[str, str]], seq_length: int, **more: object) -> TokenDataset:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return build_texts(path, tokenizer=Letters(), seq_length=seq_length, packing="concatenate", **more)


def _text(tokens: np.ndarray) -> str:
    return "".join({1: "<", 2: ">"}.get(int(token), chr(token)) for token in tokens)


def test_texts_end_to_end(tmp_path: Path):
    data = _build(tmp_path / "a.jsonl", [{"text": text} for text in ("abc", "defghij", "kl")], 6)
    assert _text(data.tokens) == "<abc><defghij><kl>"
    assert data.targets.reshape(3, 6).astype(int).tolist() == [[0, 1, 1, 1, 1, 1]] * 3
    report = data.report
    assert (report.documents, report.rows, report.left_over, report.packing_efficiency) == (3, 3, 0, 1.0)
    assert _text(_build(tmp_path / "b.jsonl", [{"text": "abcdefgh"}], 4).tokens) == "<abcdefg"
    assert (
        "2 rows 100.0% full, 2 tokens left over"
        in _build(tmp_path / "b.jsonl", [{"text": "abcdefgh"}], 4).report.summary()
    )


def test_a_row_is_one_document_to_attention(tmp_path: Path):
    data = _build(tmp_path / "a.jsonl", [{"text": text} for text in ("abc", "defghij", "kl")], 6)
    loader = DataLoader(data, RowShape(micro_batch_size=3), global_batch_size=3, seed=0, shuffle=False)
    (batch,) = loader.batches(0)
    assert batch.document_lengths == (6, 6, 6)
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    # shifted by one within the row, through the ends of documents; the row's last token predicts nothing
    assert batch.labels_BS[:, :-1].tolist() == data.tokens.reshape(3, 6)[:, 1:].tolist()
    assert (batch.labels_BS[:, -1] == IGNORE_LABEL).all()
    assert loader.target_count(0) == 15


def test_prompts_stay_masked_and_rows_of_them_alone_are_left_out(tmp_path: Path):
    records = [{"prompt": "pqrstuvwxy", "completion": "c"}, {"prompt": "p", "completion": "defgh"}]
    data = _build(tmp_path / "a.jsonl", records, 5)
    # <pqrs | tuvwx | yc><p | defgh | >: the first two rows are prompt, the last is not full
    assert _text(data.tokens) == "yc><pdefgh"
    assert data.targets.astype(int).tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert data.report.left_over == 11
    everything = _build(tmp_path / "a.jsonl", records, 5, mask_prompt=False)
    assert _text(everything.tokens) == "<pqrstuvwxyc><pdefgh" and everything.targets.sum() == 4 * 4
    assert everything.report.left_over == 1


@pytest.mark.parametrize(("overlong", "kept"), [("truncate", "<ab><cdefghij><kl>"[:15]), ("drop", "<ab><kl>"[:5])])
def test_long_documents_run_on_or_are_dropped(overlong: str, kept: str, tmp_path: Path):
    texts = [{"text": text} for text in ("ab", "cdefghij", "kl")]
    data = _build(tmp_path / "a.jsonl", texts, 5, overlong=overlong)
    assert _text(data.tokens) == kept
    assert data.report.dropped_overlong == (overlong == "drop") and data.report.truncated == 0


@pytest.mark.parametrize("overlong", ["truncate", "drop", "error"])
def test_a_stream_has_each_token_once(overlong: str, tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcdefghijklm")
    data = build_texts(tmp_path / "a.txt", tokenizer=Letters(), seq_length=4, packing="concatenate", overlong=overlong)
    assert _text(data.tokens) == "<abcdefghijk"


def test_too_little_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="the data has 5 tokens in all, which do not fill one row of data.seq_length 6"):
        _build(tmp_path / "a.jsonl", [{"text": "abc"}], 6)
    with pytest.raises(UserError, match="no row of data.seq_length 4 has a token to train on"):
        _build(tmp_path / "a.jsonl", [{"prompt": "abcd", "completion": ""}], 4)


def test_the_option():
    arguments = ["--model.path", "x", "--data.packing"]
    assert parse_config([*arguments, "concatenate"]).data.packing == "concatenate"
    assert parse_config([*arguments, "true"]).data.packing is True
    for given in ("true", "false", "concatenate"):
        config = parse_config([*arguments, given])
        assert from_yaml(to_yaml(config)) == config
    with pytest.raises(UserError, match="data.packing is 'yep', but true or false or concatenate is expected"):
        parse_config([*arguments, "yep"])
    with pytest.raises(UserError, match="would split answers"):
        check_objective(parse_config([*arguments, "concatenate", "--objective.name", "dpo"]))
