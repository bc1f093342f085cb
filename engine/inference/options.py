"""Options of generation: the model, sampling, the end of answers. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.choices import BaseDType
from engine.config.model import DType, Kernels
from engine.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """The model, and its layout on the ranks.

    Args:
        path: Hugging Face folder or partitioned base; None takes the base that the run in `adapter` records.
        adapter: PEFT adapter, run or checkpoint of one; None for the base alone.
        step: which checkpoint of a run; best is that of the best evaluation.
        tokenizer: where the tokenizer is; None for the model's own folder.
        tensor: tensor-parallel ranks; None for all that the pipeline leaves.
        pipeline: pipeline ranks.
        expert: tensor-parallel ranks over which the experts of a mixture are divided, each whole; 1 cuts every expert
            over all of them.
        dtype: of weights and arithmetic; None for float32 on a CPU and bfloat16 on a GPU.
        base_dtype: storage format of the layers' linears; None for `dtype`.
        kernels: backend of the ops.
        download: whether the base that a run records may be downloaded from the Hugging Face hub.
    """

    path: Path | None
    adapter: Path | None = None
    step: int | Literal["best"] | None = None
    tokenizer: Path | None = None
    tensor: int | None = None
    pipeline: int = 1
    expert: int = 1
    dtype: DType | None = None
    base_dtype: BaseDType | None = None
    kernels: Kernels = "auto"
    download: bool = False

    def __post_init__(self) -> None:
        if self.path is None and self.adapter is None:
            raise UserError("there is no --model: give the folder of a Hugging Face model or of a partitioned base.")
        for name, value in (("tensor", self.tensor), ("pipeline", self.pipeline), ("expert", self.expert)):
            _require(value is None or value >= 1, name, value, "at least 1")
        if self.step is not None and self.adapter is None:
            raise UserError("--step chooses a checkpoint of the run in --adapter, which is not given: leave it out.")

    def tensor_size(self, world_size: int) -> int:
        """Returns the number of tensor-parallel ranks among `world_size` ranks.

        Raises:
            UserError: the ranks are not those that were asked for.
        """
        tensor = self.tensor if self.tensor is not None else max(1, world_size // self.pipeline)
        if tensor * self.pipeline != world_size:
            raise UserError(
                f"--tensor {tensor} and --pipeline {self.pipeline} need {tensor * self.pipeline} ranks, but there are "
                f"{world_size}: start it with --nproc {tensor * self.pipeline}, or change one of them."
            )
        if tensor % self.expert:
            raise UserError(
                f"--expert is {self.expert}, but there are {tensor} tensor ranks to divide experts over: use an "
                f"--expert that divides {tensor}."
            )
        return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The sampling settings.

    Args:
        temperature: logits are divided by it; 0 takes the most likely token (greedy).
        top_k: only the k most likely tokens; None for all.
        top_p: only the most likely tokens whose probabilities together reach it; 1 for all.
        min_p: only tokens at least this many times as likely as the most likely one; 0 for all.
        repetition_penalty: logits of tokens that the row has, prompt included, are divided by it where they are
            positive and multiplied where not (arXiv 1909.05858); 1 for none.
        seed: of the random numbers.

    Raises:
        UserError: a value out of its range, or one that has no effect where decoding is greedy.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, penalty = self.temperature, self.repetition_penalty
        _require(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "0 or more")
        _require(self.top_k is None or self.top_k >= 1, "top-k", self.top_k, "at least 1")
        _require(0 < self.top_p <= 1, "top-p", self.top_p, "more than 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min-p", self.min_p, "from 0 to 1")
        _require(math.isfinite(penalty) and penalty > 0, "repetition-penalty", penalty, "more than 0")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 4294967295")
        if self.greedy and (self.top_k is not None or self.top_p < 1 or self.min_p > 0):
            raise UserError(
                "--top-k, --top-p and --min-p choose among random tokens, but --temperature is 0, which always takes "
                "the most likely one: give a --temperature above 0, or leave them out."
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0


def _require(good: bool, name: str, value: object, expected: str) -> None:
    if not good:
        raise UserError(f"--{name} is {value}, but {expected} was expected: change it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of generation: when rows end, and how many run at a time.

    Args:
        max_new_tokens: of a row.
        stop_ids: tokens that end a row; not part of its text.
        stop_texts: texts that end a row; not part of it either.
        slots: rows at a time.
        prefill_tokens: maximum tokens of prompts that are prefilled together; a longer prompt is prefilled alone.

    Raises:
        UserError: a number below 1, or an empty stop text.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    slots: int = 8
    prefill_tokens: int = 4096

    def __post_init__(self) -> None:
        for name, value in (
            ("max-new-tokens", self.max_new_tokens),
            ("batch", self.slots),
            ("prefill-tokens", self.prefill_tokens),
        ):
            _require(value >= 1, name, value, "at least 1")
        if not all(self.stop_texts):
            raise UserError("--stop is an empty text, which every answer contains: leave it out.")
