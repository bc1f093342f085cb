"""The tools of a run: loaded and described once, before prompts are read, which show them to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.checkpoint.model_folder import ModelFolder
from engine.config.rollout import ENVIRONMENT
from engine.config.run import RunConfig
from engine.data.tokenizer import Tokenizer
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.rollouts.ends import completion_ends
from engine.rollouts.turns.chat import ToolChat
from engine.rollouts.turns.conversation import Talk
from engine.rollouts.turns.pool import Description, EnvironmentPool, Programs, workers_note
from engine.runtime.launch import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The tools of a run.

    Args:
        chat: the template that shows them.
        rewards: whether the environment scores its conversations.
        programs: those of a Python program.
    """

    chat: ToolChat
    rewards: bool
    programs: Programs

    def talk(self, config: RunConfig, *, ends: frozenset[int], vocabulary: int) -> Talk:
        """Returns what the run's conversations share; no process is started before it is needed."""
        rollout = config.rollout
        return Talk(
            chat=self.chat,
            pool=EnvironmentPool(rollout, self.programs),
            rewards=self.rewards,
            ends=ends,
            longest=rollout.max_completion_length,
            room=config.data.seq_length - rollout.max_completion_length,
            max_turns=rollout.max_turns,
            vocabulary=vocabulary,
        )


def read_tools(
    config: RunConfig,
    launch: Launch,
    tokenizer: Tokenizer,
    model: ModelFolder,
    programs: Programs,
    say: Callable[[str], None],
) -> Tools:
    """Loads the tools once, on rank 0, and checks that the chat template can show them. Collective.

    Args:
        model: that is trained.
        programs: tools and environments of a Python program.
        say: gets notes.

    Raises:
        UserError: they cannot be used; on all ranks.
    """
    rollout = config.rollout
    found: object = None
    if launch.rank == 0:
        with EnvironmentPool(rollout, programs, seats=1) as pool:
            found = pool.describe()
    described = broadcast_object(found)
    if not isinstance(described, Description):
        raise UserError(str(described))
    if ENVIRONMENT in rollout.rewards and not described.rewards:
        raise UserError(
            f"rollout.rewards has environment, and {rollout.environment} has no method get_reward: write one, or name "
            "another reward."
        )
    if described.rewards and ENVIRONMENT not in rollout.rewards:
        say(f"note: get_reward of {rollout.environment} is not called, as rollout.rewards does not have environment")
    ends = completion_ends(model.path, tokenizer)
    chat = ToolChat(tokenizer, ends, described.schemas, rollout.tool_format)
    for note in (*chat.check(), workers_note(rollout)):
        if note is not None:
            say(f"note: {note}")
    return Tools(chat=chat, rewards=described.rewards and ENVIRONMENT in rollout.rewards, programs=programs)
