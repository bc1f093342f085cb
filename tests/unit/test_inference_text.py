"""Text as it comes, token by token, against the whole decoded at once by tokenizers and sentencepiece."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.inference.text import TextStream, push_all

TEXTS = ("Once upon a time, there was\n  a girl.", "naïve café — 价格 100€ 🙂🎈 done", " leading and  double spaces ")


@pytest.fixture(
    scope="module", params=["tokenizers/llama2_32000", "tokenizers/minimind", "tokenizers/tok512/tok512.model"]
)
def tokenizer(request: pytest.FixtureRequest, data_dir: Path) -> Tokenizer:
    path = data_dir / request.param
    if not path.exists():
        pytest.skip(f"no tokenizer at {path}")
    return load_tokenizer(path)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_whole(tokenizer: Tokenizer, text: str) -> None:
    """No piece is taken back, and no unfinished character is shown."""
    ids = tokenizer.encode(text)
    before = tokenizer.encode("The cat sat.")
    stream = TextStream(tokenizer, before=before)
    pieces = [stream.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 3
    pieces.append(stream.finish())
    whole = tokenizer.decode([*before, *ids])
    assert "".join(pieces) == stream.text == whole.removeprefix(tokenizer.decode(before))


def test_streams_that_are_decoded_together_are_each_its_own(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.encode(text)[:12] for text in TEXTS]
    alone, together = ([TextStream(tokenizer, ("there",)) for _ in texts] for _ in range(2))
    for place in range(12):
        going = [row for row, ids in enumerate(texts) if place < len(ids)]
        pieces = [alone[row].push(texts[row][place]) for row in going]
        assert push_all([(together[row], texts[row][place]) for row in going]) == pieces
    assert [stream.text for stream in together] == [stream.text for stream in alone]


@pytest.mark.parametrize("stops", [("there",), (", th", "girl"), ("time, there was\n",), ("absent", "zzz")])
def test_a_stop_text_ends_the_text_and_is_never_shown(tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
    stream = TextStream(tokenizer, stops, before=tokenizer.encode("."))
    shown = ""
    for token in tokenizer.encode(TEXTS[0]):
        shown += stream.push(token)
        if stream.stopped:
            break
    shown += stream.finish()
    whole = TextStream(tokenizer, before=tokenizer.encode("."))
    for token in tokenizer.encode(TEXTS[0]):
        whole.push(token)
    whole.finish()
    places = [whole.text.index(stop) for stop in stops if stop in whole.text]
    assert stream.stopped == bool(places)
    assert shown == stream.text == (whole.text[: min(places)] if places else whole.text)


class _Letters:
    def decode_many(self, ids: list[list[int]]) -> list[str]:
        return [self.decode(one) for one in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_what_may_become_a_stop_text_is_held_back() -> None:
    stream = TextStream(_Letters(), ("END",))
    assert [stream.push(ord(letter)) for letter in "aENEEN!"] == ["a", "", "", "EN", "E", "", "EN!"]
    stream = TextStream(_Letters(), ("END",))
    assert [stream.push(ord(letter)) for letter in "aEN"] + [stream.finish()] == ["a", "", "", "EN"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    stream = TextStream(_Letters())
    assert [stream.push(ord("a")), stream.push(0xFFFD), stream.finish()] == ["a", "", "\ufffd"]
