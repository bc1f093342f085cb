"""The one record that flows from the data loader through the model to the loss.

Rows are slots of the global batch, columns are positions in a row. Layers see the rows flattened to T = B * S tokens,
row after row. Nothing here knows about ranks: a rank's batch is a selection of slots.

What every run has are fields of `Batch`. What some runs have beside them is a `BatchPart`, a class of its own beside
the code that reads it; a batch has at most one part of each class.

Legend: B rows (micro-batch), S columns (row length), T = B * S, D documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from engine.branches import Parents
from engine.document_levels import device_levels
from engine.kernels.records import Documents
from engine.zigzag import ContextPlan

IGNORE_LABEL = -100
"""Label of a position that carries no loss."""

Part = TypeVar("Part", bound="BatchPart")


@dataclass(frozen=True, slots=True)
class InputRank:
    """A rank's place among those that share the work of a model's input stage on a micro-batch, such as the tiles of
    its images.

    Args:
        rank: its number; None does nothing of it.
        size: how many there are.
    """

    rank: int | None = 0
    size: int = 1

    @classmethod
    def at(cls, *, tensor: int, tensor_size: int, context: int, context_size: int, pipeline: int = 0) -> InputRank:
        """Returns the place of these ranks: tensor rank by tensor rank of each context rank, where the first pipeline
        stage is, which the first pipeline rank has."""
        return cls(None if pipeline else context * tensor_size + tensor, tensor_size * context_size)


WHOLE_INPUT = InputRank()


class BatchPart:
    """Data of a micro-batch beside its tokens, for runs that have such; subclasses are frozen dataclasses.

    Tensors among the fields move to the device with the batch. Those whose names end in "BS" have rows and columns as
    their last two dimensions.
    """

    __slots__ = ()
    graphs_ignore: ClassVar[bool] = False
    """Whether a graph of layers, captured without the part, computes the same for a batch that has it."""
    for_loss_alone: ClassVar[bool] = False
    """Whether the objective alone reads the part."""

    @property
    def brings_reference(self) -> bool:
        """Whether log-likelihoods under the objective's reference were computed before the step."""
        return False

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns the part with `change` applied to each of its tensors."""
        return _changed(self, {name: change(value) for name, value in _tensors(self).items()})

    def columns(self, columns: Tensor, row_length: int) -> Self:
        """Returns what a context-parallel rank needs of the part.

        Args:
            columns: int64, the columns of every row that the rank holds, in order.
            row_length: S of the whole rows.
        """
        held = {name: value[..., columns] for name, value in _tensors(self).items() if name.endswith("BS")}
        return _changed(self, held) if held else self

    def without_input(self) -> Self:
        """Returns what a rank needs that does not run the model's input stage."""
        return self

    def rotary_positions(self, axes: Tensor) -> Tensor | None:
        """Returns [T, pairs of features], the positions that rotary embeddings with axes turn by; None where the part
        has none.

        Args:
            axes: int64, the kind of position of each pair; see engine.models.ropes.Rope.
        """
        return None

    def attended(self, documents: Documents) -> Documents:
        """Returns the documents as attention takes them where the batch has the part."""
        return documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding(BatchPart):
    """Which tokens are padding, where any are.

    Args:
        padding_BS: bool, whether a token is padding at a row's end.
    """

    graphs_ignore: ClassVar[bool] = True
    padding_BS: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTokens(BatchPart):
    """How many documents each token is a part of, where documents share their beginnings; see `engine.branches`.

    Args:
        counts_BS: float32; 1 for padding too.
    """

    counts_BS: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Embeddings(BatchPart):
    """Input embeddings that replace the embedding lookup; `Batch.tokens_BS` is ignored.

    Args:
        embeddings_TH: in the model's dtype.
    """

    embeddings_TH: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes(BatchPart):
    """The experts that another program chose for each token, where it sampled them: routers take them in place of their
    own choice.

    Args:
        experts_MKBS: uint8 or int16, the k experts of each token in each of M layers; the largest number of the dtype
            where none are known.
        layers: numbers of these layers in the whole model.
        differing: int64 [2], on the model's device, to which routers add the tokens whose own choice is another set of
            experts, and all whose experts are known; None for nothing.
    """

    experts_MKBS: Tensor
    layers: tuple[int, ...]
    differing: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch, or the part of it that a context-parallel rank holds: some columns of every row.

    Args:
        tokens_BS: int64 token ids.
        labels_BS: int64, already shifted: the token that position s must predict, or IGNORE_LABEL. The last position
            of a document never has a target.
        positions_BS: int64 position inside its document, from 0, for rotary embeddings.
        token_index_BS: int64 slot_in_global_batch * seq_length + column: the coordinate of dropout masks,
            so that packing, accumulation and the layout cannot change a mask. `seq_length` is the configured one, even
            where the row is shorter.
        loss_weights_BS: float32 weight of each target; exactly 0 where the label is IGNORE_LABEL.
        document_offsets: int32 [D + 1], cumulative lengths of the documents over the flattened T tokens, from 0 to T.
            Attention never crosses them, but where a document continues another. Every row starts a document; padding
            at a row's end belongs to its last one.
        document_lengths: the same on the host, which avoids waiting for the device. Both are those of the whole
            rows, also where this rank holds some columns only.
        document_parents: the document that each one continues, where documents with the same beginning are computed as
            a tree; see `engine.branches`.
        context_plan: which tokens this rank holds and which attend to which, where rows are split over context-parallel
            ranks; None where they are whole.
        parts: data beside the tokens, at most one of each class; see `part`.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    token_index_BS: Tensor
    loss_weights_BS: Tensor
    document_offsets: Tensor
    document_lengths: tuple[int, ...]
    document_parents: Parents = ()
    context_plan: ContextPlan | None = None
    parts: tuple[BatchPart, ...] = ()

    @property
    def num_rows(self) -> int:
        return int(self.tokens_BS.shape[0])

    @property
    def row_length(self) -> int:
        return int(self.tokens_BS.shape[1])

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_BS.numel())

    def rotary_positions(self, axes: Tensor | None) -> Tensor:
        """Returns [T], or [T, pairs of features], the positions that a rotary embedding turns by.

        Args:
            axes: as of `BatchPart.rotary_positions`; None where positions are of one kind.
        """
        found = (part.rotary_positions(axes) for part in self.parts if axes is not None)
        return next((positions for positions in found if positions is not None), self.positions_BS.flatten())

    @property
    def documents(self) -> Documents:
        """The documents of the whole rows as attention takes them; made once for all layers."""
        # where only the device knows the lengths: no document crosses a row, and rows are whole
        found = Documents.of_rows(
            self.document_lengths, self.document_offsets, row_length=self.row_length, parents=self.document_parents
        )
        if self.document_parents and self.document_offsets.is_cuda:
            levels = device_levels(self.document_lengths, self.document_parents, self.document_offsets.device)
            found = replace(found, levels=levels)
        for part in self.parts:
            found = part.attended(found)
        return found

    @property
    def brings_reference(self) -> bool:
        """Whether a part has log-likelihoods under the objective's reference."""
        return any(part.brings_reference for part in self.parts)

    def part(self, kind: type[Part]) -> Part | None:
        """Returns the part of exactly this class; None where the batch has none."""
        for part in self.parts:
            if type(part) is kind:
                return part
        return None

    def with_parts(self, *parts: BatchPart | None) -> Batch:
        """Returns the batch with these parts, each in place of one of its class; None adds nothing."""
        new = tuple(part for part in parts if part is not None)
        kinds = {type(part) for part in new}
        return replace(self, parts=(*(part for part in self.parts if type(part) not in kinds), *new))

    def without(self, *kinds: type[BatchPart]) -> Batch:
        """Returns the batch without its parts of these classes."""
        return replace(self, parts=tuple(part for part in self.parts if type(part) not in kinds))

    def without_input(self) -> Batch:
        """Returns the batch for a rank that does not run the model's input stage."""
        return replace(self, parts=tuple(part.without_input() for part in self.parts)) if self.parts else self

    def to(self, device: torch.device) -> Batch:
        """Returns the same batch on `device`; copies are asynchronous where the source is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the same batch with `change` applied to each of its tensors."""
        changed = {name: change(value) for name, value in _tensors(self).items()}
        return replace(self, **changed, parts=tuple(part.map(change) for part in self.parts))


def _tensors(record: Batch | BatchPart) -> dict[str, Tensor]:
    named = ((field.name, getattr(record, field.name)) for field in fields(record))  # type: ignore[arg-type]
    return {name: value for name, value in named if isinstance(value, Tensor)}


def _changed(part: Part, tensors: dict[str, Tensor]) -> Part:
    return replace(part, **tensors)  # type: ignore[type-var]
