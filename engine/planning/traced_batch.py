"""The micro-batch that a piece of a model is traced with, on the meta device: full rows of documents of one length, or
of documents that continue others, as many tiles of images as the workload has, and the rows that ranks send each other
for their experts."""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise

import torch

from engine.batch import Batch, BatchPart
from engine.branches import Parents, shifted
from engine.distributed.mesh import Counts, ExpertRows
from engine.models.layer_records import ExampleRows
from engine.planning.rank_layout import Routing, Workload
from engine.zigzag import ContextLayout, make_plan, rank_columns

META = torch.device("meta")


def batch(workload: Workload, ranks: int) -> Batch:
    """Makes full rows of documents of one length, or of the workload's tree, the last of a row as long as fits; for the
    first context rank."""
    rows = example_rows(workload, ranks)
    shape, lengths, parents = rows.shape, rows.document_lengths, _parents(workload)
    whole = ContextLayout.even(
        size=ranks,
        num_rows=workload.micro_batch,
        row_length=workload.seq_length,
        document_lengths=lengths,
        document_parents=parents,
    )
    numbers, weights = (torch.empty(shape, dtype=dtype, device=META) for dtype in (torch.int64, torch.float32))
    return Batch(
        tokens_BS=numbers,
        labels_BS=numbers,
        positions_BS=numbers,
        token_index_BS=numbers,
        loss_weights_BS=weights,
        document_offsets=torch.empty(len(lengths) + 1, dtype=torch.int32, device=META),
        document_lengths=lengths,
        document_parents=parents,
        context_plan=make_plan(whole, 0) if ranks > 1 else None,
    ).with_parts(*_parts(workload, rows))


def example_rows(workload: Workload, ranks: int) -> ExampleRows:
    """Returns the rows that the micro-batch has for the first of so many context ranks."""
    length, document = workload.seq_length, workload.document_length
    of_row = (document,) * (length // document) + ((length % document,) if length % document else ())
    if tree := workload.tree[0]:
        of_row = (*tree[:-1], length - sum(tree[:-1]))
    return ExampleRows(
        shape=(workload.micro_batch, sum(span.length for span in rank_columns(length, ranks, 0))),
        document_lengths=of_row * workload.micro_batch,
        tiles=workload.tiles,
        ranks=ranks,
    )


def _parents(workload: Workload) -> Parents:
    """Returns the document that each of a micro-batch continues; () where none does."""
    parents = workload.tree[1]
    return tuple(
        chain.from_iterable(shifted(parents, len(parents), row * len(parents)) for row in range(workload.micro_batch))
    )


def _parts(workload: Workload, rows: ExampleRows) -> list[BatchPart]:
    decoder = workload.decoder
    return [part for one in (*decoder.variants, *decoder.fronts) for part in one.examples(decoder, rows)]


def expert_rows(routing: Routing, *, per_token: int, ranks: int) -> ExpertRows:
    """Returns the rows that the first of `ranks` ranks sends and receives, where no router has chosen.

    Two cases bound what a rank may have to hold, since no token is dropped. With "balanced" routing every expert gets
    as many of a rank's rows as any other. With the "worst", the tokens of all ranks choose the same experts, the first
    of the first rank, so that this one gets all rows; or, of a rank with fewer experts than a token has, as many of
    each token as it has experts. Routers of pretrained models are much nearer to the first.

    Args:
        routing: how tokens choose.
        per_token: experts of a token.
        ranks: which divide the experts evenly, and have as many tokens each.
    """
    return partial(_rows, routing, per_token, ranks)


def _rows(routing: Routing, per_token: int, ranks: int, num_rows: int, num_experts: int) -> tuple[Counts, Counts]:
    if routing == "balanced":
        ends = [num_rows * expert // num_experts for expert in range(num_experts + 1)]
        counts = [end - start for start, end in pairwise(ends)]
    else:
        counts = [num_rows // per_token] * per_token + [0] * (num_experts - per_token)
    here = num_experts // ranks
    sent = [counts[first : first + here] for first in range(0, num_experts, here)]
    return sent, [counts[:here]] * ranks
