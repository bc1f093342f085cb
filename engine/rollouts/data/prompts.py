"""Prompts: records whose answers the model writes itself, with the columns that the reward functions take.

| fields of a record         | the prompt                                                   | an answer is            |
|----------------------------|--------------------------------------------------------------|-------------------------|
| prompt: a text             | its tokens, after the begin token where the tokenizer has it | a text                  |
| prompt: a list of turns    | the conversation, up to where the assistant's turn begins    | a list of one message   |
| messages: a list of turns  | the same                                                     | the same                |

All other fields are columns, which are passed to the functions that score answers. The model sees none of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.data.build import Advance, Paths, given_by, read_chunks
from engine.data.formats import conversation_turns, refuse_images, refuse_unusable, string_field
from engine.data.hold_out import held_out_rows
from engine.data.order import DataOrder
from engine.data.overlong import Fate, LongRecords, Measures, RecordKind
from engine.data.record_files import Place, Record
from engine.data.sources import RecordSource, open_records
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.sentences import listed
from engine.telemetry.format import counted

_RESERVED = ("prompts", "completions", "completion", "completion_ids")
"""The arguments of the functions beside the columns."""
_TOLD = 64
"""Records between two reports of progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt.

    Args:
        place: of its record.
        ids: its tokens, at least one.
        given: in the form that reward functions take: a text, or a list of messages.
        columns: the other fields of its record.
    """

    place: Place
    ids: tuple[int, ...]
    given: str | list[dict[str, Any]]
    columns: dict[str, Any] = field(default_factory=dict)

    def completion(self, text: str) -> str | list[dict[str, str]]:
        """Returns an answer in the form of the prompt."""
        return text if isinstance(self.given, str) else [{"role": "assistant", "content": text}]


class PromptChat(Protocol):
    """A chat template that shows tools to the model."""

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of a conversation up to where the assistant's turn begins.

        Raises:
            UserError: the template refuses these messages.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of a run.

    Args:
        prompts: in its order.
        columns: names of the fields beside the prompt, in any record; a record without one has None there.
        num_too_long: prompts that were left out, because they leave no room for an answer.
        longest: tokens of the longest prompt that was kept.
    """

    prompts: tuple[Prompt, ...]
    columns: tuple[str, ...]
    num_too_long: int
    longest: int

    def fingerprint(self) -> str:
        """Returns a hash of all data that answers and their scores depend on."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.ids, prompt.given, prompt.columns]).encode())
        return digest.hexdigest()

    def with_columns(self, names: Sequence[str]) -> PromptSet:
        """Returns the same prompts with these columns alone, None where a record has none of the name."""
        whole = tuple(replace(one, columns={name: one.columns.get(name) for name in names}) for one in self.prompts)
        return replace(self, prompts=whole, columns=tuple(names))

    def held_out(self, share: float, seed: int) -> tuple[PromptSet, PromptSet]:
        """Returns the prompts to train on and those to evaluate, each prompt in one of them and in its old order.

        Args:
            share: of the prompts that are held out, rounded, and at least one.
            seed: which ones.

        Raises:
            UserError: no prompt would be left to train on.
        """
        held, order = held_out_rows(len(self.prompts), share, seed, unit="prompt")
        return self._some(order[held:]), self._some(order[:held])

    def first(self, count: int | None) -> PromptSet:
        """Returns the first prompts; None for all."""
        return self._some(np.arange(len(self.prompts))[:count])

    def _some(self, places: NDArray[np.int64]) -> PromptSet:
        kept = tuple(self.prompts[place] for place in np.sort(places).tolist())
        return replace(self, prompts=kept, longest=max(len(prompt.ids) for prompt in kept))

    @property
    def num_samples(self) -> int:
        """Prompts."""
        return len(self.prompts)

    def summary(self, room: int) -> str:
        """Returns a line for the log.

        Args:
            room: maximum tokens of a prompt.
        """
        left_out = ""
        if self.num_too_long:
            left_out = f"; {counted(self.num_too_long, 'prompt')} of more than {room} tokens left out"
        columns = f", columns {listed(self.columns)}" if self.columns else ""
        return f"{counted(len(self.prompts), 'prompt')} of up to {self.longest} tokens{columns}{left_out}"


PROMPT = RecordKind(
    unit="prompt",
    subject="the prompt has",
    ways=("drop",),
    fates=(Fate.OVERLONG,),
    refusal="{subject} {length} tokens, and data.seq_length less rollout.max_completion_length leaves room for "
    "{limit}: raise data.seq_length, or set data.overlong to {ways}.",
)


def read_prompts(
    paths: Paths | RecordSource,
    *,
    tokenizer: Tokenizer,
    room: int,
    overlong: str = "drop",
    chat: PromptChat | None = None,
    progress: Advance | None = None,
) -> PromptSet:
    """Reads and tokenises prompts.

    Args:
        paths: one file, several, or patterns with *, read in the order given; or a source.
        tokenizer: encodes them.
        room: maximum tokens of a prompt, so that an answer has room in a row.
        overlong: "error" refuses a longer one; anything else drops it.
        chat: shows tools to the model; None for none.
        progress: see `Advance`.

    Raises:
        UserError: a file or record cannot be used, or no prompt is left to answer.
    """
    files = given_by(paths)
    long = LongRecords(PROMPT, limit=room, overlong=overlong)
    kept: list[Prompt] = []

    def prompts_of(records: list[tuple[Place, Record]]) -> Iterator[Prompt]:
        return (parse_prompt(place, record, tokenizer, chat) for place, record in records)

    for _, prompts in read_chunks(files, open_records, prompts_of, _TOLD, progress):
        lengths = np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64)
        fates = long.decide(Measures.of_lengths(lengths, np.ones(len(lengths), dtype=bool)))
        for prompt, fate in zip(prompts, fates.tolist(), strict=True):
            if fate == Fate.KEPT:
                kept.append(prompt)
            elif overlong == "error":
                raise prompt.place.error(PROMPT.refuse(len(prompt.ids), room))
    too_long = long.report(records=0).dropped_overlong
    if not kept:
        names = listed(files)
        why = f"all {too_long} prompts have more than {room} tokens" if too_long else "it has no records"
        raise UserError(
            f"{names} has nothing to answer, {why}: give a file with prompts, or raise data.seq_length above "
            "rollout.max_completion_length."
        )
    columns = tuple(sorted({name for prompt in kept for name in prompt.columns}))
    whole = tuple(replace(one, columns={name: one.columns.get(name) for name in columns}) for one in kept)
    return PromptSet(
        prompts=whole, columns=columns, num_too_long=too_long, longest=max(len(prompt.ids) for prompt in whole)
    )


def parse_prompt(place: Place, record: Record, tokenizer: Tokenizer, chat: PromptChat | None = None) -> Prompt:
    """Parses and tokenises one record of any form in the table above.

    Args:
        chat: shows tools to the model; None for none.

    Raises:
        UserError: a malformed record: names file, record and field.
    """
    refuse_unusable(place, record)
    refuse_images(place, record, "a prompt of rollouts")
    name = next((name for name in ("prompt", "messages") if name in record), None)
    if name is None:
        found = listed(record) or "none"
        raise place.error(
            f"the record has the fields {found}, expected prompt or messages, which the model is to answer: rename "
            "its prompt, or set objective.name to language_modeling."
        )
    columns = {key: value for key, value in record.items() if key != name}
    if (taken := next((key for key in columns if key in _RESERVED), None)) is not None:
        raise place.error(f"field '{taken}' has the name of an argument of reward functions; rename it.")
    if isinstance(record[name], str):
        if chat is not None:
            raise place.error(
                f"field '{name}' is a text, and a conversation in which tools are called is a list of messages: write "
                '[{"role": "user", "content": ...}].'
            )
        text = string_field(place, record, name, "prompt")
        ids: Sequence[int] = tokenizer.encode(text, bos=tokenizer.adds_bos)
        if not ids:
            raise place.error(f"field '{name}' has no tokens, and a model continues at least one; write a text.")
        return Prompt(place=place, ids=tuple(ids), given=text, columns=columns)
    turns = conversation_turns(place, record, name)
    if turns[-1]["role"] == "assistant":
        raise place.error(
            f"field '{name}' ends with a turn of the assistant, which the model is to write itself; move it to a "
            "field of its own, such as answer."
        )
    try:
        ids = tokenizer.chat_prompt(turns) if chat is None else chat.prompt(turns)
    except UserError as error:
        raise place.error(str(error)) from error
    return Prompt(place=place, ids=tuple(ids), given=[dict(turn) for turn in turns], columns=columns)


class PromptLoader:
    """The prompts of a run in the order in which they are answered.

    Args:
        prompts: all of them.
        num_generations: completions of each.
        num_iterations: times that each completion is trained on.
        steps_per_generation: optimizer steps whose prompts are answered together.
        global_batch_size: completions of one step over all data ranks, a multiple of `num_generations`.
        num_micro_batches: of a step on each rank, where every completion is a row.
        seed: of the order.
    """

    family = None
    """No vision-language family: prompts have no images."""

    def __init__(
        self,
        prompts: PromptSet,
        *,
        num_generations: int,
        num_iterations: int,
        steps_per_generation: int,
        global_batch_size: int,
        num_micro_batches: int,
        seed: int,
    ) -> None:
        assert global_batch_size % num_generations == 0, (global_batch_size, num_generations)
        self.prompts, self.num_micro_batches = prompts, num_micro_batches
        self.prompts_per_step = global_batch_size // num_generations
        self.prompt_order = DataOrder(
            count=len(prompts.prompts),
            batch=self.prompts_per_step * steps_per_generation,
            seed=seed,
            last_batch="full",
        )
        """Order of prompts: one batch of it for each generation batch."""
        self.order = DataOrder(
            count=len(prompts.prompts) * num_generations * num_iterations,
            batch=global_batch_size,
            seed=seed,
            last_batch="full",
        )
        """Order of the completions that are trained on, which the data cursor counts."""

    @property
    def num_samples(self) -> int:
        """Prompts."""
        return len(self.prompts.prompts)

    def fingerprint(self) -> str:
        """Returns a hash of the prompts and their columns."""
        return self.prompts.fingerprint()

    def sentence(self) -> str:
        """Returns the length of an epoch, for the log."""
        return (
            f"one epoch is {counted(self.num_samples, 'prompt')} in {counted(self.order.steps_per_epoch, 'step')}; "
            f"{counted(self.prompt_order.batch, 'prompt')} answered at a time"
        )
