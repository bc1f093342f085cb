"""Completions: a model's answers to prompts, with their scores and log-probabilities, as documents to train on.

A completion is an ordinary document, the prompt's tokens and the completion's, of which the completion's are targets.
So packing, batches and every layout treat it as any other. The other values are columns beside the documents, and reach
the objective as `Completions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import IGNORE_LABEL, InputRank
from engine.data.columns import Columns, contiguous
from engine.data.dataset import TokenDataset
from engine.data.extras import ExtraColumns
from engine.data.parts import CollatedRows, NumberedDocuments
from engine.rollouts.batch_parts import Completions

RowWeight = Literal["tokens", "completions"]
"""The weight of a row in the loss: its target tokens, or its completions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One answer to a prompt.

    Args:
        prompt: its token ids, at least one.
        tokens: ids of the answer, at least one; with the token that ends it, unless it is truncated.
        sampled_logps: of each of `tokens`, the logarithm of the probability with which it was drawn, at the sampling
            temperature.
        written: whether each of `tokens` was not sampled, but written by an environment: it is read and not learned;
            None for none.
        advantage: over its group.
        token_advantages: what is added to it for each of `tokens`; None for nothing.
        trained: False excludes it, a truncated one, from the loss, but not from the number of completions.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    sampled_logps: Sequence[float]
    advantage: float
    token_advantages: Sequence[float] | None = None
    written: Sequence[bool] | None = None
    trained: bool = True

    def targets(self) -> list[bool]:
        """Returns whether each of `tokens` is a target."""
        if not self.trained or self.written is None:
            return [self.trained] * len(self.tokens)
        return [not one for one in self.written]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionColumns(ExtraColumns):
    """The columns of a data set of completions beside its tokens.

    Args:
        advantages: float32 [D], of each document.
        sampled_logps: float32 [T], of each token of the data set when it was sampled; arbitrary where it is no target.
        old_logps: the same under the model that this generation batch began to be trained with; None where each
            completion is trained on only once, right after it was sampled.
        reference_logps: the same under the model without adapters; None where nothing is compared with it, or where it
            is computed with each step.
        token_advantages: float32 [T], what is added to the advantage of each token's document; None for nothing.
        row_weight: the weight of a row in the loss.
    """

    advantages: NDArray[np.float32]
    sampled_logps: NDArray[np.float32]
    old_logps: NDArray[np.float32] | None = None
    reference_logps: NDArray[np.float32] | None = None
    token_advantages: NDArray[np.float32] | None = None
    row_weight: RowWeight = "tokens"
    can_share: ClassVar[bool] = True
    collector: ClassVar[str] = "engine.rollouts.data.completions:RowCompletions"

    def __post_init__(self) -> None:
        for column in self.of_tokens().values():
            assert column is None or column.shape == self.sampled_logps.shape, (column.shape, self.sampled_logps.shape)

    @property
    def counts_documents(self) -> bool:  # type: ignore[override]
        return self.row_weight == "completions"

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        return (len(self.advantages), len(self.sampled_logps)) == (num_documents, num_tokens)

    def identity(self) -> Iterator[NDArray[np.float32]]:
        yield from (self.advantages, self.sampled_logps)
        if self.token_advantages is not None:
            yield self.token_advantages

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        known = {name: array for name, array in self.of_tokens().items() if array is not None}
        return {"advantages": self.advantages, **known}

    def of_tokens(self) -> dict[str, NDArray[np.float32] | None]:
        """Returns the columns with a number for each token, by their names."""
        return {
            "sampled_logps": self.sampled_logps,
            "old_logps": self.old_logps,
            "reference_logps": self.reference_logps,
            "token_advantages": self.token_advantages,
        }


def completion_columns(completions: Sequence[Completion], row_weight: RowWeight) -> Columns:
    """Returns completions as documents, none of which is empty.

    Args:
        completions: in the order of the documents.
        row_weight: the weight of a row in the loss, which the objective chooses.
    """
    assert all(one.prompt and len(one.tokens) == len(one.sampled_logps) > 0 for one in completions)
    ids = [[*one.prompt, *one.tokens] for one in completions]
    flags = [flag for one in completions for flag in [False] * len(one.prompt) + one.targets()]
    logps = [logp for one in completions for logp in (*[0.0] * len(one.prompt), *one.sampled_logps)]
    added = None
    if completions[0].token_advantages is not None:
        parts = [(*[0.0] * len(one.prompt), *(one.token_advantages or ())) for one in completions]
        added = np.array([number for part in parts for number in part], dtype=np.float32)
    return contiguous(
        np.array([token for one in ids for token in one], dtype=np.int32),
        np.array(flags, dtype=bool),
        np.cumsum([0, *map(len, ids)], dtype=np.int64),
        extras=[
            CompletionColumns(
                advantages=np.array([one.advantage for one in completions], dtype=np.float32),
                sampled_logps=np.array(logps, dtype=np.float32),
                token_advantages=added,
                row_weight=row_weight,
            )
        ],
    )


class RowCompletions(NumberedDocuments):
    """Collects the completions of a micro-batch, with the values of each token in the column of its label; see
    `engine.data.parts.PartCollector`."""

    def __init__(self, dataset: TokenDataset, input_rank: InputRank) -> None:
        super().__init__()
        self._dataset = dataset

    def finish(self, rows: CollatedRows) -> tuple[Completions]:
        """Returns the completions."""
        columns, documents = self._dataset.extra(CompletionColumns), self.documents
        assert columns is not None, "documents that are no completions"
        ids_BS, lengths = self.numbered(rows)
        logps_BS: dict[str, Tensor | None] = {}
        for name, known in columns.of_tokens().items():
            logps_BS[f"{name}_BS"] = None
            if known is None:
                continue
            values_BS = np.zeros(rows.labels_BS.shape, dtype=np.float32)
            for placed, held in self.spans():
                first = int(self._dataset.starts[placed.document]) + placed.skipped
                values_BS[placed.row, held.start : held.stop - 1] = known[first + 1 : first + placed.length]
            trained = np.where(rows.labels_BS != IGNORE_LABEL, values_BS, np.float32(0))
            logps_BS[f"{name}_BS"] = torch.from_numpy(trained)
        sampled_BS = logps_BS.pop("sampled_logps_BS")
        assert sampled_BS is not None
        completions = Completions(
            ids_BS=torch.from_numpy(ids_BS),
            advantages=torch.from_numpy(columns.advantages[documents]),
            lengths=torch.from_numpy(lengths),
            documents=tuple(documents),
            sampled_logps_BS=sampled_BS,
            **logps_BS,
        )
        return (completions,)
