"""The agent of a run: loaded and checked once, before prompts are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.model_folder import ModelFolder
from engine.config.rollout import ENVIRONMENT
from engine.config.run import RunConfig
from engine.data.record_files import Place, Record
from engine.data.sources import RecordSource
from engine.data.tokenizer import Tokenizer
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.rollouts.agents.chat import AgentChat
from engine.rollouts.agents.conversation import AgentTalk
from engine.rollouts.ends import completion_ends
from engine.rollouts.turns.pool import Description, EnvironmentPool, Programs, workers_note
from engine.rollouts.user_process import CallFailed
from engine.runtime.launch import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """The agent of a run; see `engine.rollouts.turns.tools.Tools`.

    Args:
        chat: the template.
        name: as rollout.agent has it.
        tasks: its own, as records; () for those of data.train.
    """

    chat: AgentChat
    name: str
    tasks: tuple[dict[str, Any], ...] = ()

    def sources(self) -> dict[str, RecordSource]:
        """Returns its tasks as a source of records, by its name; empty where it has none of its own."""
        return {self.name: _Tasks(self.name, self.tasks)} if self.tasks else {}

    def talk(self, config: RunConfig, *, ends: frozenset[int], vocabulary: int) -> AgentTalk:
        """Returns what the run's conversations share; no process is started before it is needed."""
        return AgentTalk(config, self.chat, ends=ends, vocabulary=vocabulary)


def read_agent(
    config: RunConfig, launch: Launch, tokenizer: Tokenizer, model: ModelFolder, say: Callable[[str], None]
) -> Agent:
    """Loads the agent once, on rank 0. Collective.

    Args:
        model: that is trained.
        say: gets notes.

    Raises:
        UserError: it cannot be used; on all ranks.
    """
    rollout = config.rollout
    assert rollout.agent is not None
    found: object = None
    if launch.rank == 0:
        with EnvironmentPool(rollout, Programs(), seats=1) as pool:
            found = pool.describe()
            if isinstance(found, Description) and rollout.has_tasks:
                found = _tasks(pool)
    described = broadcast_object(found)
    if isinstance(described, str):
        raise UserError(described)
    if ENVIRONMENT not in config.rollout.rewards:
        say("note: what rollout.agent returns is no reward, as rollout.rewards does not have environment")
    chat = AgentChat(tokenizer, completion_ends(model.path, tokenizer), rollout.tool_format)
    of_template = chat.note() if launch.rank == 0 else None
    for note in (timeout_note(config, launch.world_size), workers_note(rollout), of_template):
        if note is not None:
            say(f"note: {note}")
    return Agent(
        chat=chat,
        name=rollout.agent,
        tasks=tuple(described) if isinstance(described, list) else (),
    )


def timeout_note(config: RunConfig, world_size: int) -> str | None:
    """Returns a note where a conversation may take longer than copies of the model wait for each other; None elsewhere.

    Args:
        world_size: ranks of the run.
    """
    longest, waits = config.rollout.agent_timeout, config.train.collective_timeout
    copies = world_size // (config.parallel.tensor * config.parallel.pipeline)
    if config.rollout.server is not None or copies == 1 or longest <= waits:
        return None
    return (
        f"rollout.agent_timeout is {longest:g} s, and the {copies} copies of the model wait for each other for "
        f"train.collective_timeout, {waits:g} s, so that a conversation which takes longer than that may end the run: "
        "raise train.collective_timeout, or lower rollout.agent_timeout"
    )


def _tasks(pool: EnvironmentPool) -> list[dict[str, Any]] | str:
    """Returns the tasks of an agent that has its own, or why there are none, in one sentence."""
    try:
        with pool.seat() as seat:
            tasks: list[dict[str, Any]] = seat.ask({"do": "tasks"})["tasks"]
    except CallFailed as failure:
        return f"rollout.agent: its tasks cannot be read ({failure}): correct its options, or name another."
    return tasks or "rollout.agent has no tasks: correct its options, or name another."


class _Tasks(RecordSource):
    """The tasks of an agent."""

    def __init__(self, name: str, tasks: Sequence[dict[str, Any]]) -> None:
        super().__init__(name)
        self._tasks = tasks

    def records(self) -> Iterator[tuple[Place, Record]]:
        for number, task in enumerate(self._tasks):
            place = self.place(number, "task")
            yield place, self.plain(place, task)
