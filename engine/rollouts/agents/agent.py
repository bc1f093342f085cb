"""The agent of a run: loaded and checked once, before prompts are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.checkpoint.model_folder import ModelFolder
from engine.config.rollout import ENVIRONMENT
from engine.config.run import RunConfig
from engine.data.tokenizer import Tokenizer
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.rollouts.agents.chat import AgentChat
from engine.rollouts.agents.conversation import AgentTalk
from engine.rollouts.ends import completion_ends
from engine.rollouts.turns.pool import Description, EnvironmentPool, Programs
from engine.runtime.launch import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """The agent of a run; see `engine.rollouts.turns.tools.Tools`.

    Args:
        chat: the template.
    """

    chat: AgentChat

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
    found: object = None
    if launch.rank == 0:
        with EnvironmentPool(config.rollout, Programs(), seats=1) as pool:
            found = pool.describe()
    described = broadcast_object(found)
    if not isinstance(described, Description):
        raise UserError(str(described))
    if ENVIRONMENT not in config.rollout.rewards:
        say("note: what rollout.agent returns is no reward, as rollout.rewards does not have environment")
    return Agent(chat=AgentChat(tokenizer, completion_ends(model.path, tokenizer), config.rollout.tool_format))
