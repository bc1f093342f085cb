"""Micro-batches of several tenants as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from engine.batch import Batch, BatchPart, Padding, SharedTokens
from engine.branches import Parents, shifted
from engine.tenants.span_adapters import Span
from engine.zigzag import ContextLayout, ContextPlan, make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(BatchPart):
    """What a joined micro-batch consists of.

    Args:
        spans: the tokens of each part.
        batches: the parts.
    """

    spans: tuple[Span, ...]
    batches: tuple[Batch, ...]


def can_join(batches: Sequence[Batch]) -> bool:
    """Returns whether these can be one: they have nothing beside their tokens but padding, beginnings that documents
    share, and what the objective alone reads, which gets it from the parts. The same on all ranks, of whose rows some
    may share nothing."""
    return all(
        type(part) in (Padding, SharedTokens) or part.for_loss_alone for batch in batches for part in batch.parts
    )


def tokens_of(batch: Batch) -> int:
    """Returns the tokens of a micro-batch on all of its context ranks together: the same on each of them, where the
    parts of a row may differ by a token."""
    return batch.num_tokens if batch.context_plan is None else batch.context_plan.layout.num_tokens


def _joined_plan(batches: Sequence[Batch]) -> ContextPlan | None:
    """Returns the plan of these rows one after the other: each row is divided over context ranks as it is alone, so
    that these hold the same of its tokens and attend to them in the same blocks."""
    plans = [batch.context_plan for batch in batches if batch.context_plan is not None]
    if not plans:
        return None
    assert len(plans) == len(batches), "some rows are divided over context ranks and some are not"
    layout = ContextLayout(
        size=plans[0].layout.size,
        row_lengths=tuple(length for plan in plans for length in plan.layout.row_lengths),
        document_lengths=tuple(length for plan in plans for length in plan.layout.document_lengths),
        document_parents=_joined_parents(batches),
    )
    return make_plan(layout, plans[0].rank)


def _joined_parents(batches: Sequence[Batch]) -> Parents:
    """Returns the document that each one continues, numbered over all parts; () where none does in any of them."""
    if not any(batch.document_parents for batch in batches):
        return ()
    counts = [len(batch.document_lengths) for batch in batches]
    firsts = accumulate(counts[:-1], initial=0)
    parts = zip(batches, counts, firsts, strict=True)
    return tuple(chain.from_iterable(shifted(batch.document_parents, count, first) for batch, count, first in parts))


def _are_even(batches: Sequence[Batch]) -> bool:
    return len({batch.row_length for batch in batches}) == 1


def join(parts: Sequence[tuple[int, Batch]]) -> Batch:
    """Joins micro-batches for which `can_join`: as rows, one after the other, or as one row where their lengths differ.

    Args:
        parts: tenants' numbers, and a micro-batch of each.
    """
    batches = [batch for _, batch in parts]
    assert can_join(batches)
    columns = batches[0].row_length if _are_even(batches) else sum(batch.num_tokens for batch in batches)

    def stacked(name: str) -> torch.Tensor:
        return torch.cat([getattr(batch, name).flatten() for batch in batches]).view(-1, columns)

    ends = list(accumulate(batch.num_tokens for batch in batches))
    starts = [0, *ends[:-1]]
    lengths = [batch.document_offsets[-1] for batch in batches]
    offsets, total = [batches[0].document_offsets[:1]], torch.zeros_like(lengths[0])
    for batch, length in zip(batches, lengths, strict=True):
        offsets.append(batch.document_offsets[1:] + total)
        total = total + length
    joined = Batch(
        **{
            name: stacked(name)
            for name in ("tokens_BS", "labels_BS", "positions_BS", "token_index_BS", "loss_weights_BS")
        },
        document_offsets=torch.cat(offsets),
        document_lengths=tuple(length for batch in batches for length in batch.document_lengths),
        document_parents=_joined_parents(batches),
        context_plan=_joined_plan(batches),
    )
    spans = tuple(Span(tenant, first, last) for (tenant, _), first, last in zip(parts, starts, ends, strict=True))
    padding = counts = None
    if any(batch.part(Padding) for batch in batches):
        padding = Padding(padding_BS=torch.cat([_padding(batch) for batch in batches]).view(-1, columns))
    if any(batch.part(SharedTokens) for batch in batches):
        counts = SharedTokens(counts_BS=torch.cat([_counts(batch) for batch in batches]).view(-1, columns))
    return joined.with_parts(padding, counts, Joined(spans=spans, batches=tuple(batches)))


def _padding(batch: Batch) -> torch.Tensor:
    """Returns bool [T], whether a token is padding."""
    found = batch.part(Padding)
    return (
        torch.zeros_like(batch.tokens_BS, dtype=torch.bool).flatten() if found is None else found.padding_BS.flatten()
    )


def _counts(batch: Batch) -> torch.Tensor:
    """Returns fp32 [T], how many documents each token is a part of."""
    found = batch.part(SharedTokens)
    return torch.ones_like(batch.loss_weights_BS).flatten() if found is None else found.counts_BS.flatten()
