"""The interface between a run and its source of completions: the trained model, or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.rollouts.data.prompts import Prompt
from engine.rollouts.weights import Weights

UNSAMPLED = -1
"""The version of tokens that no weights sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogue:
    """The messages of a completion of several turns, and what came of it.

    Args:
        prompt: messages, with what the environment added.
        messages: the completion's: turns of the model, and results of the tools that it called.
        reward: the environment's score; None for none.
        failure: why it ended before its time, so that it has no reward; None where it did not.
    """

    prompt: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    reward: float | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """The counts of a completion of several turns.

    Args:
        turns: of the model.
        calls: of tools.
        failed_calls: those among them that the model was told an error of.
        branches: of a conversation that a program outside drove, one of which is the completion; 0 of others.
        left_out: tokens that the model sampled in its other branches.
    """

    turns: int = 1
    calls: int = 0
    failed_calls: int = 0
    branches: int = 0
    left_out: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A completion.

    Args:
        tokens: int32, at least one, with the one that ended it.
        logps: float32, log-probability of each under softmax(logits / temperature) when it was sampled; 0 of those that
            were not sampled.
        truncated: whether its last turn was not ended by a token.
        written: bool, the tokens that the environment wrote; None for none.
        prompt: int32, its prompt, where that is not its record's.
        turns: counts, where the model may call tools.
        dialogue: its messages, where the model may call tools, until it is scored.
        routes: uint8 or int16 [prompt and completion, layers with a router, experts of a token], the experts that a
            server chose for each token; the largest number of the dtype where none are known. None for none.
        metrics: numbers that its agent returned, by their names.
        failed: whether its tools or its environment failed, so that nothing is learned from it.
        versions: int32, the training steps of the weights that sampled each token, -1 of those that were not sampled;
            None where all are of the same weights, until the buffer is made.
    """

    tokens: NDArray[np.int32]
    logps: NDArray[np.float32]
    truncated: bool
    written: NDArray[np.bool_] | None = None
    prompt: NDArray[np.int32] | None = None
    turns: Turns | None = None
    dialogue: Dialogue | None = None
    routes: NDArray[Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False
    versions: NDArray[np.int32] | None = None

    @property
    def token_versions(self) -> NDArray[np.int32]:
        """The version of each token, where they are known."""
        assert self.versions is not None
        return self.versions

    def sampled_by(self, version: int) -> Sampled:
        """Returns the same with a version for each token, where it has none."""
        if self.versions is not None:
            return self
        versions = np.where(self.sampled_mask(), np.int32(version), np.int32(UNSAMPLED))
        return replace(self, versions=versions)

    def sampled_mask(self) -> NDArray[np.bool_]:
        """Returns bool, the tokens that the model sampled."""
        return np.ones(len(self.tokens), dtype=np.bool_) if self.written is None else ~self.written

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return len(self.tokens) - (0 if self.written is None else int(self.written.sum()))


class Conversing(Protocol):
    """A completion of several turns while it is made. One call at a time."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far, which the model continues."""
        ...

    @property
    def room(self) -> int:
        """The most tokens of the next turn."""
        ...

    @property
    def noise(self) -> int:
        """A number of the random numbers of the next turn, beside its place: 0 to 2047."""
        ...

    def begin(self) -> None:
        """Prepares the first turn, however long that takes."""
        ...

    def take(self, tokens: Sequence[int], logps: Sequence[float], routes: NDArray[Any] | None = None) -> bool:
        """Takes a turn that the model sampled behind `ids`.

        Args:
            routes: [all tokens - 1, layers, experts of a token], the experts that a server chose; None for none.

        Returns:
            Whether the model continues.
        """
        ...

    def sampled(self) -> Sampled:
        """Returns the completion, when it has ended."""
        ...


class ConversationParts(Protocol):
    """The parts that all conversations of a run share."""

    @property
    def pool(self) -> Seats:
        """The processes that they need."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of a completion, with all its turns."""
        ...

    def listen(self, copy: int) -> None:
        """Gets ready on a rank that has conversations.

        Args:
            copy: number of its copy of the model.

        Raises:
            UserError: that is not possible.
        """
        ...

    def converse(self, prompt: Prompt) -> Conversing:
        """Returns a conversation that has not begun."""
        ...

    def notes(self) -> list[str]:
        """Returns sentences for the log that were not returned before."""
        ...

    def close(self) -> None:
        """Ends the processes."""
        ...


class Seats(Protocol):
    """Processes that conversations share."""

    has_environment: bool
    """Whether each conversation has one for as long as it lasts."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...


class Sampler(Protocol):
    """Samples the completions of a run. Collective: every rank has a sampler and makes the same calls."""

    @property
    def elsewhere(self) -> bool:
        """Whether another program samples, so that its log-probabilities are compared with the trainer's."""
        ...

    @property
    def delivery(self) -> float | None:
        """Where a server's log-probabilities lay between those of the adapter before, 0, and those of the adapter that
        it was given last, 1; None where that was not to be seen."""
        ...

    @property
    def ahead(self) -> Weights | None:
        """The adapter that is already sampling the next generation batch; None where none is being sampled."""
        ...

    def take(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> tuple[list[Sampled], Weights]:
        """Returns the completions of a generation batch, those of its first prompt first, and the weights that sampled
        them.

        Args:
            prompts: of the batch.
            generation: its number in the run, from 0.
            step: steps that were taken.

        Raises:
            UserError: the sampler failed; on all ranks.
        """
        ...

    def begin(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> None:
        """Begins to sample a generation batch, where that can run alongside training; see `take`."""
        ...

    def begin_again(
        self, prompts: Sequence[Prompt], files: Callable[[str], bytes], *, generation: int, step: int
    ) -> None:
        """Begins again to sample the batch that was under way when a checkpoint was saved, with the adapter stored in
        it.

        Args:
            files: reads one of the checkpoint's files that `files` returned.
        """
        ...

    def files(self) -> Mapping[str, bytes]:
        """Returns the files of the sampling adapter that a checkpoint stores; empty on ranks other than 0."""
        ...

    def close(self, *, failed: bool) -> None:
        """Ends the sampling that is under way.

        Args:
            failed: whether the run failed.
        """
        ...
