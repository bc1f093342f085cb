"""The log of a run before its first step and after its last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.choices import STORED
from engine.config.hub import shown
from engine.config.run import RunConfig
from engine.distributed.ranks import RankGrid
from engine.models.describe import num_parameters
from engine.models.families import FAMILIES, family_of
from engine.models.names import is_shared_factor, own_names
from engine.runtime.launch import Launch
from engine.runtime.preemption import CTRL_C
from engine.sentences import listed
from engine.telemetry.format import (
    counted,
    first_to_last,
    format_bytes,
    format_count,
    format_duration,
    format_parameters,
    how_far,
    short_path,
)
from engine.telemetry.log import Log
from engine.training.build import Training
from engine.training.learning_rates import rates_line
from engine.training.module_plan import bare_mixers_line, fusing_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The results of a finished run. A loss is the mean over the target tokens of its own step or evaluation.

    Args:
        run_dir: its folder.
        steps: taken in all starts together.
        losses: step and loss of the first and the last reported step of this start; one entry, where there is only one.
        loss_course: the loss at the beginning and at the end of this start, as a report shows it: means of a long run's
            steps.
        how_far: the share of the whole run that has been done.
        eval_losses: step and loss of the first and the last evaluation of this start, or the figure in its place.
        evaluated: the name of that figure.
        tokens: of this start's steps.
        seconds: of this start's steps.
        memory: peak bytes held by this rank.
        data_stall: seconds that steps waited for data.
        graphs: the counts of micro-batches that were replayed as a graph, and of others.
        best: the best evaluation, and its checkpoint.
        judge: the figure that is best there.
        stopped: what stopped the run before its end: a signal, "Ctrl-C", "stop()" or "Session.close()"; None at its
            end.
    """

    run_dir: Path
    steps: int
    losses: tuple[tuple[int, float], ...] = ()
    loss_course: str = ""
    how_far: str = ""
    eval_losses: tuple[tuple[int, float], ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    memory: int = 0
    data_stall: float = 0.0
    graphs: str | None = None
    best: str | None = None
    evaluated: str = "evaluation loss"
    judge: str = "evaluation loss"
    stopped: str | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped the run, by Ctrl-C."""
        return self.stopped == CTRL_C

    def lines(self) -> list[str]:
        """Returns the lines of the log that show the results."""
        rows = [("run", self.how_far or how_far(self.steps, self.steps))]
        if self.loss_course:
            rows.append(("training loss", self.loss_course))
        if self.eval_losses:
            rows.append((self.evaluated, first_to_last(self.eval_losses)))
        if self.best is not None:
            rows.append((f"best {self.judge}", self.best))
        if self.seconds > 0:
            speed = f"{format_count(self.tokens / self.seconds)} tokens/s"
            rows.append(("speed", f"{speed}, {format_duration(self.seconds)} in all"))
            rows.append(("waiting for data", f"{self.data_stall:.2f} s"))
        if self.graphs is not None:
            rows.append(("CUDA graphs", self.graphs))
        rows += [("peak memory of rank 0", format_bytes(self.memory)), ("run folder", short_path(self.run_dir))]
        width = max(len(name) for name, _ in rows)
        return [f"  {name:<{width}}  {value}" for name, value in rows]


def _dropouts(hf_config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the probabilities above 0 with which a `config.json` has layers drop something, by name."""
    found: dict[str, float] = {}
    for name, value in hf_config.items():
        if isinstance(value, dict):
            found |= _dropouts(value)
        elif "drop" not in name or name.startswith(("classifier", "summary")):  # of heads that are not here
            continue
        elif isinstance(value, float) and value > 0:
            found[name] = value
    return found


def announce(config: RunConfig, launch: Launch, training: Training, log: Log, *, num_micro_batches: int) -> None:
    """Logs the trained model and its layout."""
    grid = training.mesh.grid
    whole = num_parameters(training.source.model.decoder)
    trained = training.plan.num_trained()
    splits = config.parallel.sequence_parallel and training.source.model.decoder.splits_tokens
    sequence = " with sequence parallelism" if splits else ""
    log.info(
        f"model: {short_path(shown(config.model.path))}, {format_parameters(whole)} parameters, "
        f"{format_parameters(trained)} trained, {config.model.dtype} on {launch.device.type}"
    )
    if (made_by := training.source.model.decoder.made_by) is not None:
        asked = config.model.implementation == "adopted"
        family = training.source.model.family
        lack = f"not all layers of this {family} model" if family in FAMILIES else f"no {family} of its own"
        why = "asked for" if asked else f"the engine has {lack}"
        log.info(f"layers: adopted from {made_by} ({why})")
    idle = [name for name in training.source.model.decoder.unread_modules if training.plan.modules.adapter(name)]
    if idle:
        log.info(f"note: the adapters of {listed(idle)} have no gradient: the last layer's output there is not read")
    read = family_of(training.source.model.hf_config, training.source.model.implementation)[1]
    if dropouts := [f"{name} {probability}" for name, probability in _dropouts(read).items()]:
        log.info(f"note: config.json has {listed(dropouts)}, and the model's own dropout is not applied")
    if (reason := _peft_obstacle(config, training)) is not None:
        log.info(f"note: {reason}")
    if (line := rates_line(config.optim, training.source.model, training.plan.trained)) is not None:
        log.info(line)
    weights = training.source.weights
    if weights is not None:
        encoding = weights.encoding_note(decodes=config.model.base_dtype != STORED)
        for line in (weights.outside_note(), encoding, weights.head_note):
            if line is not None:
                log.info(line)
    if training.source.head_is_copy:
        ends = " and ".join(end for end in ("embed_tokens", "lm_head") if training.plan.modules.trains(end))
        log.info(
            f"note: the model ties its head to its embedding, and a copy of {ends} is trained, as under PEFT "
            "(lora.ensure_weight_tying true: one matrix for both)"
        )
    for line in fusing_lines(training.plan.modules, training.source.model.decoder, training.source.model.names):
        log.info(line)
    if (line := bare_mixers_line(training.plan.modules, training.source.model.decoder)) is not None:
        log.info(line)
    log.info(
        f"layout: {counted(launch.world_size, 'rank')}, tensor {grid.tp}{sequence}, {_pipeline(training)}"
        f"{f'context {grid.cp} ({config.parallel.context_method}), ' if grid.cp > 1 else ''}data {grid.dp}"
        f"{_experts(grid)}; "
        f"{counted(num_micro_batches, 'micro-batch')} of {counted(config.train.micro_batch_size, 'row')} a step"
    )


def _peft_obstacle(config: RunConfig, training: Training) -> str | None:
    """Returns the reason why a mixture's adapters cannot be exported as each expert's, with a remedy."""
    plan, decoder = training.plan.modules, training.source.model.decoder
    if not decoder.num_experts:
        return None
    from engine.conversion.peft_experts import TrainedAdapters, advice, obstacle

    modules = {own.rpartition(".")[0] for name in training.plan.trained for own in own_names(name, decoder)}
    adapters = {module: settings for module in modules if (settings := plan.adapter(module)) is not None}
    if not adapters:
        return None
    trained = TrainedAdapters(
        adapters={module: (settings.rank, settings.scale) for module, settings in adapters.items()},
        in_full=sorted(modules - adapters.keys()),
        shared=[name for name in training.plan.trained if is_shared_factor(name)],
        rslora=config.lora.rslora,
    )
    reason = obstacle(trained, decoder, "per_expert")
    return None if reason is None else f"{reason}: {advice(trained, decoder, None)}"


def _experts(grid: RankGrid) -> str:
    """Returns a phrase on the layout of experts, where it differs from that of the rest of the model."""
    if not grid.has_expert_mesh:
        return ""
    return f", expert {grid.ep}{f' (each on {grid.tp} tensor ranks)' if grid.shards_experts and grid.tp > 1 else ''}"


def _pipeline(training: Training) -> str:
    partition = training.plan.partition
    if len(partition.layers) == 1:
        return ""
    layers = ", ".join(map(str, partition.layers))
    return f"pipeline {training.mesh.pp.size} ({partition.choice.name}, stages of {layers} layers), "
