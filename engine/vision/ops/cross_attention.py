"""Attention of a document's tokens to its encoded images: no mask, no rotation.

Which tokens belong to which images is known on the host. Tokens of documents without images get zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.ops.attention.dense_gradient import with_dense_gradient
from engine.ops.attention.token_context import ContextPart
from engine.spans import Span


class EncodedSpan(NamedTuple):
    """Tokens that attend to encoded rows, both as ranges in the micro-batch."""

    tokens: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class Encoded(ContextPart):
    """Encoded images, which the layers of a model with cross attention attend to.

    Args:
        features_KC: encoded rows of all images; on every rank all of them.
        spans: who attends to which, in the order of the tokens.
        row_index_K: int64, the rows' dropout coordinates; None where nothing is dropped.
    """

    features_KC: Tensor
    spans: tuple[EncodedSpan, ...]
    row_index_K: Tensor | None = None

    def shared(self) -> tuple[Tensor, ...]:
        return (self.features_KC,)


class EncodedRows(NamedTuple):
    """Keys and values of encoded rows, and who attends to which, in the order of the tokens."""

    k_KND: Tensor
    v_KND: Tensor
    spans: tuple[EncodedSpan, ...]


def document_spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    """Returns the tokens of each document, where rows are whole and documents lie one after the other."""
    ends = list(accumulate(lengths))
    return tuple(Span(end - length, end) for end, length in zip(ends, lengths, strict=True))


def pair_spans(tokens: Sequence[Span], documents: tuple[int, ...], rows: tuple[int, ...]) -> tuple[EncodedSpan, ...]:
    """Returns which tokens attend to which encoded rows.

    Args:
        tokens: of each document of the micro-batch, those that this rank holds; may be none.
        documents: the document of each image, ascending.
        rows: encoded rows of each image.
    """
    spans: list[EncodedSpan] = []
    first_row, last_document = 0, -1
    for document, count in zip(documents, rows, strict=True):
        if document == last_document:  # several images of one document
            first_of_document = spans.pop().rows.start
        else:
            first_of_document, last_document = first_row, document
        first_row += count
        spans.append(EncodedSpan(slice(*tokens[document]), slice(first_of_document, first_row)))
    return tuple(span for span in spans if span.tokens.start < span.tokens.stop)


def cross_attention(q_TND: Tensor, encoded: EncodedRows) -> Tensor:
    """Returns [T, N, D]: the tokens of each span attend to its rows, with scale D ** -0.5.

    Args:
        q_TND: queries of all tokens.
        encoded: of all images.
    """
    k_KND, v_KND, spans = encoded
    # nothing of each, so that backward reaches all three on ranks whose tokens attend to no row
    parts, done = [q_TND[:0], k_KND[:0], v_KND[:0]], 0
    for span in spans:
        parts.append(q_TND.new_zeros(span.tokens.start - done, *q_TND.shape[1:]))
        q, k, v = (
            x[rows].transpose(0, 1)[None] for x, rows in ((q_TND, span.tokens), (k_KND, span.rows), (v_KND, span.rows))
        )
        parts.append(with_dense_gradient(scaled_dot_product_attention(q, k, v))[0].transpose(0, 1))
        done = span.tokens.stop
    parts.append(q_TND.new_zeros(q_TND.shape[0] - done, *q_TND.shape[1:]))
    return torch.cat(parts)
