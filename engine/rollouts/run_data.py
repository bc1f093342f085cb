"""The data of a run that trains on its own samples: prompts, whose completions become rows between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.model_folder import ModelFolder
from engine.config.rules import check_warmup, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.data.order import DataOrder
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.inference.generate import context_limit
from engine.models.decoder_config import DecoderConfig
from engine.rollouts.agents.agent import Agent, read_agent
from engine.rollouts.data.prompts import PromptLoader, PromptSet, read_prompts
from engine.rollouts.data.routes import RouteShape
from engine.rollouts.moving_reference import MovingReference
from engine.rollouts.scorer import check_rewards, refuse_compared
from engine.rollouts.served import check_server
from engine.rollouts.source import RolloutSource
from engine.rollouts.teachers.teachers import check_teachers
from engine.rollouts.turns.pool import Programs
from engine.rollouts.turns.tools import Tools, read_tools
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.progress import Progress
from engine.training.build import Training
from engine.training.run_data import Supplied


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptData:
    """The prompts of a run; see `engine.training.run_data.RunData`."""

    tokenizer: Tokenizer
    train: PromptLoader
    rewards: Mapping[str, Callable[..., Any]]
    """Functions of a Python program, by their names."""
    tools: Tools | Agent | None = None
    """The tools that the model may call, or the agent that drives its conversations; None where there are none."""
    routes: RouteShape | None = None
    """As `engine.rollouts.served.check_server` returned it."""
    rows: None = None
    validation: PromptSet | None = None
    """Held-out prompts; None for none."""

    def earlier_order(self, before: RunConfig) -> DataOrder:
        completions = before.rollout.num_generations * before.objective.num_iterations
        count = self.train.num_samples * completions
        return replace(self.train.order, batch=before.train.global_batch_size, count=count)

    def know_reference(
        self, config: RunConfig, training: Training, log: Log, *, run_dir: Path, rank: int, resumed: Path | None
    ) -> None:
        if config.objective.reference_sync_steps is not None and resumed is None:
            MovingReference(config, training).begin()

    def source(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        *,
        metrics: MetricsWriter,
        say: Callable[[str], None],
        run_dir: Path,
    ) -> RolloutSource:
        return RolloutSource(
            config,
            launch,
            training,
            self.train,
            self.tokenizer,
            rewards=self.rewards,
            tools=self.tools,
            validation=self.validation,
            routes=self.routes,
            metrics=metrics,
            say=say,
            run_dir=run_dir,
        )


def read_prompt_data(
    config: RunConfig,
    launch: Launch,
    model: ModelFolder,
    tokenizer: Tokenizer,
    log: Log,
    *,
    images: object,
    supplied: Supplied,
) -> PromptData:
    """Reads the prompts of a run that trains on its own completions, and checks that their answers can be sampled and
    scored. See `engine.training.run_data.DataReader`.

    Raises:
        UserError: a record, a reward function or a server that cannot be used, or a model that is asked for more than
            text.
    """
    data, rollout, decoder = config.data, config.rollout, model.decoder
    train = data.train or rollout.agent
    assert train is not None
    _check_texts(decoder, data.seq_length)
    programs = Programs(tools=supplied.tools, environments=supplied.environments)
    tools: Tools | Agent | None = None
    if rollout.agent is not None:
        tools = read_agent(config, launch, tokenizer, model, log.info)
        supplied = replace(supplied, sources={**supplied.sources, **tools.sources()})
    elif rollout.takes_turns:
        tools = read_tools(config, launch, tokenizer, model, programs, log.info)
    room = data.seq_length - rollout.max_completion_length

    def read(name: str, told: str) -> PromptSet:
        with Progress(log, told, None, "records") as progress:
            found = read_prompts(
                supplied.sources.get(name, name),
                tokenizer=tokenizer,
                room=room,
                overlong=data.overlong,
                chat=tools.chat if isinstance(tools, Tools) else None,
                progress=progress.advance,
            )
        _require_known(name, found, decoder.vocab_size)
        return found

    prompts = read(train, "reading prompts")
    log.info(f"training data: {prompts.summary(room)}")
    if config.objective.limits_ratios and rollout.steps_per_generation * config.objective.num_iterations == 1:
        log.info(
            "objective.epsilon, objective.epsilon_high and objective.delta have nothing to limit: with "
            "rollout.steps_per_generation 1 and objective.num_iterations 1 every importance ratio is 1"
        )
    prompts, validation = _validation(config, prompts, read, log)
    if validation is not None:
        validation = validation.first(config.train.eval_samples)
        log.info(f"validation data: {validation.summary(room)}")
    check_rewards(config, launch, prompts.columns, supplied.rewards)
    check_teachers(config, launch, model, tokenizer, prompts.prompts, log.info)
    routes: RouteShape | None = None
    if rollout.server is not None:
        routes = check_server(config, launch, tokenizer, prompts, model=model, say=log.info)
    loader = PromptLoader(
        prompts,
        num_generations=rollout.num_generations,
        num_iterations=config.objective.num_iterations,
        steps_per_generation=rollout.steps_per_generation,
        global_batch_size=config.train.global_batch_size,
        num_micro_batches=gradient_accumulation_steps(config, launch.world_size),
        seed=config.train.seed,
    )
    if config.train.num_epochs is not None:
        check_warmup(config, loader.order.steps_left(0, config.train.num_epochs))
    return PromptData(
        tokenizer=tokenizer, train=loader, rewards=supplied.rewards, tools=tools, routes=routes, validation=validation
    )


def _check_texts(decoder: DecoderConfig, length: int) -> None:
    """Refuses a model that text alone is not enough for, and rows that are longer than its context."""
    if decoder.needs_images:
        raise UserError(
            f"every layer of this {decoder.family} model attends to an image, and rollouts have text alone: choose "
            "another model."
        )
    if length > (limit := context_limit(decoder)):
        raise UserError(
            f"data.seq_length is {length}, which prompts and completions may reach, but the model's context "
            f"is {limit}: set data.seq_length to {limit} or less."
        )


def _validation(
    config: RunConfig, prompts: PromptSet, read: Callable[[str, str], PromptSet], log: Log
) -> tuple[PromptSet, PromptSet | None]:
    """Returns the prompts to train on, and those of evaluations: a part of all, or of a file of their own.

    Args:
        read: reads a file, with words for its progress.
    """
    data = config.data
    if data.validation_split is not None:
        return prompts.held_out(data.validation_split, config.train.seed)
    if data.validation is None:
        return prompts, None
    validation = read(data.validation, "reading validation prompts")
    for name in sorted(set(prompts.columns) - set(validation.columns)):
        refuse_compared(config, name, data.validation)
        log.warning(
            f"no record of {data.validation} has the field {name}, which records of {data.train} have: reward "
            "functions are given None for it in evaluations"
        )
    return prompts, validation.with_columns(prompts.columns)


def _require_known(name: str, prompts: PromptSet, vocabulary: int) -> None:
    """Refuses prompts with tokens that the model does not have.

    Args:
        name: of their file.
        vocabulary: entries of the model's.
    """
    if (largest := max(max(prompt.ids) for prompt in prompts.prompts)) >= vocabulary:
        raise UserError(
            f"{name} has token id {largest}, but the model's vocabulary has {vocabulary} entries: set "
            "data.tokenizer to the tokenizer this model was trained with."
        )
