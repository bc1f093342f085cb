"""A base whose head is its embedding, as one with a head of its own that is a copy of it.

Adapters beside a trained embedding or head untie it: PEFT trains a copy of either (`modules_to_save`)
and leaves the shared matrix to the other. With `ensure_weight_tying` it trains one copy for both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content
from engine.checkpoint.reshard import Box
from engine.checkpoint.rows import Rows
from engine.checkpoint.verification import PieceChecks
from engine.checkpoint.weight_source import TIED_HEAD, WeightSource
from engine.distributed.sharding import ShardSpec

SHARED = "embed_tokens.weight"
"""The matrix that is embedding and head of a tied model."""


def trained_apart(lora: Mapping[str, Any], trained: Collection[str]) -> bool:
    """Returns whether a run over a tied base trained a copy of its embedding or head.

    Args:
        lora: the settings of its adapters, as its checkpoints have them; empty without adapters. Those from before
            there was lora.ensure_weight_tying trained one matrix for both.
        trained: names of all that it trained.
    """
    return TIED_HEAD in trained or (SHARED in trained and not lora.get("ensure_weight_tying", True))


def untied(base: WeightSource) -> WeightSource:
    """Returns the weights with a head of its own; the same where the model has one."""
    return UntiedSource(base) if base.model.decoder.tied_embeddings else base


class UntiedSource(WeightSource):
    """The weights of a tied base, and its embedding once more as `lm_head.weight`.

    Its fingerprint and checksums are the base's, from which it is read.
    """

    def __init__(self, base: WeightSource) -> None:
        super().__init__(base.model.untied(), has_tied_head=False)
        self.base = base

    @property
    def changed_config(self) -> dict[str, Any] | None:
        return self.model.hf_config

    @property
    def notes(self) -> list[str]:
        return [
            *self.base.notes,
            "the base ties its head to its embedding, and training one of them makes them differ: both are "
            "written, and tie_word_embeddings is false in config.json",
        ]

    def changed_names(self) -> list[str]:
        return self.base.changed_names()

    def identity(self) -> dict[str, Any]:
        return self.base.identity()

    def write_report(self, folder: Path, facts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
        return self.base.write_report(folder, facts)

    def dtype(self, name: str) -> torch.dtype:
        return self.base.dtype(_stored(name))

    def boxes(self, name: str) -> Sequence[Box]:
        return self.base.boxes(_stored(name))

    def view(self, name: str, index: int) -> Tensor:
        return self.base.view(_stored(name), index)

    def read(self, name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        return self.base.read(_stored(name), spec, out)

    def stored_at(self, name: str, index: int) -> tuple[Path, int] | None:
        return self.base.stored_at(_stored(name), index)

    def piece_checksum(self, name: str, index: int) -> str | None:
        return self.base.piece_checksum(_stored(name), index)

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        self.base.refuse_piece(_stored(name), index, found, expected)

    def check_piece(self, name: str, index: int) -> None:
        self.base.check_piece(_stored(name), index)

    def check_tensor(self, name: str) -> None:
        self.base.check_tensor(_stored(name))

    def content(self, name: str, box: Box) -> Content:
        return self.base.content(_stored(name), box)

    def contents(self, name: str, wanted: Sequence[Box]) -> list[Content]:
        return self.base.contents(_stored(name), wanted)

    def rows(self, name: str) -> Rows:
        return self.base.rows(_stored(name))

    def outside_names(self) -> list[str]:
        return self.base.outside_names()

    def read_outside(self, name: str) -> Tensor:
        return self.base.read_outside(name)

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


def _stored(name: str) -> str:
    return SHARED if name == TIED_HEAD else name
