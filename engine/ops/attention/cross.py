"""Attention of a document's tokens to its encoded pictures: no mask, no rotation.

Which tokens belong to which pictures is known on the host. Tokens of documents without pictures get zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class EncodedSpan(NamedTuple):
    """Tokens that attend to encoded rows, both as ranges in the micro-batch."""

    tokens: slice
    rows: slice


class EncodedRows(NamedTuple):
    """Keys and values of encoded rows, and who attends to which, in the order of the tokens."""

    k_KND: Tensor
    v_KND: Tensor
    spans: tuple[EncodedSpan, ...]


def pair_spans(
    document_lengths: tuple[int, ...], documents: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[EncodedSpan, ...]:
    """Returns which tokens attend to which encoded rows.

    Args:
        document_lengths: tokens of each document of the micro-batch.
        documents: the document of each picture, ascending.
        rows: encoded rows of each picture.
    """
    spans: list[EncodedSpan] = []
    first_row = 0
    for document, count in zip(documents, rows, strict=True):
        first = sum(document_lengths[:document])
        tokens = slice(first, first + document_lengths[document])
        if spans and spans[-1].tokens == tokens:  # several pictures of one document
            spans[-1] = EncodedSpan(tokens, slice(spans[-1].rows.start, first_row + count))
        else:
            spans.append(EncodedSpan(tokens, slice(first_row, first_row + count)))
        first_row += count
    return tuple(spans)


def cross_attention(q_TND: Tensor, encoded: EncodedRows) -> Tensor:
    """Returns [T, N, D]: the tokens of each span attend to its rows, with scale D ** -0.5.

    Args:
        q_TND: queries of all tokens.
        encoded: of all pictures.
    """
    k_KND, v_KND, spans = encoded
    parts, done = [], 0
    for span in spans:
        parts.append(q_TND.new_zeros(span.tokens.start - done, *q_TND.shape[1:]))
        q, k, v = (
            x[rows].transpose(0, 1)[None] for x, rows in ((q_TND, span.tokens), (k_KND, span.rows), (v_KND, span.rows))
        )
        parts.append(scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        done = span.tokens.stop
    parts.append(q_TND.new_zeros(q_TND.shape[0] - done, *q_TND.shape[1:]))
    return torch.cat(parts)
