"""Weights of a Hugging Face folder whose tensors are arranged in another way than the model's; see
`engine.adopted.arrangement`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.adopted.arrangement import Arrangement, StoredPart, contiguous_strides
from engine.adopted.config import AdoptedNames
from engine.checkpoint.copying.contents import Content, content_checksum
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.encoded_tensors import EncodedTensors
from engine.checkpoint.leftover import refuse_leftover
from engine.checkpoint.matrix_reading import numbers_of, parts_of, sum_of
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.reshard import Box, BoxColumns
from engine.checkpoint.rows import ReadRows, Rows
from engine.checkpoint.safetensors_file import checksum
from engine.checkpoint.verification import Piece, PieceChecks
from engine.checkpoint.weight_source import TIED_HEAD, WeightSource
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError
from engine.kernels.checksum import joined_checksum
from engine.kernels.formats import Format
from engine.quantization.shipped.config import encoding_of, without_encoding
from engine.quantization.shipped.spelling import StoredMatrix
from engine.sentences import listed

_MOST_RUNS = 64
"""Parts of one tensor that are copied from their files side by side, a file each."""


class ArrangedSource(WeightSource):
    """Weights of a Hugging Face folder, whose pieces are the parts of its arrangement.

    Args:
        model: with names that say how tensors are arranged.
    """

    def __init__(self, model: ModelFolder) -> None:
        self._tensors = EncodedTensors(model.path, encoding_of(model.hf_config))
        if self._tensors.encoded_names():
            model = replace(model, hf_config=without_encoding(model.hf_config))
        stored = {name: self._tensors.shape(name) for name in self._tensors.names()}
        assert isinstance(model.names, AdoptedNames)
        names = model.names.arranged(stored, str(model.path))
        assert names.arrangement is not None
        self._arrangement: Arrangement = names.arrangement
        model, has_tied_head = self._with_head(replace(model, names=names))
        super().__init__(model, has_tied_head=has_tied_head)
        self._check_parts()
        self._parts = {name: self._arrangement.by_name[name] for name in self._shapes}
        self._boxes: dict[str, Sequence[Box]] = {
            name: BoxColumns.of(self._shapes[name], [box_of(part, self._shapes[name]) for part in parts])
            if len(parts) > 1
            else (Box(),)
            for name, parts in self._parts.items()
        }
        self._checks = _WholeChecks(self)
        self._expected: Mapping[str, str] = {}
        self._recorded_by = ""

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._parts[name][0].stored)

    @property
    def changed_config(self) -> dict[str, Any] | None:
        return self.model.hf_config if self._tensors.encoded_names() else None

    @property
    def notes(self) -> list[str]:
        return self._tensors.notes()

    def encoding_note(self, *, decodes: bool) -> str | None:
        return self._tensors.note(decodes=decodes)

    def in_few_bits(self, name: str) -> bool:
        return any(self._tensors.is_encoded(part.stored) for part in self._parts[name])

    def format(self, name: str) -> Format | None:
        if (matrix := self.matrix(name)) is None:
            return None
        try:
            return matrix.spelling.format
        except UserError as error:
            raise UserError(f"{self.label}: {self._parts[name][0].stored}: {error}") from error

    def read_parts(self, name: str, spec: ShardSpec, format: Format) -> dict[str, Tensor]:
        self.require(name, spec.global_shape)
        matrix = self.matrix(name)
        assert matrix is not None, name
        self._checks.check(name, 0)
        try:
            return parts_of(matrix, spec, format)
        except UserError as error:
            raise UserError(f"{self.label}: {self._parts[name][0].stored}: {error}") from error

    def read(self, name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        matrix = self.matrix(name) if name in self else None
        if matrix is None:
            return super().read(name, spec, out)
        self.require(name, spec.global_shape)
        self._checks.check(name, 0)
        return numbers_of(matrix, spec, self.dtype(name), out)

    def matrix(self, name: str) -> StoredMatrix | None:
        """Returns the codes of a weight; None for numbers, and for what consists of several stored matrices, of
        another part of one than whole rows, or of one in a stack."""
        part, *others = self._parts.get(name, (None,))
        if part is None or others or not self._tensors.is_encoded(part.stored):
            return None
        *stack, _, columns = self._tensors.shape(part.stored)
        if stack or len(part.sizes) != 2 or part.sizes[1] != columns or not part.is_run or part.offset % columns:
            return None
        return self._tensors.matrix(part.stored, part.offset // columns, part.sizes[0], None)

    def boxes(self, name: str) -> Sequence[Box]:
        return self._boxes[name]

    def view(self, name: str, index: int) -> Tensor:
        return self._checks.view(name, index)

    def is_encoded(self, name: str, index: int) -> bool:
        """Returns whether a piece is stored in few bits."""
        return self._tensors.is_encoded(self._parts[name][index].stored)

    def stored_view(self, name: str, index: int) -> Tensor:
        part = self._parts[name][index]
        return part.of(self._tensors.view(part.stored))

    def stored_at(self, name: str, index: int) -> tuple[Path, int] | None:
        part = self._parts[name][index]
        if not part.is_run or len(self._parts[name]) > _MOST_RUNS or self._tensors.is_encoded(part.stored):
            return None
        path, offset = self._tensors.stored_at(part.stored)
        return path, offset + part.offset * self.dtype(name).itemsize

    @property
    def checks(self) -> PieceChecks:
        return self._checks

    def sums(self) -> dict[str, str] | None:
        found = {name: self.whole_sum(name) for name in self._shapes}
        known = {name: one for name, one in found.items() if one is not None}
        return known if len(known) == len(found) else None

    def whole_sum(self, name: str) -> str | None:
        """Returns the checksum of a whole tensor; None where not all of its pieces were summed."""
        parts, found, itemsize = self._parts[name], self._checks.sums, self.dtype(name).itemsize
        if any((name, index) not in found for index in range(len(parts))):
            return None
        if all(_are_rows(part, self._shapes[name]) for part in parts):
            sizes = (part.num_elements * itemsize for part in parts)
            return joined_checksum((found[name, index], size) for index, size in enumerate(sizes))
        with self._checks.glancing():
            return content_checksum(self.content(name, Box()), Scratch())

    def expect(self, sums: Mapping[str, str], recorded_by: str) -> None:
        self._expected, self._recorded_by = sums, recorded_by
        for name in {name for name, _ in self._checks.sums}:
            self._checks.compare(name)

    def expected_sum(self, name: str) -> str | None:
        """Returns the checksum that a whole tensor must have; None where none is on record."""
        return self._expected.get(name)

    def piece_counts(self) -> dict[str, int]:
        return {name: len(parts) for name, parts in self._parts.items()}

    def rows(self, name: str) -> Rows:
        # a part may be less than a row, such as one projection of an expert
        return super().rows(name) if len(self._parts[name]) == 1 else ReadRows(self, name)

    def recorded_sum(self, name: str, index: int) -> str | None:
        return self._expected.get(name) if len(self._parts[name]) == 1 else None

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        own = self._parts[name][index].stored
        file, _ = self._tensors.stored_at(own)
        if name not in self._expected:
            raise UserError(
                f"{file} is not the same on all machines of the run: {own} has checksum {found} on one and {expected} "
                "on another; copy the model again."
            )
        raise UserError(
            f"{file} has changed: {name}, of which {own} is a part, has checksum {found}, but had {expected} when "
            f"{self._recorded_by} was written; give the model as it was then."
        )

    def outside_names(self) -> list[str]:
        return [name for name in self._arrangement.others if name in self._arrangement.ignored]

    def outside_shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._tensors.shape(name), self._tensors.dtype(name)

    def outside_content(self, name: str) -> Content:
        return self._tensors.content(name)

    def _whole(self, name: str) -> Tensor:
        """Returns a tensor that is stored as it is, unchecked."""
        (part,) = self._arrangement.by_name[name]
        return part.of(self._tensors.view(part.stored))

    def _with_head(self, model: ModelFolder) -> tuple[ModelFolder, bool]:
        """Returns the model, and whether it stores a head that is tied; see `HfSource`."""
        both = ("embed_tokens.weight", TIED_HEAD)
        if not model.decoder.tied_embeddings or any(name not in self._arrangement.by_name for name in both):
            return model, False
        embedding, head = map(self._whole, both)
        if torch.equal(embedding, head):
            return model, True
        if model.is_ambiguous:
            return model.untied(), False
        raise UserError(
            f"{model.path} has tie_word_embeddings true, but its head differs from its table of tokens: set "
            "tie_word_embeddings to false in config.json if the head is meant to be its own."
        )

    def _check_parts(self) -> None:
        """Raises UserError unless the folder has all tensors of the model, in its shapes, and no others."""
        found = self._arrangement
        if missing := [self.model.names.to_hf(name).name for name in self._shapes if name not in found.by_name]:
            self._refuse_encoded(missing[0])
            raise UserError(
                f"{self.label} lacks {listed(missing)}, which its config.json calls for: copy the model again, "
                "or correct config.json."
            )
        for name, shape in self._shapes.items():
            made = found.shapes_made[name]
            dtypes = {self._tensors.dtype(part.stored) for part in found.by_name[name]}
            stored = found.by_name[name][0].stored
            if made != shape:
                self._refuse_encoded(stored)
                raise UserError(
                    f"{self.label} has {stored}, of which {self.model.names.to_hf(name).name} has shape {list(made)}, "
                    f"but its config.json calls for {list(shape)}: correct config.json or copy the model again."
                )
            if any(dtype.itemsize == 1 for dtype in dtypes):
                self._refuse_encoded(stored)
                raise UserError(
                    f"{self.label} stores {stored} in a dtype of codes, not of weights: use the model as it was before "
                    "it was encoded."
                )
            if len(dtypes) > 1:
                raise UserError(
                    f"{self.label} stores the parts of {name} in {listed(sorted(map(str, dtypes)))}: save the model in "
                    "one dtype."
                )
        used = {part.stored for name in self._shapes for part in found.by_name[name]}.union(self.outside_names())
        if self.has_tied_head:
            used.update(part.stored for part in found.by_name[TIED_HEAD])
        refuse_leftover(
            self.label,
            found.shapes,
            used,
            because=f"a {self.model.family} model with its config.json does not have: it is another architecture, use "
            "a supported one.",
        )

        self._refuse_partial(used.difference(self.outside_names()))

    def _refuse_partial(self, used: Collection[str]) -> None:
        """Raises UserError where transformers would read a part of a tensor and drop the rest."""
        for stored in used:
            parts, shape = self._arrangement.by_stored[stored], self._arrangement.shapes[stored]
            if sum(part.num_elements for part in parts) != prod(shape):
                raise UserError(
                    f"{self.label} has {stored} with shape {list(shape)}, of which transformers reads a part alone: "
                    "correct config.json or copy the model again."
                )

    def _refuse_encoded(self, unexpected: str) -> None:
        """Raises UserError where the reason is that the weights are stored in some encoding."""
        if (encoding := self.model.hf_config.get("quantization_config")) is not None:
            raise UserError(
                f"{self.label} is stored encoded (quantization_config.quant_method {encoding.get('quant_method')} in "
                f"config.json; see {unexpected}): use the model as it was before, and model.base_dtype to encode it "
                "while it is read."
            )


class _WholeChecks(PieceChecks):
    """Checks of pieces whose checksums are on record for whole tensors only."""

    def __init__(self, source: ArrangedSource) -> None:
        super().__init__(source)
        self._source, self._counts = source, source.piece_counts()

    def summing(self, name: str, index: int) -> Callable[[], str]:
        if (matrix := self._source.matrix(name)) is not None:
            return lambda: sum_of(matrix, self._source.shape(name)[1], self._source.dtype(name))
        if self._source.is_encoded(name, index):  # decoded by who sums it, one at a time
            return lambda: checksum(self._source.stored_view(name, index))
        return super().summing(name, index)

    def record(self, piece: Piece, found: str) -> None:
        super().record(piece, found)
        if self._counts[piece[0]] > 1:
            self.compare(piece[0])

    def compare(self, name: str) -> None:
        """Raises UserError where all pieces of a tensor are known, and are not what is on record."""
        expected = self._source.expected_sum(name)
        if expected is None:
            return
        found = self._source.whole_sum(name)
        if found not in (None, expected):
            self._source.refuse_piece(name, 0, str(found), expected)


def box_of(part: StoredPart, shape: tuple[int, ...]) -> Box:
    """Returns the box of a part of a tensor of `shape`."""
    runs = [
        (dim, start, size)
        for dim, (start, size) in enumerate(zip(part.starts, part.sizes, strict=True))
        if size != shape[dim]
    ]
    return Box(*runs[0], tuple(runs[1:])) if runs else Box()


def _are_rows(part: StoredPart, shape: tuple[int, ...]) -> bool:
    """Returns whether a box's numbers follow each other in the whole tensor."""
    return part._replace(strides=contiguous_strides(shape)).is_run
