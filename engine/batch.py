"""The one record that flows from the data loader through the model to the loss.

Rows are slots of the global batch, columns are positions in a row. Layers see the rows flattened to T = B * S tokens,
row after row. Nothing here knows about ranks: a rank's batch is a selection of slots.

Legend: B rows (micro-batch), S columns (row length), T = B * S, D documents; of images P patches, F numbers of a
patch, K feature rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.zigzag import ContextPlan, Span

IGNORE_LABEL = -100
"""Label of a position that carries no loss."""

Record = TypeVar("Record", "Answers", "Completions", "Batch", "Images", "ExpertTokens", "BidirectionalSpans")


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images of a micro-batch for one vision tower, as tiles that are cut into patches.

    Tensor- and context-parallel ranks of one row know all tiles, because the tower's work is dealt out to them
    (`engine.vision.tile_shares`), but each has the patches of its own share, and places the features of its own
    columns.

    Args:
        patches_PF: float32 from the loader, the patches of this rank's tiles or of more, tile after tile, each
            flattened in the order that the family's tower reads.
        grids: (rows, columns) in patches of each tile, and behind that what else its tower has to know, on the host.
        documents: the document that each tile belongs to, counted as in `Batch.document_lengths`, on the host.
        places_K: int64 rows of the T tokens that this rank holds, which features replace. Empty where features
            replace nothing (a tower that is attended to).
        features_K: int64, the feature row for each of the places, ascending; None where all rows are placed, in order.
        tile_index_N: int64, the dropout coordinate of each tile, a function of its place in the global batch; None
            where nothing is dropped.
        first_patch: which of the patches of all tiles `patches_PF` begins with, on the host.
    """

    patches_PF: Tensor
    grids: tuple[tuple[int, ...], ...]
    documents: tuple[int, ...]
    places_K: Tensor
    features_K: Tensor | None = None
    tile_index_N: Tensor | None = None
    first_patch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTokens:
    """Which weights each token takes, where a model has others for images: a partition of the T tokens that this rank
    holds, so that no rank waits for the device to learn how many there are.

    Args:
        vision_V: int64, ascending, the tokens of the vision expert; may be empty.
        language_L: int64, ascending, all others.
    """

    vision_V: Tensor
    language_L: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalSpans:
    """Runs of tokens that see all of themselves, beside what is before them: images, in models that have it so.

    As documents are, they are those of whole rows, also where a context-parallel rank holds some columns only. No span
    crosses documents.

    Args:
        spans: among the T tokens, ascending, of two tokens or more each, on the host.
        earlier_N: int64, of each span its tokens but the last one, from its end to its start.
        offsets: int32, cumulative counts of these for each span, from 0 to N.
    """

    spans: tuple[Span, ...]
    earlier_N: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> BidirectionalSpans | None:
        """Returns the record of some spans; None where none has two tokens."""
        kept = tuple(Span(start, stop) for start, stop in sorted(spans) if stop - start > 1)
        if not kept:
            return None
        counts = torch.tensor([0, *(span.length - 1 for span in kept)], dtype=torch.int32)
        return cls(
            spans=kept,
            earlier_N=torch.cat([torch.arange(stop - 2, start - 1, -1) for start, stop in kept]),
            offsets=counts.cumsum(0, dtype=torch.int32),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answers of a micro-batch whose likelihoods are compared, numbered in the order of the documents they are in.

    Args:
        ids_BS: int64 number of the answer whose document each token belongs to; arbitrary for padding, whose
            weight is 0.
        signs: float32 [N]: 1 for an answer that was preferred, -1 for one that was not. In pairs the two alternate.
        lengths: float32 [N], target tokens of each answer, over whole rows.
        documents: number of each in the data set, on the host.
        reference_logps: float32 [N], log-likelihoods under the reference; None where they were not computed before
            training.
    """

    ids_BS: Tensor
    signs: Tensor
    lengths: Tensor
    documents: tuple[int, ...]
    reference_logps: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """The completions of a micro-batch that are made more or less likely, numbered in the order of their documents.

    Args:
        ids_BS: int64 number of the completion whose document each token belongs to; arbitrary for padding, whose
            weight is 0.
        advantages: float32 [N], how much better each is than its group.
        lengths: float32 [N], target tokens of each, over whole rows; 0 where a completion is kept out of the loss.
        documents: number of each in the data set, on the host.
        sampled_logps_BS: float32, log-probability of each label when it was sampled; 0 where there is no target.
        old_logps_BS: float32, the same under the model that the generation batch began to be trained with; None where
            that is the model as it is.
        reference_logps_BS: float32, the same under the reference; None where there is none, or where it is computed
            with each step.
    """

    ids_BS: Tensor
    advantages: Tensor
    lengths: Tensor
    documents: tuple[int, ...]
    sampled_logps_BS: Tensor
    old_logps_BS: Tensor | None = None
    reference_logps_BS: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch, or the part of it that a context-parallel rank holds: some columns of every row.

    Args:
        tokens_BS: int64 token ids. Ignored where `embeddings_TH` is given.
        labels_BS: int64, already shifted: the token that position s must predict, or IGNORE_LABEL. The last position
            of a document never has a target.
        positions_BS: int64 position inside its document, from 0, for rotary embeddings.
        token_index_BS: int64 slot_in_global_batch * seq_length + column: the coordinate of dropout masks,
            so that packing, accumulation and the layout cannot change a mask. `seq_length` is the configured one, even
            where the row is shorter.
        loss_weights_BS: float32 weight of each target; exactly 0 where the label is IGNORE_LABEL.
        document_offsets: int32 [D + 1], cumulative lengths of the documents over the flattened T tokens, from 0 to T.
            Attention never crosses them. Every row starts a document; padding at a row's end belongs to its last one.
        document_lengths: the same on the host, which avoids waiting for the device. Both are those of the whole
            rows, also where this rank holds some columns only.
        context_plan: which tokens this rank holds and which attend to which, where rows are split over context-parallel
            ranks; None where they are whole.
        embeddings_TH: optional input embeddings that replace the embedding lookup.
        answers: the answers to compare, where the objective compares answers; None otherwise.
        completions: the completions to train on, where the objective trains on a model's own; None otherwise.
        images: the images of the rows, for a model that has a vision tower; None for others. Without images it has
            no tiles.
        cross_images: the same images in a second resolution, for a model whose layers attend to it; None for others.
        experts: which tokens take the weights for images, for a model that has such; None for others.
        bidirectional: the tokens that see what comes after them too, for a model that has images so; None for others,
            and where there are none.
        grid_positions_3BS: int64 positions in time, height and width, for a model that rotates by all three; None for
            others, and where there are no images: the three are equal then.
        padding_BS: bool, whether a token is padding at a row's end; None where none is, or nobody asks.
        mismatched: the questions of the same rows with other questions' answers, where the objective needs their
            likelihoods; None otherwise.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    token_index_BS: Tensor
    loss_weights_BS: Tensor
    document_offsets: Tensor
    document_lengths: tuple[int, ...]
    context_plan: ContextPlan | None = None
    embeddings_TH: Tensor | None = None
    answers: Answers | None = None
    completions: Completions | None = None
    images: Images | None = None
    cross_images: Images | None = None
    experts: ExpertTokens | None = None
    bidirectional: BidirectionalSpans | None = None
    grid_positions_3BS: Tensor | None = None
    padding_BS: Tensor | None = None
    mismatched: Batch | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens_BS.shape[0]

    @property
    def row_length(self) -> int:
        return self.tokens_BS.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.tokens_BS.numel()

    @property
    def brings_reference(self) -> bool:
        """Whether what the reference says of the answers or completions was computed before."""
        answers, completions = self.answers, self.completions
        return (answers is not None and answers.reference_logps is not None) or (
            completions is not None and completions.reference_logps_BS is not None
        )

    def to(self, device: torch.device) -> Batch:
        """Returns the same batch on `device`; copies are asynchronous where the source is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def without_pixels(self) -> Batch:
        """Returns the same batch without the numbers of its images, for a rank that encodes none of them."""
        if self.images is None and self.cross_images is None:
            return self
        images, cross = (
            None if one is None else replace(one, patches_PF=one.patches_PF[:0])
            for one in (self.images, self.cross_images)
        )
        mismatched = None if self.mismatched is None else self.mismatched.without_pixels()
        return replace(self, images=images, cross_images=cross, mismatched=mismatched)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the same batch with `change` applied to each of its tensors."""
        moved = _changed(self, change)
        return replace(
            moved,
            answers=None if self.answers is None else _changed(self.answers, change),
            completions=None if self.completions is None else _changed(self.completions, change),
            images=None if self.images is None else _changed(self.images, change),
            cross_images=None if self.cross_images is None else _changed(self.cross_images, change),
            experts=None if self.experts is None else _changed(self.experts, change),
            bidirectional=None if self.bidirectional is None else _changed(self.bidirectional, change),
            mismatched=None if self.mismatched is None else self.mismatched.map(change),
        )


def _changed(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    changed = {
        field.name: change(value)
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), Tensor)
    }
    return replace(record, **changed)
