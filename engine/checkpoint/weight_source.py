"""The weights of a base model by logical name, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content
from engine.checkpoint.copying.stored_tensors import StoredTensors
from engine.checkpoint.fingerprint import fingerprint_of
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.reshard import Box
from engine.checkpoint.rows import Rows
from engine.checkpoint.verification import PieceChecks
from engine.distributed.sharding import ShardSpec
from engine.kernels.formats import Format
from engine.quantization.shipped.config import ShippedEncoding
from engine.quantization.shipped.spelling import Spelling
from engine.sentences import listed
from engine.telemetry.format import counted

TIED_HEAD = "lm_head.weight"
SHARED = "embed_tokens.weight"
"""The matrix that is embedding and head of a tied model."""


class WeightSource(StoredTensors):
    """The weights of a base model by logical name: all parameters that its description calls for.

    Tied embeddings appear once, as `embed_tokens.weight`.

    Args:
        model: its description.
        has_tied_head: the model is tied and yet stores a copy of the matrix as its head, which an export restores.
    """

    def __init__(self, model: ModelFolder, *, has_tied_head: bool) -> None:
        self.model = model
        self.has_tied_head = has_tied_head
        self._shapes = model.expected_shapes()
        self._fingerprint: str | None = None

    def tensor_names(self) -> list[str]:
        return list(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    @property
    def label(self) -> str:
        return str(self.model.path)

    @property
    def changed_config(self) -> dict[str, Any] | None:
        """The config.json that an export must write, where it is not the model's own."""
        return None

    @property
    def notes(self) -> list[str]:
        """Remarks for the user of an export, a sentence each."""
        return []

    def changed_names(self) -> list[str]:
        """Tensors whose values are not the stored base's."""
        return []

    def format(self, name: str) -> Format | None:
        """Returns the format in few bits in which a weight is stored, None where its numbers are, or of another name.

        `view` and `read` give the numbers either way.

        Raises:
            UserError: its codes can be decoded, but are in none of the formats.
        """
        return None

    def in_few_bits(self, name: str) -> bool:
        """Returns whether a weight is stored in few bits, in a format or in parts that have none together."""
        return self.format(name) is not None

    def read_parts(self, name: str, spec: ShardSpec, format: Format) -> dict[str, Tensor]:
        """Returns a rank's part of a weight as it is stored, in the parts of `engine.kernels.formats`, on the host.

        Args:
            name: logical name of a weight that has a format.
            spec: which rows and columns.
            format: that of `self.format`; with a smaller `granule` where rows that do not share a scale lie together.

        Raises:
            UserError: the shard begins or ends inside of numbers that share a scale or a byte.
        """
        raise NotImplementedError

    def spelling(self, name: str) -> Spelling | None:
        """Returns how a weight in few bits is stored, None where its numbers are."""
        return None

    @property
    def encoding(self) -> ShippedEncoding | None:
        """The encoding that config.json has for weights in few bits; None where there are none."""
        return None

    def beside_codes(self) -> Mapping[str, Tensor]:
        """Returns what is stored beside weights in few bits and numbers do not depend on, such as scales of
        activations, by its name in the checkpoint."""
        return {}

    def outside_codes(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the tensors in which those of `outside_names` are stored that are in few bits, by their names in the
        checkpoint."""
        return {}

    def encoding_note(self, *, decodes: bool) -> str | None:
        """Returns a line about weights that are stored in few bits; None without any.

        Args:
            decodes: they are trained on decoded.
        """
        return None

    def identity(self) -> dict[str, Any]:
        """Returns the settings that decide the values beside the files that are read, as JSON."""
        return {}

    def write_report(self, folder: Path, facts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
        """Writes a report on values that were computed while tensors were written; nothing where they were only
        copied.
        """
        return {}

    def exact_rows(self, name: str) -> Rows:
        """Returns the rows of a tensor before they are rounded to its dtype, where they are computed."""
        return self.rows(name)

    def update_norm(self, name: str) -> float | None:
        """Returns the Frobenius norm of what an adapter adds to a tensor; None without one."""
        return None

    def outside_names(self) -> list[str]:
        """Returns the names, as stored, of tensors that are not the language model's."""
        raise NotImplementedError

    @property
    def head_note(self) -> str | None:
        """A line for a run's log where the head is not the stored one; else None."""
        return None

    def outside_note(self) -> str | None:
        """Returns a line about tensors that nothing here is computed with, but for those that the family is known to
        store; None without any."""
        names = [name for name in self.outside_names() if not self.model.names.is_unused(name)]
        if not names:
            return None
        return (
            f"note: nothing is computed with {counted(len(names), 'tensor')} beside the language model: {listed(names)}"
        )

    def outside_shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns shape and dtype of a tensor of `outside_names`."""
        raise NotImplementedError

    def outside_content(self, name: str) -> Content:
        """Returns the contents of a tensor of `outside_names`, as numbers."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Returns the identity of the model: equal for a Hugging Face folder and every partitioned import of it.

        Covers the config (without keys about its author) and of each tensor its name, shape, dtype and the
        first 4 KiB of its first and last row. It distinguishes models before any weight is read; `sums` cover all
        bytes.
        """
        if self._fingerprint is None:
            self._fingerprint = self.computed_fingerprint()
        return self._fingerprint

    def known_fingerprint(self) -> str | None:
        """Returns the fingerprint where nothing has to be read for it, else None."""
        return self._fingerprint

    def know_fingerprint(self, fingerprint: str) -> None:
        """Takes over the results of another rank's reading."""
        self._fingerprint = fingerprint

    def computed_fingerprint(self) -> str:
        """Returns the fingerprint, from the tensors themselves."""
        with self.checks.glancing():
            return fingerprint_of(self, self.model.hf_config)

    @property
    def checks(self) -> PieceChecks:
        """Checks of the stored pieces, each summed before its first use where a checksum is on record."""
        raise NotImplementedError

    def sums(self) -> dict[str, str] | None:
        """Returns logical name -> checksum of the whole tensor, row-major, and so the same for a Hugging Face folder
        and every partitioned import of it; None where they are not known."""
        return None

    def expect(self, sums: Mapping[str, str], recorded_by: str) -> None:
        """Takes the checksums that whole tensors of this model had before; from now on reads are compared with them.

        Args:
            recorded_by: the checkpoint that has them, for sentences.

        Raises:
            UserError: the model is already known to have others.
        """
        raise NotImplementedError


class WrappedSource(WeightSource):
    """The weights of another source, whose fingerprint and checksums are its own; subclasses change some of them.

    Args:
        base: the other source.
        model, has_tied_head: as of `WeightSource`.
    """

    def __init__(self, base: WeightSource, model: ModelFolder, *, has_tied_head: bool) -> None:
        super().__init__(model, has_tied_head=has_tied_head)
        self.base = base

    def stored_name(self, name: str) -> str:
        """Returns the base's name of a tensor."""
        return name

    @property
    def changed_config(self) -> dict[str, Any] | None:
        return self.base.changed_config

    @property
    def notes(self) -> list[str]:
        return self.base.notes

    def changed_names(self) -> list[str]:
        return self.base.changed_names()

    def format(self, name: str) -> Format | None:
        return self.base.format(self.stored_name(name))

    def in_few_bits(self, name: str) -> bool:
        return self.base.in_few_bits(self.stored_name(name))

    def read_parts(self, name: str, spec: ShardSpec, format: Format) -> dict[str, Tensor]:
        return self.base.read_parts(self.stored_name(name), spec, format)

    def spelling(self, name: str) -> Spelling | None:
        return self.base.spelling(self.stored_name(name))

    @property
    def encoding(self) -> ShippedEncoding | None:
        return self.base.encoding

    def beside_codes(self) -> Mapping[str, Tensor]:
        return self.base.beside_codes()

    def outside_codes(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self.base.outside_codes()

    def encoding_note(self, *, decodes: bool) -> str | None:
        return self.base.encoding_note(decodes=decodes)

    def identity(self) -> dict[str, Any]:
        return self.base.identity()

    def write_report(self, folder: Path, facts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
        return self.base.write_report(folder, facts)

    def dtype(self, name: str) -> torch.dtype:
        return self.base.dtype(self.stored_name(name))

    def boxes(self, name: str) -> Sequence[Box]:
        return self.base.boxes(self.stored_name(name))

    def view(self, name: str, index: int) -> Tensor:
        return self.base.view(self.stored_name(name), index)

    def read(self, name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        return self.base.read(self.stored_name(name), spec, out)

    def stored_at(self, name: str, index: int) -> tuple[Path, int] | None:
        return self.base.stored_at(self.stored_name(name), index)

    def recorded_sum(self, name: str, index: int) -> str | None:
        return self.base.recorded_sum(self.stored_name(name), index)

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        self.base.refuse_piece(self.stored_name(name), index, found, expected)

    def contents(self, name: str, wanted: Sequence[Box]) -> list[Content]:
        return self.base.contents(self.stored_name(name), wanted)

    def rows(self, name: str) -> Rows:
        return self.base.rows(self.stored_name(name))

    def outside_names(self) -> list[str]:
        return self.base.outside_names()

    def outside_shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self.base.outside_shape(name)

    def outside_content(self, name: str) -> Content:
        return self.base.outside_content(name)

    def fingerprint(self) -> str:
        return self.base.fingerprint()

    def known_fingerprint(self) -> str | None:
        return self.base.known_fingerprint()

    def know_fingerprint(self, fingerprint: str) -> None:
        self.base.know_fingerprint(fingerprint)

    def computed_fingerprint(self) -> str:
        return self.base.computed_fingerprint()

    @property
    def checks(self) -> PieceChecks:
        return self.base.checks

    def sums(self) -> dict[str, str] | None:
        return self.base.sums()

    def expect(self, sums: Mapping[str, str], recorded_by: str) -> None:
        self.base.expect(sums, recorded_by)
