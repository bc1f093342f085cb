"""The report on reading a data set: counts of its records for the log, and warnings before training on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.telemetry.format import counted

Unit = Literal["document", "pair", "answer", "prompt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetReport:
    """Counts of a data set's units. A unit is kept or dropped as a whole: a document, a pair, or a judged answer.

    Args:
        unit: the name of a unit.
        limit: data.seq_length; of a pair each side may have this many tokens.
        records: records read; a .txt file is one. 0 for a token store, which holds documents.
        documents: units kept; a .txt file gives several.
        pieces: documents after data.overlong cut; 0 where nothing was cut.
        rows: samples of the data order: units, or packs of them.
        tokens: tokens that rows have, without padding.
        reused_tokens: tokens of the kept units beside these: of units that begin like others, whose row has them once.
        target_tokens: tokens of the kept units that are trained on.
        truncated: units that were kept without their ends.
        lost_tokens: tokens of these ends.
        longest: tokens of the longest unit as it was read; of a pair, of its longer side.
        dropped_overlong: units dropped because they are too long (data.overlong drop).
        dropped_prompt_only: units dropped because truncation leaves nothing of their answer.
        dropped_without_target: units dropped because they have no target.
        dropped_alike: pairs dropped because both answers are the same.
        dropped_in_image: units dropped because truncation would cut through an image.
        first_in_image: the record of the first of them.
        packing_efficiency: tokens over rows times row length, or None without packing.
        left_over: tokens that concatenation drops, because they fill no row or are in one without a target.
        seconds: time it took.
    """

    unit: Unit = "document"
    limit: int = 0
    records: int = 0
    documents: int = 0
    pieces: int = 0
    rows: int = 0
    tokens: int = 0
    reused_tokens: int = 0
    target_tokens: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    longest: int = 0
    dropped_overlong: int = 0
    dropped_prompt_only: int = 0
    dropped_without_target: int = 0
    dropped_alike: int = 0
    dropped_in_image: int = 0
    first_in_image: str = ""
    packing_efficiency: float | None = None
    left_over: int = 0
    seconds: float = 0.0

    @property
    def dropped(self) -> int:
        whole = self.dropped_overlong + self.dropped_prompt_only + self.dropped_without_target
        return whole + self.dropped_alike + self.dropped_in_image

    def summary(self) -> str:
        """Returns one line for a log."""
        parts = [] if not self.records else [counted(self.records, "record")]
        parts.append(counted(self.documents, self.unit))
        if self.pieces:
            parts.append(f"cut into {counted(self.pieces, 'piece')}")
        tokens = self.tokens + self.reused_tokens
        parts.append(f"{counted(tokens, 'token')} ({self.target_tokens:,} trained on)")
        if self.reused_tokens:
            share = self.reused_tokens / tokens
            parts.append(f"{self.reused_tokens:,} of them shared with other samples ({share:.0%} saved)")
        for count, what in (
            (self.truncated, "truncated"),
            (self.dropped_overlong, "dropped as too long"),
            (self.dropped_prompt_only, "dropped with no answer token left"),
            (self.dropped_without_target, "dropped with no token to train on"),
            (self.dropped_alike, "dropped with two equal answers"),
            (self.dropped_in_image, "dropped where an image would be cut"),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        if self.packing_efficiency is not None:
            parts.append(f"{counted(self.rows, 'row')} {self.packing_efficiency:.1%} full")
        if self.left_over:
            parts.append(f"{counted(self.left_over, 'token')} left over")
        return ", ".join(parts) + f", in {self.seconds:.1f} s"

    def warnings(self) -> list[str]:
        """Returns warnings about tokens and answers that were lost."""
        found, total = [], self.documents + self.dropped
        if self.truncated:
            have = "has" if self.truncated == 1 else "have"
            is_longer = f"{have} an answer that, with its prompt, is" if self.unit == "pair" else _is(self.truncated)
            found.append(
                f"{self.truncated:,} of {counted(total, self.unit)} {is_longer} longer than "
                f"data.seq_length {self.limit} and truncated, {counted(self.lost_tokens, 'token')} lost; "
                f"data.seq_length {self.longest} would keep all tokens"
            )
        if self.dropped_prompt_only:
            found.append(
                f"{self.dropped_prompt_only:,} of {counted(total, self.unit)} {_is(self.dropped_prompt_only)} dropped: "
                f"the prompt alone fills data.seq_length {self.limit}, so none of the answer is left to train on; the "
                f"longest {self.unit} has {counted(self.longest, 'token')}"
            )
        if self.dropped_in_image:
            found.append(
                f"{self.dropped_in_image:,} of {counted(total, self.unit)} {_is(self.dropped_in_image)} dropped: "
                f"data.seq_length {self.limit} would cut inside an image, first in {self.first_in_image}; the "
                f"longest {self.unit} has {counted(self.longest, 'token')}"
            )
        return found

    def nothing_left(self, names: str, expected: str) -> str:
        """Returns the sentence for a data set in which nothing is left.

        Args:
            names: of the files.
            expected: what too little is left of.
        """
        limit = f"data.seq_length {self.limit}"
        reasons = [
            f"{count:,} {one if count == 1 else many} {what}"
            for count, one, many, what in (
                (self.dropped_overlong, "is", "are", f"longer than {limit}"),
                (self.dropped_prompt_only, "has", "have", f"a prompt that alone fills {limit}"),
                (self.dropped_without_target, "has", "have", "no token to train on"),
                (self.dropped_alike, "has", "have", "two equal answers"),
                (self.dropped_in_image, "has", "have", f"an image that {limit} would cut"),
            )
            if count
        ]
        whole = f"of {counted(self.documents + self.dropped, self.unit)} " if reasons else ""
        advice = f"raise data.seq_length (the longest {self.unit} has {counted(self.longest, 'token')})"
        if not (self.dropped_overlong or self.dropped_prompt_only or self.dropped_in_image):
            advice = "give records with tokens to train on"
        return f"{names} leaves {expected}: {whole}{' and '.join(reasons)}{'; ' if reasons else ''}{advice}."


def context_warning(seq_length: int, lengths: NDArray[np.int64], context: int) -> str | None:
    """Returns a warning where samples may be longer than the model's context; None where they may not.

    Args:
        seq_length: data.seq_length.
        lengths: int64 [D], tokens of each sample; positions restart in each.
        context: tokens that the model knows positions of.
    """
    if seq_length <= context:
        return None
    text = f"data.seq_length is {seq_length}, but the model's context is {context} tokens (max_position_embeddings): "
    if not (beyond := int((lengths > context).sum())):
        return f"{text}no sample is longer than that so far"
    return (
        f"{text}{beyond:,} of {counted(len(lengths), 'sample')} {'is' if beyond == 1 else 'are'} longer, up to "
        f"{int(lengths.max())}, and the model does not know those positions; set data.seq_length to {context}, or "
        "stretch the context with rope_scaling in config.json"
    )


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
