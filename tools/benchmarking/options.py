"""What each section can be asked, as frozen records; the command line is made from them. Does not import torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from engine.errors import UserError

DTYPES = ("float32", "bfloat16")
KERNELS = ("auto", "reference", "native")
DEVICES = ("auto", "cpu", "cuda")


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """A whole training step against transformers + PEFT and against its matrix products alone.

    A random Llama with adapters on all seven linears of a block, AdamW, gradient clipping. First both sides must give
    the same losses; then they are timed in turn.

    Raises:
        UserError: sizes that do not fit together.
    """

    hidden: int = _option(512, "width of the residual stream")
    layers: int = _option(6, "number of layers")
    heads: int = _option(8, "number of query heads; the head size is hidden / heads")
    kv_heads: int = _option(4, "number of key/value heads")
    intermediate: int = _option(1408, "width of the MLP")
    vocab: int = _option(32000, "vocabulary size")
    rank: int = _option(16, "rank of the adapters")
    rows: int = _option(2, "rows in a batch")
    length: int = _option(512, "tokens in a row")
    dropout: float = _option(0.0, "dropout on the adapters' input")
    dtype: str = _option("float32", "of weights and activations", DTYPES)
    kernels: str = _option("auto", "the engine's kernels", KERNELS)
    repeats: int = _option(15, "timed steps of each side")
    warmup: int = _option(2, "untimed steps of each side, after those that check the losses")
    threads: int = _option(0, "CPU threads; 0 leaves torch's choice")
    device: str = _option("auto", "auto takes a GPU where there is one", DEVICES)

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "rank", "rows", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give a number of at least 1.")
        if self.length < 2:
            raise UserError(f"--length is {self.length}: give at least 2 tokens, so that one can be predicted.")
        if min(self.threads, self.warmup) < 0:
            raise UserError(f"--threads {self.threads} --warmup {self.warmup}: neither may be negative.")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise UserError(
                f"--hidden {self.hidden} over --heads {self.heads} must give a whole, even head size: change one."
            )
        if self.heads % self.kv_heads:
            raise UserError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}: change one.")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"--dropout is {self.dropout}: give a probability of at least 0 and below 1.")
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES), ("kernels", KERNELS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"--{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}.")

    @property
    def tokens(self) -> int:
        """In a batch."""
        return self.rows * self.length


SECTIONS: dict[str, type] = {"step": StepOptions}
"""Section name, which is also its module's name -> its options."""

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """One `--name-of-field` for each field of the record."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        parser.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=hints[item.name],
            default=item.default,
            choices=item.metadata["choices"],
            metavar=None if item.metadata["choices"] else hints[item.name].__name__.upper(),
            help=f"{item.metadata['help']} (default {item.default})",
        )


def read_options(arguments: argparse.Namespace, kind: type[T]) -> T:
    """The record that the parsed command line describes.

    Raises:
        UserError: see the record.
    """
    values = vars(arguments)
    return kind(**{item.name: values[item.name] for item in fields(kind)})  # type: ignore[arg-type]
