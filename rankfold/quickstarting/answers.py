"""Answers of a transformers model to held-out questions, greedily."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.data.dataset import TokenDataset
from engine.data.tokenizer import Tokenizer

NEW_TOKENS = 40
SHORTEST_PROMPT = 8
"""Tokens that plain text, which has no question, is continued from."""


def prompts(dataset: TokenDataset, count: int) -> list[list[int]]:
    """Token ids of what stands before the answers of `count` documents, spread over the data set; no prompt twice."""
    found: dict[tuple[int, ...], None] = {}
    for row in range(len(dataset)):
        for tokens, targets in dataset.documents(row):
            before = int(targets.argmax())
            found[tuple(tokens[: before if before > 1 else SHORTEST_PROMPT].tolist())] = None
    distinct = [list(prompt) for prompt in found]
    return distinct[:: max(1, len(distinct) // count)][:count]


def most_different(answers: list[str], count: int) -> list[int]:
    """The places of `count` answers that share the fewest words with those taken before, the longest first."""
    words = [set(text.split()) for text in answers]
    left = sorted(range(len(answers)), key=lambda place: -len(words[place]))
    taken: list[int] = []
    while left and len(taken) < count:
        best = min(left, key=lambda place: max((_shared(words[place], words[one]) for one in taken), default=0.0))
        taken.append(best)
        left.remove(best)
    return sorted(taken)


def _shared(first: set[str], second: set[str]) -> float:
    """The share of their words that two answers have in common."""
    return len(first & second) / max(1, len(first | second))


@torch.inference_mode()
def answer(model: PreTrainedModel, prompt: list[int], tokenizer: Tokenizer) -> str:
    """The greedy continuation of `prompt`, up to its end token."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        # stock transformers; without it a small model says the same words over and over
        repetition_penalty=1.3,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.eos_id,
    )
    return " ".join(tokenizer.decode(output[0, len(prompt) :].tolist()).split())
