"""How the benchmark's reference turns summaries into rows of 8192 tokens, rebuilt token for token.

A document is a prompt with its text and the summary behind it. Documents longer than a row are dropped; the rest lie
end to end and are cut into rows. The reference does this with a process pool: each process takes an even, contiguous
share of the documents and packs a thousand at a time, so that tokens are left over at the end of each thousand. The
number of rows depends on it, which is why the shares are a parameter here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.batch import IGNORE_LABEL
from engine.data.tokenizer import Tokenizer

PROMPT = "### Summarize the following text:\n {input}\n ### Summary:\n"
SHARES = {"train": 8, "validation": 2}
"""Processes that the reference packs with."""
BATCH = 1000


class Tokens(NamedTuple):
    """Ids, and labels: the id, or -100 where a token is not learnt."""

    ids: list[int]
    labels: list[int]


def documents(records: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, masked: bool) -> Iterator[Tokens]:
    """The tokens of each (text, summary).

    Text and summary are encoded as one string, and the end token is set behind it.

    Args:
        masked: labels leave out the prompt, as many tokens as it has alone, and the end token, as the validation's do;
            else every token is learnt.
    """
    assert tokenizer.bos_id is not None and tokenizer.eos_id is not None
    prompts = [PROMPT.format(input=text) for text, _ in records]
    whole = [f"{prompt} {summary}" for prompt, (_, summary) in zip(prompts, records, strict=True)]
    lengths = [1 + len(ids) for ids in tokenizer.encode_many(prompts)] if masked else [0] * len(records)
    for ids, length in zip(tokenizer.encode_many(whole), lengths, strict=True):
        tokens = [tokenizer.bos_id, *ids, tokenizer.eos_id]
        labels = [IGNORE_LABEL] * length + tokens[length:]
        if masked:
            labels[-1] = IGNORE_LABEL
        yield Tokens(tokens, labels)


def rows(found: Sequence[Tokens], *, seq_length: int, shares: int) -> Iterator[Tokens]:
    """Documents of at most `seq_length` tokens, cut into rows; what fills no row at the end of a batch is dropped."""
    kept = [tokens for tokens in found if len(tokens.ids) <= seq_length]
    shares = max(1, min(shares, len(kept)))
    each, more = divmod(len(kept), shares)
    start = 0
    for share in range(shares):
        stop = start + each + (share < more)
        for first in range(start, stop, BATCH):
            yield from _cut(kept[first : min(first + BATCH, stop)], seq_length)
        start = stop


def _cut(batch: Sequence[Tokens], seq_length: int) -> Iterator[Tokens]:
    ids = [one for tokens in batch for one in tokens.ids]
    labels = [one for tokens in batch for one in tokens.labels]
    for first in range(0, len(ids) - seq_length + 1, seq_length):
        yield Tokens(ids[first : first + seq_length], labels[first : first + seq_length])
