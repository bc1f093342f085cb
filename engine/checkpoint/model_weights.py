"""A model's weights, wherever they are: a Hugging Face folder, or a partitioned base checkpoint at any layout.

`open_source` adds the weights to the folder that `engine.checkpoint.model_folder` reads. Readers see no difference
between the two. Tensors outside the language model (a vision tower beside a nested one) are passed through conversions
untouched, under their own names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content, FileRange, StoredBytes
from engine.checkpoint.encoded_tensors import EncodedTensors
from engine.checkpoint.leftover import is_buffer, refuse_leftover
from engine.checkpoint.matrix_reading import numbers_of, parts_of, sum_of
from engine.checkpoint.model_folder import ModelFolder, open_model
from engine.checkpoint.pieces import PieceReader
from engine.checkpoint.reader import WEIGHT_DTYPES
from engine.checkpoint.reshard import Box
from engine.checkpoint.verification import PieceChecks
from engine.checkpoint.weight_source import WeightSource
from engine.choices import Implementation
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError
from engine.kernels.formats import Format
from engine.models.families.checking import part_of
from engine.models.names import nest
from engine.models.stacked_parts import ExpertPart
from engine.quantization.shipped.config import ShippedEncoding, encoding_of, without_encoding
from engine.quantization.shipped.spelling import Spelling, StoredMatrix
from engine.seams import resolve
from engine.sentences import listed

OUTSIDE = "outside/"
"""Prefix under which a partitioned checkpoint stores tensors that are not the language model's."""

_KEPT_DECODED = 2
"""Linears of experts that stay decoded: one is read in several runs of rows."""
_ENCODE_HERE = ", and model.base_dtype to encode it while it is read"


