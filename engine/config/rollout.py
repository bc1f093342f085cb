"""Rollout options: how the model's own completions are generated and scored, for objectives that train on them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from engine.choices import DecodeGraph, Mismatch, RouterReplay, ServerKind, ToolFormat
from engine.config.checks import require, require_at_least, require_choices, require_not_negative, require_positive
from engine.config.option import IGNORED, REPORTED, option
from engine.config.paths import at_home
from engine.errors import UserError

MODEL_REWARD = "model"
"""The reward that is a reward model's score."""
BUILT_IN_REWARDS = ("exact_match", "numeric_answer", "regex", MODEL_REWARD)
"""Rewards that need no file; see `engine.rollouts.rewards.built_in`."""
ENVIRONMENT = "environment"
"""The entry of rollout.rewards that stands for the scores of rollout.environment itself."""
OPENENV = "openenv:"
"""Begins rollout.environment where it is the address of an OpenEnv server."""
VERIFIERS = "verifiers:"
"""Begins the name of an environment of the package verifiers in rollout.agent."""
IN_PROGRAM = "python:"
"""Begins the names of what a Python program supplies: its reward functions, and its records."""
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_WEIGHT = re.compile(r".+=[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE | re.DOTALL)
"""An entry followed by a weight, which has its own option."""
LARGEST_REWARD = 1e6
"""Rewards and their weights lie between this and its negative. Advantages, and losses with them, are float32, where
numbers of that size are 0.06 apart; larger ones are further apart than most rewards are, and 1e200 has no square
even in fp64."""
KEY_VARIABLE = "RANKFOLD_SERVER_KEY"
"""The environment variable with the API key of rollout.server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    """Rollout: how completions are generated and scored, where objective.name is grpo.

    Args:
        rewards: Functions that score completions, as FILE.py:NAME, or exact_match, numeric_answer, regex:PATTERN or
            model:FOLDER. exact_match and numeric_answer compare with the column answer of the records, or with
            exact_match:COLUMN. model gives the score of a reward model (docs/reward-models.md): the folder of one, or
            of a PEFT adapter on one. environment is the score that get_reward() of rollout.environment, or
            rollout.agent, returns.
        reward_weights: Weights of rollout.rewards, in their order; [] weighs each with 1. A completion's reward is the
            weighted sum.
        num_generations: Completions of each prompt, which are compared with each other.
        max_completion_length: Maximum number of tokens in a completion; it divides the loss of objective.loss_type
            dr_grpo. data.seq_length limits prompt and completion together.
        temperature: Logits are divided by it, in sampling and in training alike.
        top_k: Sample only from the k most likely tokens; null for all. Training sees the whole distribution.
        top_p: Sample only from the most likely tokens whose probabilities together reach this; 1 for all.
        min_p: Sample only from tokens that are at least this many times as likely as the most likely one; 0 for all.
        repetition_penalty: Penalty on tokens that occur in the prompt or completion: sampling divides their positive
            logits by it, and multiplies the others (1909.05858); 1 for none. Training sees the logits as they are.
        steps_per_generation: Optimizer steps whose completions are generated together, before the first of them.
        slots: Completions that each data-parallel copy of the model generates at a time. Their keys and values are
            kept in memory. With rollout.server, those that each server is asked for at a time.
        cuda_graph: Replay of the passes that sample a token of each completion: as CUDA graphs, so that a GPU does not
            wait for the CPU to launch their kernels, and on a CPU as recorded calls, without the Python around them.
            "auto" where the layout and the model allow it (where they do not, the reason is logged), or "none".
        merge_once: Whether the codes of lora.merge_aware are made once for each generation batch, and the base's kept
            beside them meanwhile; false merges each matrix in each pass, to the same numbers.
        overlong_buffer: Tokens before rollout.max_completion_length over which a penalty grows from 0 to -1, which a
            truncated completion gets in full; null for no penalty (arXiv 2503.14476).
        drop_uniform_groups: Leave out of a step the prompts all of whose completions have the same reward, as nothing
            is learned from them.
        reward_workers: Processes that call the reward functions.
        reward_timeout: Seconds that a call of a reward function may take; it scores all completions of 1 /
            rollout.reward_workers of a generation batch's prompts.
        judge_device: Device of the reward models in rollout.rewards, such as cpu or cuda:7; null for the first GPU
            where there is one, which it then shares with the rank that trains there.
        tools: Functions that the model may call while it answers, as FILE.py:NAME; their type hints and docstrings are
            shown to it by the chat template. They are called in processes of their own.
        environment: Class whose public methods are tools of one conversation, as FILE.py:NAME, with reset(), and
            get_reward() where rollout.rewards has environment, or the address of an OpenEnv server, as
            openenv:http://127.0.0.1:8000; null for none. Each conversation under way has one in a process of its own.
        agent: Program that holds the conversations itself, as FILE.py:NAME, a function or a class whose objects are
            called: with the fields of a record, and base_url, api_key and model of an OpenAI endpoint of the run, which
            it asks for turns of the model; null for none. It returns a reward, None, or {"reward": ..., "metrics":
            {...}}. Each conversation under way has a process of its own. Or an environment of the package verifiers
            0.4, with its tasks in place of data.train, as verifiers:NAME or verifiers:FILE.toml.
        agent_timeout: Seconds that a conversation of rollout.agent may take, with all its turns of the model; the
            completion of one that takes longer fails.
        endpoint: Address at which the run answers the requests of rollout.agent, as HOST:PORT, which further copies of
            the model add their number to; null for a free port of 127.0.0.1.
        tool_format: How the model writes calls of tools: "hermes", "qwen_xml", "llama", "mistral" or "harmony"; null
            for the one that the chat template asks for.
        max_turns: Turns of the model in a completion, after which its calls are no longer answered; null for as many
            as rollout.max_completion_length has room for.
        environment_workers: Processes of tools, environments or agents for each copy of the model, which is also how
            many conversations with an environment or an agent are under way at a time; null for rollout.slots.
        environment_timeout: Seconds that a call of a tool, or of an environment's reset or get_reward, may take; the
            completion whose call takes longer fails.
        environment_memory: Address space of each of these processes, in GiB; null for no limit.
        show: Completions to log of each generation batch, with their rewards.
        eval_generations: Completions of each prompt of data.validation in an evaluation, from which pass@k is
            estimated up to this number; null for rollout.num_generations, or 1 where rollout.eval_temperature is 0.
        eval_temperature: Temperature of evaluations; 0 takes the most likely token, null is rollout.temperature.
        eval_top_p: rollout.top_p of evaluations; null is that of training.
        pass_reward: Reward from which a completion of an evaluation passes, for pass@k.
        server: Address of a vLLM or SGLang server that samples in place of the engine, such as http://10.0.0.7:8000, or
            of several, with commas between them; null for none. Before each rollout they load the current adapters, and
            each samples the completions of a share of the prompts. The API key that they ask for is read from
            RANKFOLD_SERVER_KEY in the environment.
        server_kind: Kind of the server, "vllm" or "sglang".
        server_model: The model's name on the server; null for the only one that it serves.
        server_timeout: Seconds that a call of the server, for one completion or to load an adapter, may take with all
            its attempts.
        adapter_dir: Folder for the adapters that the server loads, which it sees under the same path; null for
            served_adapters in the run's folder.
        check_delivery: Ask each server, after each adapter that it was given, for the log-probabilities of some
            prompts, and end the run where they are not those of that adapter; at rollout.temperature 1 alone.
        router_replay: Whether a mixture of experts is trained with the experts that the server chose for each token,
            which it returns where it was started with --enable-return-routed-experts: "on", "off", or "auto" where it
            returns them.
        overlap: Sample the next generation batch while this one is trained on, with the adapters from before it; only
            with rollout.server.
        max_staleness: Most training steps by which the weights that sampled a token may be behind those that are
            trained on it; older tokens are not trained on. null for any number.
        mismatch: Reaction where the server's log-probabilities are not the trainer's. "warn" logs it, and "stop"
            ends the run, both where their mean distance is above rollout.mismatch_bound; "correct" is
            objective.importance_correction token_truncate, on all steps.
        mismatch_bound: Upper limit of the mean distance of two log-probabilities, in nats.
    """

    rewards: tuple[str, ...] = option((), REPORTED)
    reward_weights: tuple[float, ...] = option((), REPORTED)
    num_generations: int = option(8, REPORTED)
    max_completion_length: int = option(512, REPORTED)
    temperature: float = option(1.0, REPORTED)
    top_k: int | None = option(None, REPORTED)
    top_p: float = option(1.0, REPORTED)
    min_p: float = option(0.0, REPORTED)
    repetition_penalty: float = option(1.0, REPORTED)
    steps_per_generation: int = option(1, REPORTED)
    slots: int = option(32, IGNORED)  # rows that are computed together
    cuda_graph: DecodeGraph = option("auto", IGNORED)
    merge_once: bool = option(True, IGNORED)
    overlong_buffer: int | None = option(None, REPORTED)
    drop_uniform_groups: bool = option(False, REPORTED)
    reward_workers: int = option(1, IGNORED)  # processes
    reward_timeout: float = option(60.0, IGNORED)
    judge_device: str | None = option(None, IGNORED)  # where scores are computed
    tools: tuple[str, ...] = option((), REPORTED)
    environment: str | None = option(None, REPORTED)
    agent: str | None = option(None, REPORTED)
    agent_timeout: float = option(3600.0, IGNORED)
    endpoint: str | None = option(None, IGNORED)  # where it is
    tool_format: ToolFormat | None = option(None, REPORTED)
    max_turns: int | None = option(None, REPORTED)
    environment_workers: int | None = option(None, IGNORED)  # processes
    environment_timeout: float = option(60.0, IGNORED)
    environment_memory: float | None = option(None, IGNORED)
    show: int = option(1, IGNORED)  # printed
    eval_generations: int | None = option(None, REPORTED)
    eval_temperature: float | None = option(None, REPORTED)
    eval_top_p: float | None = option(None, REPORTED)
    pass_reward: float = option(1.0, REPORTED)
    server: str | None = option(None, REPORTED)
    server_kind: ServerKind = option("vllm", IGNORED)  # how a server is spoken to
    server_model: str | None = option(None, IGNORED)
    server_timeout: float = option(600.0, IGNORED)
    adapter_dir: str | None = option(None, IGNORED)
    check_delivery: bool = option(True, IGNORED)
    router_replay: RouterReplay = option("auto", REPORTED)
    overlap: bool = option(False, REPORTED)
    max_staleness: int | None = option(None, REPORTED)
    mismatch: Mismatch = option("warn", REPORTED)
    mismatch_bound: float = option(0.1, REPORTED)

    def __post_init__(self) -> None:
        require_choices("rollout", self)
        require_at_least("rollout.num_generations", self.num_generations, 1, "use for example 8")
        require_at_least("rollout.max_completion_length", self.max_completion_length, 1, "use for example 512")
        require_positive("rollout.temperature", self.temperature, "use for example 1.0")
        require_at_least("rollout.top_k", self.top_k, 1, "use for example 50, or null for all tokens")
        require(
            0 < self.top_p <= 1,
            f"rollout.top_p is {self.top_p}, but a share above 0 and up to 1 is expected: use for example 0.95, or 1 "
            "for all tokens.",
        )
        require(
            0 <= self.min_p <= 1,
            f"rollout.min_p is {self.min_p}, but a share from 0 to 1 is expected: use for example 0.05, or 0 for all "
            "tokens.",
        )
        require_positive("rollout.repetition_penalty", self.repetition_penalty, "use for example 1.1, or 1 for none")
        require_at_least("rollout.steps_per_generation", self.steps_per_generation, 1, "use for example 1")
        require_at_least("rollout.max_staleness", self.max_staleness, 0, "use for example 4, or null for no limit")
        require_at_least("rollout.slots", self.slots, 1, "use for example 32")
        if self.overlong_buffer is not None:
            require(
                1 <= self.overlong_buffer <= self.max_completion_length,
                f"rollout.overlong_buffer is {self.overlong_buffer}, but 1 to rollout.max_completion_length "
                f"{self.max_completion_length} is expected: use fewer tokens, or null for no penalty.",
            )
        require_at_least("rollout.reward_workers", self.reward_workers, 1, "use for example 1")
        require_positive("rollout.reward_timeout", self.reward_timeout, "use for example 60")
        require(
            self.judge_device is None or _DEVICE.fullmatch(self.judge_device) is not None,
            f"rollout.judge_device is {self.judge_device}, but cpu, cuda or cuda:NUMBER is expected: write for example "
            "cuda:7, or null for the first GPU.",
        )
        require_at_least("rollout.show", self.show, 0, "use for example 1, or 0 for none")
        self._check_evaluation()
        self._check_server()
        self._check_rewards()
        self._check_turns()

    def _check_evaluation(self) -> None:
        """Refuses invalid options of evaluations."""
        require_at_least("rollout.eval_generations", self.eval_generations, 1, "use for example 8")
        require_not_negative("rollout.eval_temperature", self.eval_temperature, "use for example 0.6, or 0 for greedy")
        require(
            self.eval_temperature != 0 or (self.eval_generations or 1) == 1,
            f"rollout.eval_temperature is 0 and rollout.eval_generations {self.eval_generations}, but all completions "
            "of a prompt would be the same: set rollout.eval_generations to 1, or rollout.eval_temperature higher.",
        )
        require(
            self.eval_top_p is None or 0 < self.eval_top_p <= 1,
            f"rollout.eval_top_p is {self.eval_top_p}, but a share above 0 and up to 1 is expected: use for example "
            "0.95, or 1 for all tokens.",
        )
        require(
            self.eval_temperature != 0 or self.eval_top_p is None,
            f"rollout.eval_temperature is 0 and rollout.eval_top_p is {self.eval_top_p}, but the most likely token is "
            "taken whatever the others are: remove one of them.",
        )
        require(
            math.isfinite(self.pass_reward) and abs(self.pass_reward) <= LARGEST_REWARD,
            f"rollout.pass_reward is {self.pass_reward}, but a reward from -1e6 to 1e6 is expected: use for example "
            "1.0.",
        )

    def _check_turns(self) -> None:
        """Refuses invalid options of tools and environments."""
        twice = next((text for text, count in Counter(self.tools).items() if count > 1), None)
        require(twice is None, f"rollout.tools has {twice} twice: remove one of them.")
        for text in self.tools:
            NamedObject.parse("rollout.tools", text)
        if self.environment is not None:
            NamedObject.parse("rollout.environment", self.environment)
        require(
            self.environment is not None or self.agent is not None or ENVIRONMENT not in self.rewards,
            "rollout.rewards has environment and rollout.environment is null, so that nothing would give this score: "
            "name an environment, as env.py:NAME, or another reward.",
        )
        self._check_agent()
        require_at_least("rollout.max_turns", self.max_turns, 1, "use for example 8, or null for no limit")
        require_at_least(
            "rollout.environment_workers", self.environment_workers, 1, "use for example 8, or null for rollout.slots"
        )
        require_positive("rollout.environment_timeout", self.environment_timeout, "use for example 60")
        require_positive("rollout.environment_memory", self.environment_memory, "use for example 4, or null for none")
        if self.takes_turns:
            return
        options = ("tool_format", "max_turns", "environment_workers", "environment_timeout", "environment_memory")
        own = (field for field in fields(self) if field.name in options)
        given = next((one.name for one in own if getattr(self, one.name) != one.default), None)
        require(
            given is None,
            f"rollout.{given} is set and neither rollout.tools nor rollout.environment is, without which a completion "
            "has one turn: remove it, or name tools.",
        )

    def _check_agent(self) -> None:
        """Refuses invalid options of an agent."""
        require_positive("rollout.agent_timeout", self.agent_timeout, "use for example 3600")
        address_parts(self.endpoint)
        if self.agent is None:
            own = (field for field in fields(self) if field.name in ("agent_timeout", "endpoint"))
            given = next((one.name for one in own if getattr(self, one.name) != one.default), None)
            require(
                given is None,
                f"rollout.{given} is set and rollout.agent is not, without which nothing asks the run for turns: "
                "remove it, or name an agent, as agent.py:NAME.",
            )
            return
        NamedObject.parse("rollout.agent", self.agent)
        require(
            not self.agent.startswith(IN_PROGRAM),
            f"rollout.agent is {self.agent}, and an agent runs in processes of its own: name a file, as agent.py:NAME.",
        )
        usual = next(field.default for field in fields(self) if field.name == "environment_timeout")
        require(
            self.environment_timeout == usual,
            f"rollout.environment_timeout is {self.environment_timeout:g} and rollout.agent is set, whose limit is "
            "rollout.agent_timeout, for a whole conversation: set that one.",
        )
        other = next((name for name in ("tools", "environment") if getattr(self, name)), None)
        require(
            other is None,
            f"rollout.agent and rollout.{other} are both set, and an agent brings its own tools: remove one of them.",
        )

    @property
    def has_tasks(self) -> bool:
        """Whether the agent has tasks of its own, which are the run's prompts."""
        return self.agent is not None and self.agent.startswith(VERIFIERS)

    @property
    def named_programs(self) -> tuple[tuple[str, str], ...]:
        """The tools, the environment and the agent, each with the option that names it."""
        tools = [("rollout.tools", text) for text in self.tools]
        whole = (("rollout.environment", self.environment), ("rollout.agent", self.agent))
        return (*tools, *((option, text) for option, text in whole if text is not None))

    @property
    def takes_turns(self) -> bool:
        """Whether a completion has several turns: the model may call tools, or an agent holds the conversation."""
        return bool(self.tools) or self.environment is not None or self.agent is not None

    def _check_rewards(self) -> None:
        twice = next((text for text, count in Counter(self.rewards).items() if count > 1), None)
        require(twice is None, f"rollout.rewards has {twice} twice: remove one of them, and raise the other's weight.")
        weights = self.reward_weights
        require(
            len(weights) in (0, len(self.rewards)),
            f"rollout.reward_weights has {len(weights)} numbers and rollout.rewards {len(self.rewards)} functions: "
            "give one for each, or [] for 1 each.",
        )
        wrong = next((weight for weight in weights if not math.isfinite(weight)), None)
        require(wrong is None, f"rollout.reward_weights has {wrong}, but finite numbers are expected: correct it.")
        large = next((weight for weight in weights if abs(weight) > LARGEST_REWARD), None)
        require(
            large is None,
            f"rollout.reward_weights has {large}, but weights from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g} are "
            "expected: write smaller ones, whose ratios count.",
        )
        require(
            not weights or any(weights),
            f"rollout.reward_weights is {list(weights)}, so that no completion is better than another: give one above "
            "0, or [] for 1 each.",
        )
        require(
            any(source.is_model for source in self.reward_sources) or self.judge_device is None,
            f"rollout.judge_device is {self.judge_device} and rollout.rewards has no reward model: remove it, or add "
            "model:FOLDER.",
        )

    def _check_server(self) -> None:
        """Refuses invalid options of a server."""
        require_positive("rollout.server_timeout", self.server_timeout, "use for example 600")
        require_positive("rollout.mismatch_bound", self.mismatch_bound, "use for example 0.1")
        if self.server is None:
            return
        require(
            "@" not in self.server,
            "rollout.server has a user name or a password before an @, which would be in files and in the log: remove "
            "them, and export an API key as RANKFOLD_SERVER_KEY.",
        )
        for url in self.servers or (self.server,):
            require(
                is_web_address(url),
                f"rollout.server is {self.server}, but the address of a server is expected, or several with commas "
                "between them: write for example http://10.0.0.7:8000.",
            )
        twice = next((url for url, count in Counter(self.servers).items() if count > 1), None)
        require(twice is None, f"rollout.server has {twice} twice: remove one of them.")

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses in `server`."""
        return tuple(url.strip().rstrip("/") for url in (self.server or "").split(",") if url.strip())

    @property
    def greedy_evaluations(self) -> bool:
        """Whether evaluations take the most likely token."""
        return self.eval_temperature == 0

    def for_evaluation(self) -> RolloutOptions:
        """Returns the options by which completions are sampled in evaluations; the temperature counts only where they
        are not greedy."""
        if self.greedy_evaluations:
            return replace(self, num_generations=1, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0)
        return replace(
            self,
            num_generations=self.eval_generations or self.num_generations,
            temperature=self.temperature if self.eval_temperature is None else self.eval_temperature,
            top_p=self.top_p if self.eval_top_p is None else self.eval_top_p,
        )

    @property
    def corrects_sampler(self) -> bool:
        """Whether losses are weighed for a sampler that is not the trainer, whatever the objective says."""
        return self.overlap or self.mismatch == "correct"

    @property
    def reward_sources(self) -> tuple[RewardSource, ...]:
        """`rewards`, parsed, with their weights and names.

        Raises:
            UserError: an entry is malformed.
        """
        sources = [RewardSource.parse(text) for text in self.rewards]
        counts, seen = Counter(source.name for source in sources), Counter[str]()
        found = []
        for source, weight in zip(sources, self.reward_weights or [1.0] * len(sources), strict=True):
            seen[source.name] += 1
            name = source.name if counts[source.name] == 1 else f"{source.name}/{seen[source.name]}"
            found.append(replace(source, weight=weight, name=name, device=self.judge_device))
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedObject:
    """An entry of rollout.tools, or rollout.environment or rollout.agent.

    Args:
        file: where it is; None of a Python program's own, and of a server's.
        name: of the function or class; "" of a server's.
        server: the address of an OpenEnv server; None for none.
        is_package: whether it is an environment of the package verifiers, whose options are in `file`, if anywhere.
    """

    file: str | None
    name: str
    server: str | None = None
    is_package: bool = False

    @classmethod
    def parse(cls, option: str, text: str) -> NamedObject:
        """Reads an entry.

        Args:
            option: that has it, for a message.

        Raises:
            UserError: it is malformed.
        """
        if option == "rollout.environment" and text.startswith(OPENENV):
            url = text.removeprefix(OPENENV)
            require(
                is_web_address(url) and "@" not in url,
                f"{option} is {text!r}, but the address of an OpenEnv server, without a user, is expected behind "
                f"{OPENENV}: write for example openenv:http://127.0.0.1:8000.",
            )
            return cls(file=None, name="", server=url)
        if option == "rollout.agent" and text.startswith(VERIFIERS):
            name = text.removeprefix(VERIFIERS)
            require(
                bool(name) and name.isprintable() and " " not in name,
                f"{option} is {text!r}, but the name of an environment is expected behind {VERIFIERS}: write for "
                "example verifiers:reverse-text, or verifiers:env.toml.",
            )
            return cls(file=name if name.endswith(".toml") else None, name=name, is_package=True)
        file, colon, name = text.rpartition(":")
        require(
            bool(colon) and bool(file) and name.isidentifier(),
            f"{option} has {text!r}, but FILE.py:NAME is expected: write for example tools.py:multiply.",
        )
        return cls(file=None if f"{file}:" == IN_PROGRAM else file, name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSource:
    """An entry of rollout.rewards.

    Args:
        file: of the function; None for a built-in one, and one of a Python program.
        function: its name.
        argument: of a built-in function: a column or a pattern; "" for none.
        weight: of its rewards in the sum.
        name: of its figures in reports: that of the function, followed by the column of a built-in one, and by a number
            where several have the same, as in exact_match/gold and f/2. No function has such a name.
    """

    file: str | None
    function: str
    argument: str = ""
    weight: float = 1.0
    name: str
    in_program: bool = False
    """Whether it is a function of the Python program that trains."""
    device: str | None = None
    """Of a reward model; None leaves it to the process that has it."""

    @property
    def is_model(self) -> bool:
        """Whether it is the score of a reward model."""
        return self.file is None and not self.in_program and self.function == MODEL_REWARD

    @property
    def opened(self) -> str | None:
        """The file, or the folder of a reward model, that a process that calls it reads; None where it reads none."""
        return self.argument if self.is_model else self.file

    @property
    def passed(self) -> str:
        """The argument as such a process gets it: of a reward model its folder and device, in JSON."""
        return json.dumps([self.argument, self.device]) if self.is_model else self.argument

    @property
    def is_environment(self) -> bool:
        """Whether it is the score of rollout.environment, and no function."""
        return self.file is None and not self.in_program and self.function == ENVIRONMENT

    @classmethod
    def parse(cls, text: str) -> RewardSource:
        """Reads an entry.

        Raises:
            UserError: it is malformed.
        """
        name, _, argument = text.partition(":")
        alone, _, weight = text.rpartition("=")
        require(
            name == "regex" or _WEIGHT.fullmatch(text) is None,
            f"rollout.rewards has {text!r}, but weights stand in an option of their own: write {alone}, and its weight "
            f"{weight} in rollout.reward_weights, which has one for each function.",
        )
        if text == ENVIRONMENT:
            return cls(file=None, function=ENVIRONMENT, name=ENVIRONMENT)
        if name in BUILT_IN_REWARDS:
            require(
                name != "regex" or bool(argument),
                f"rollout.rewards has {text!r}, which lacks its pattern: write regex:PATTERN.",
            )
            if name == "regex":
                _require_pattern(text, argument)
            require(
                name != MODEL_REWARD or bool(argument),
                f"rollout.rewards has {text!r}, which lacks its folder: write model:FOLDER.",
            )
            if name == MODEL_REWARD:
                argument = at_home("rollout.rewards", argument)
                return cls(file=None, function=name, argument=argument, name=f"{name}/{Path(argument).name}")
            column = "" if name == "regex" or not argument else f"/{argument}"
            return cls(file=None, function=name, argument=argument, name=f"{name}{column}")
        if text.startswith(IN_PROGRAM):
            function = text.removeprefix(IN_PROGRAM)
            return cls(file=None, function=function, name=function, in_program=True)
        file, colon, function = text.rpartition(":")
        require(
            bool(colon) and bool(file) and function.isidentifier(),
            f"rollout.rewards has {text!r}, but FILE.py:NAME, or one of {', '.join(BUILT_IN_REWARDS)}, is expected: "
            "write for example rewards.py:accuracy.",
        )
        return cls(file=file, function=function, name=function)


def address_parts(text: str | None) -> tuple[str, int]:
    """Returns the host and the port of rollout.endpoint; of none, a free port of this machine, 0.

    Raises:
        UserError: it has none.
    """
    if text is None:
        return "127.0.0.1", 0
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    right = bool(colon) and bool(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16
    require(
        right and host.isprintable() and not set(host) & set("/ @"),
        f"rollout.endpoint is {text!r}, but HOST:PORT is expected: write for example 127.0.0.1:8700.",
    )
    return host, int(port)


def is_web_address(text: str) -> bool:
    """Returns whether a text is the address of an HTTP server."""
    try:
        parts = urlsplit(text)
        is_clean = parts.path.isascii() and text.isprintable() and " " not in text
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and is_clean
    except ValueError:
        return False


def _require_pattern(text: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"rollout.rewards has {text!r}, whose pattern is none ({error}): correct it.") from None
