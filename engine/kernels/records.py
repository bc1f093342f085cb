"""Records that every backend's kernels take: a mask's coordinates, an adapter's place in a linear, an input's update.

Legend: T tokens, I input features, O output features of the linear, R rows of the stacked A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutKey:
    """The coordinates that a dropout mask [T, num_features] is a function of; see `engine.kernels.philox`.

    Args:
        token_index: int64 [T], global index of each row.
        step: the optimizer step; an int, or a device tensor where a captured graph must draw anew at each replay.
        seed, site: 32-bit words; the run's seed, and the number of the layer's input.
        probability: of dropping, rounded to 1/65536.
        num_features, feature_offset: the slice of global features held here.
    """

    token_index: Tensor
    step: Tensor | int
    seed: int
    site: int
    probability: float
    num_features: int
    feature_offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedUpdate:
    """What narrow factors add to a product: drop'(h V).

    Args:
        h_NR: [N, R].
        factors_ERM: [E, R, M], M or R of them contiguous; experts that share one lie at a stride of 0.
        mask: uint8 bits [N, ceil(M / 8)]; None where nothing is dropped.
        scale: of what is kept, 1 / (1 - p).
    """

    h_NR: Tensor
    factors_ERM: Tensor
    mask: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPlace:
    """Where one adapter lies in a linear.

    Args:
        first_column, num_columns: its columns of the linear's output.
        first_row, num_ranks: its rows of the stacked A, which are its columns of H and of dH.
        scale: s, of H and of dH.
    """

    first_column: int
    num_columns: int
    first_row: int
    num_ranks: int
    scale: float = 1.0

    def columns(self, y_TO: Tensor) -> Tensor:
        """Returns the output columns that the adapter adds to, a view."""
        return y_TO.narrow(1, self.first_column, self.num_columns)

    def ranks(self, h_TR: Tensor) -> Tensor:
        """Returns the adapter's columns of a [T, R] product, a view."""
        return h_TR.narrow(1, self.first_row, self.num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSection(AdapterPlace):
    """One adapter as a kernel sees it.

    Args:
        b: [num_columns, num_ranks], rows any distance apart; None where no product with B is asked for.
        da: fp32 [num_ranks, I], to which dA is added; None where A is frozen or not asked for.
        db: fp32 [num_columns, num_ranks], to which dB is added; None where B is frozen or not asked for.
    """

    b: Tensor | None = None
    da: Tensor | None = None
    db: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputUpdate:
    """The adapters' part of the gradient of their input: scale * mask * (dH A).

    Args:
        dh_TR: [T, R], gradient of the adapters' projection, complete.
        a_RI: [R, I] stacked A.
        mask: the input's, as the backend's `draw_mask` returned it; None without dropout.
        scale: 1 / (1 - p); 1 without dropout.
        h_TR, h_scale: h_scale * h_TR is drop(x) A^T of the same tokens, which norms can make use of; None where it is
            not available.
    """

    dh_TR: Tensor
    a_RI: Tensor
    mask: Tensor | None = None
    scale: float = 1.0
    h_TR: Tensor | None = None
    h_scale: float = 1.0


class SeenWhole(Protocol):
    """Spans of tokens that see all of themselves, as the part of the batch that has them keeps them."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def earlier_N(self) -> Tensor: ...

    @property
    def offsets(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLevel:
    """Full blocks of attention, which share neither queries nor keys: to some of the documents that others continue.

    Args:
        queries, keys: tokens of all blocks, in their order: the first and the end of a span where they are one, else
            their int64 numbers on the device.
        query_offsets, key_offsets: int32 [blocks + 1] on the device, cumulative numbers of the blocks' queries and
            keys, from 0.
        longest_query, longest_key: the most queries and keys of a block.
    """

    queries: tuple[int, int] | Tensor
    keys: tuple[int, int] | Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The documents of a micro-batch along its T tokens.

    Args:
        lengths: on the host, so that nothing waits for the device; they sum to T. Empty where only the device knows
            them, as in a captured graph, which must not depend on them.
        offsets: int32 [D + 1] cumulative lengths on the device, from 0 to T; None where no attention here reads them.
            The last one may be repeated: the repeats are documents of no tokens.
        max_length: no document is longer.
        seen_whole: tokens that see later tokens too; None where none does.
        parents: the document that each one continues, whose tokens its own see too; see `engine.branches`.
        levels: these documents' levels on the device, for an attention that takes offsets from there, one for each of
            its calls; () where no document continues another, or no attention here reads them.
    """

    lengths: tuple[int, ...]
    offsets: Tensor | None
    max_length: int
    seen_whole: SeenWhole | None = None
    parents: tuple[int, ...] = ()
    levels: tuple[DocumentLevel, ...] = ()

    @property
    def has_branches(self) -> bool:
        """Whether any document continues another."""
        return any(parent >= 0 for parent in self.parents)

    @classmethod
    def of_rows(
        cls, lengths: tuple[int, ...], offsets: Tensor | None = None, *, row_length: int, parents: tuple[int, ...] = ()
    ) -> Documents:
        """Returns the documents of rows, none of which crosses a row."""
        return cls(lengths=lengths, offsets=offsets, max_length=max(lengths, default=row_length), parents=parents)