class HfSource(WeightSource):
    """Weights of a Hugging Face folder."""

    def __init__(self, model: ModelFolder) -> None:
        encoding = encoding_of(model.hf_config)
        self._tensors = EncodedTensors(model.path, encoding)
        names = nest(model.names, self._tensors.names())
        nested = not names.vision and (names.body, names.head) != (model.names.body, model.names.head)
        self._is_encoded = bool(self._tensors.encoded_names())
        hf_config = without_encoding(model.hf_config) if self._is_encoded else model.hf_config
        model, has_tied_head = self._with_head(replace(model, names=names, hf_config=hf_config))
        super().__init__(model, has_tied_head=has_tied_head)
        self._encoding = encoding if self._is_encoded else None
        self._locations = {name: names.to_hf(name) for name in self._shapes}
        self._decoded = lru_cache(maxsize=_KEPT_DECODED)(self._decode)
        self._checks = _DecodedChecks(self)
        self._expected: Mapping[str, str] = {}
        self._recorded_by = ""
        self._outside = self._check_names(nested)
        for name in self._shapes:
            self._check_shape(name)
            self._check_dtype(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._locations[name].name)

    @property
    def changed_config(self) -> dict[str, Any] | None:
        return self.model.hf_config if self._is_encoded else None

    @property
    def notes(self) -> list[str]:
        return self._tensors.notes()

    def beside_codes(self) -> Mapping[str, Tensor]:
        return self._tensors.stored_views(self._tensors.unread)

    def outside_codes(self) -> Mapping[str, Mapping[str, Tensor]]:
        encoded = (name for name in self._outside if self._tensors.is_encoded(name))
        return {name: self._tensors.stored_views(self._tensors.stored_names(name)) for name in encoded}

    def encoding_note(self, *, decodes: bool) -> str | None:
        return self._tensors.note(decodes=decodes)

    @property
    def encoding(self) -> ShippedEncoding | None:
        return self._encoding

    def format(self, name: str) -> Format | None:
        try:
            return None if (spelling := self.spelling(name)) is None else spelling.format
        except UserError as error:
            raise UserError(f"{self.label}: {self._locations[name].name}: {error}") from error

    def spelling(self, name: str) -> Spelling | None:
        if (location := self._locations.get(name)) is None:
            return None
        return self._tensors.spelling(location.name) if self._tensors.is_encoded(location.name) else None

    def read_parts(self, name: str, spec: ShardSpec, format: Format) -> dict[str, Tensor]:
        self.require(name, spec.global_shape)
        matrix = self._matrix(name)
        assert matrix is not None, name
        self._checks.check(name, 0)
        try:
            return parts_of(matrix, spec, format)
        except UserError as error:
            raise UserError(f"{self.label}: {self._locations[name].name}: {error}") from error

    def read(self, name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        matrix = self._matrix(name) if name in self else None
        is_elsewhere = out is not None and out.device.type != "cpu"  # where decoding is faster, and moves less
        if matrix is None or (spec.local_shape == spec.global_shape and not is_elsewhere):
            return super().read(name, spec, out)
        self.require(name, spec.global_shape)
        self._checks.check(name, 0)
        return numbers_of(matrix, spec, self.dtype(name), out)

    def _matrix(self, name: str) -> StoredMatrix | None:
        """Returns the codes of a weight in few bits; None for numbers."""
        location = self._locations[name]
        if not self._tensors.is_encoded(location.name):
            return None
        return self._tensors.matrix(location.name, location.row_offset, location.num_rows, location.expert)

    def boxes(self, name: str) -> Sequence[Box]:
        return (Box(),)

    def view(self, name: str, index: int) -> Tensor:
        return self._checks.view(name, index)

    @property
    def checks(self) -> PieceChecks:
        return self._checks

    def sums(self) -> dict[str, str] | None:
        found = self._checks.sums
        return {name: found[name, 0] for name in self._shapes} if len(found) == len(self._shapes) else None

    def expect(self, sums: Mapping[str, str], recorded_by: str) -> None:
        self._expected, self._recorded_by = sums, recorded_by
        for (name, index), found in self._checks.sums.items():
            if (expected := self._expected.get(name, found)) != found:
                self.refuse_piece(name, index, found, expected)

    def piece_counts(self) -> dict[str, int]:
        return dict.fromkeys(self._shapes, 1)

    def recorded_sum(self, name: str, index: int) -> str | None:
        return self._expected.get(name)

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        own = self._locations[name].name
        file, _ = self._tensors.stored_at(own)
        if name not in self._expected:
            raise UserError(
                f"{file} is not the same on all machines of the run: {own} has checksum {found} on one and {expected} "
                "on another; copy the model again."
            )
        raise UserError(
            f"{file} has changed: {own} has checksum {found}, but had {expected} when {self._recorded_by} was written; "
            "give the model as it was then."
        )

    def stored_view(self, name: str, index: int) -> Tensor:
        location = self._locations[name]
        if self._tensors.is_encoded(location.name):
            return self._decoded(name)
        tensor = self._tensors.view(location.name)
        if location.expert is not None:
            return location.expert.of(tensor)
        if location.num_rows is None:
            return tensor
        return tensor.narrow(0, location.row_offset, location.num_rows)

    def decoded_sum(self, name: str) -> str:
        """Returns the checksum of the numbers of a weight in few bits, of which a few rows are decoded at a time."""
        matrix = self._matrix(name)
        assert matrix is not None, name
        return sum_of(matrix, self._shapes[name][1], self._tensors.decoded_dtype)

    def _decode(self, name: str) -> Tensor:
        """Returns a whole weight in few bits."""
        matrix, (rows, columns) = self._matrix(name), self._shapes[name]
        assert matrix is not None, name
        out = torch.empty(rows, columns, dtype=self._tensors.decoded_dtype)
        matrix.decode(out, slice(0, rows), slice(0, columns))
        return out

    def stored_at(self, name: str, index: int) -> tuple[Path, int] | None:
        location = self._locations[name]
        if location.expert is not None or self._tensors.is_encoded(location.name):
            return None  # rows that others lie between, columns, or codes
        path, offset = self._tensors.stored_at(location.name)
        row_bytes = math.prod(self._shapes[name][1:]) * self.dtype(name).itemsize
        return path, offset + location.row_offset * row_bytes

    def outside_content(self, name: str) -> Content:
        return self._tensors.content(name)

    def outside_names(self) -> list[str]:
        return self._outside

    def outside_shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._tensors.shape(name), self._tensors.dtype(name)

    def _with_head(self, model: ModelFolder) -> tuple[ModelFolder, bool]:
        """Returns the model, and whether it stores a head that is tied.

        Where config.json has embeddings tied in one place and not in another, they are if the weights are equal, as in
        transformers.

        Raises:
            UserError: they are tied, and differ.
        """
        head, embedding = f"{model.names.head}.weight", model.names.to_hf("embed_tokens.weight").name
        if not model.decoder.tied_embeddings or head not in self._tensors or embedding not in self._tensors:
            return model, False
        if torch.equal(self._tensors.view(head), self._tensors.view(embedding)):
            return model, True
        if model.is_ambiguous:
            return model.untied(), False
        raise UserError(
            f"{model.path} has tie_word_embeddings true, but its {head} differs from {embedding}: "
            "set tie_word_embeddings to false in config.json if the head is meant to be its own."
        )

    def _check_names(self, nested: bool) -> list[str]:
        """Checks that every tensor of the language model is there, and returns the names of the others."""
        stored = set(self._tensors.names())
        wanted = {location.name for location in self._locations.values()}
        names = self.model.names
        if missing := sorted(wanted - stored):
            self._refuse_encoded(missing)
            raise UserError(
                f"{self.label} lacks {listed(missing)}, which its config.json calls for: copy the model again, "
                "or correct config.json."
            )
        if self.has_tied_head:
            wanted.add(f"{names.head}.weight")
        stored -= {name for name in sorted(stored - wanted) if self._tensors.drop_empty_bias(name)}
        unknown = sorted(name for name in stored - wanted if names.is_unused(name) or not is_buffer(name))
        beside = (names.body, f"{names.head}.")
        outside = [name for name in unknown if names.is_unused(name) or (nested and not name.startswith(beside))]
        used = wanted.union(outside)
        if strange := [name for name in unknown if name not in used]:
            self._refuse_encoded(strange)
        refuse_leftover(
            self.label,
            stored,
            used,
            because=f"a {self.model.family} model with its config.json does not have: it is another architecture, use "
            "a supported one.",
        )
        return outside

    def _refuse_encoded(self, unexpected: list[str]) -> None:
        """Raises UserError where the reason is that the weights are stored in some encoding."""
        whole = self.model.hf_config
        text = part_of(whole, "text_config") or {}
        if (encoding := whole.get("quantization_config") or text.get("quantization_config")) is not None:
            raise UserError(
                f"{self.label} is stored encoded (quantization_config.quant_method {encoding.get('quant_method')} in "
                f"config.json; see {unexpected[0]}): use the model as it was before{_ENCODE_HERE}."
            )

    def _check_dtype(self, name: str) -> None:
        """Refuses dtypes of encodings, whose codes would be read as numbers."""
        if (dtype := self.dtype(name)) not in WEIGHT_DTYPES:
            raise UserError(
                f"{self.label} stores {self._locations[name].name} as {str(dtype).removeprefix('torch.')}, which is no "
                f"dtype of weights but of codes: use the model as it was before it was encoded{_ENCODE_HERE}."
            )

    def _check_shape(self, name: str) -> None:
        location, shape = self._locations[name], self._shapes[name]
        if location.expert is not None:
            self._check_expert_shape(name, shape, location.expert)
            return
        stored = self._tensors.shape(location.name)
        if location.num_rows is not None:
            # a part of a fused matrix has the rows that the other parts leave
            wanted = sum(one.num_rows or 0 for one in self._locations.values() if one.name == location.name)
            stored = (location.num_rows + stored[0] - wanted, *stored[1:])
        if stored != shape:
            raise UserError(
                f"{self.label} has {location.name} with shape {list(stored)}, but its config.json calls for "
                f"{list(shape)}: correct config.json or copy the model again."
            )

    def _check_expert_shape(self, name: str, shape: tuple[int, ...], place: ExpertPart) -> None:
        stored = self._locations[name].name
        part = place.part._replace(transposed=False) if self._tensors.is_encoded(stored) else place.part
        found, wanted = self._tensors.shape(stored), (self.model.decoder.num_experts, *part.whole_shape(shape))
        if found != wanted:
            raise UserError(
                f"{self.label} has {stored} with shape {list(found)}, but its config.json calls for {list(wanted)}: "
                "correct config.json or copy the model again."
            )


class _DecodedChecks(PieceChecks):
    """Checks of tensors, of which those in few bits are summed as numbers, so that an import has the same sums."""

    def __init__(self, source: HfSource) -> None:
        super().__init__(source)
        self._source = source

    def summing(self, name: str, index: int) -> Callable[[], str]:
        if self._source.spelling(name) is not None:
            return partial(self._source.decoded_sum, name)
        return super().summing(name, index)


class PartitionedSource(WeightSource):
    """Weights of a partitioned base checkpoint, at whatever layout it was written."""

    def __init__(self, model: ModelFolder) -> None:
        assert model.manifest is not None
        super().__init__(model, has_tied_head=bool(model.manifest.model["has_tied_head"]))
        self.pieces = PieceReader(model.path, model.manifest)
        for name, shape in self._shapes.items():
            self.pieces.require(name, shape)
        refuse_leftover(
            self.label,
            self.pieces.tensor_names(),
            {*self._shapes, *(OUTSIDE + name for name in self.outside_names())},
            because=f"a {model.family} model with its config.json does not have: import the model again.",
        )

    def dtype(self, name: str) -> torch.dtype:
        return self.pieces.dtype(name)

    def boxes(self, name: str) -> Sequence[Box]:
        return self.pieces.boxes(name)

    def view(self, name: str, index: int) -> Tensor:
        return self.pieces.view(name, index)

    def stored_at(self, name: str, index: int) -> tuple[Path, int]:
        return self.pieces.stored_at(name, index)

    def recorded_sum(self, name: str, index: int) -> str:
        return self.pieces.recorded_sum(name, index)

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        self.pieces.refuse_piece(name, index, found, expected)

    @property
    def checks(self) -> PieceChecks:
        return self.pieces.checks

    def sums(self) -> dict[str, str] | None:
        records = {name: self.pieces.manifest.tensors[name].checksum for name in self._shapes}
        known = {name: found for name, found in records.items() if found is not None}
        return known if len(known) == len(records) else None

    def expect(self, sums: Mapping[str, str], recorded_by: str) -> None:
        for name, found in (self.sums() or {}).items():
            if (expected := sums.get(name, found)) != found:
                raise UserError(
                    f"{self.label} is not the model that {recorded_by} was trained on: {name} has checksum {found}, "
                    f"but {expected} is recorded; give the model as it was then."
                )

    def outside_content(self, name: str) -> Content:
        stored = OUTSIDE + name
        place, size = self.pieces.stored_at(stored, 0), self.pieces.piece_bytes(stored, 0)
        refuse = partial(self.pieces.refuse_piece, stored, 0)
        return StoredBytes([FileRange(*place, size, self.recorded_sum(stored, 0), refuse)])

    def outside_names(self) -> list[str]:
        return [name.removeprefix(OUTSIDE) for name in self.pieces.tensor_names() if name.startswith(OUTSIDE)]

    def outside_shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self.pieces.shape(OUTSIDE + name), self.pieces.dtype(OUTSIDE + name)

    def fingerprint(self) -> str:
        """Returns the fingerprint recorded when the checkpoint was written from the model."""
        recorded = self.known_fingerprint()
        return super().fingerprint() if recorded is None else recorded

    def known_fingerprint(self) -> str | None:
        assert self.model.manifest is not None
        recorded = self.model.manifest.fingerprint
        return super().known_fingerprint() if recorded is None else recorded


def open_source(path: str | Path, implementation: Implementation = "auto") -> WeightSource:
    """Opens the weights in a Hugging Face folder or a partitioned base checkpoint.

    Args:
        implementation: see `open_model`.

    Raises:
        UserError: there are none, files are missing or truncated, or tensors do not fit the config.
    """
    model = open_model(path, implementation)
    if model.manifest is not None:
        return PartitionedSource(model)
    reader = HfSource if not model.names.source else resolve(model.names.source)
    source: WeightSource = reader(model)
    return source
