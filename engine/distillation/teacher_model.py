"""A teacher on the run's devices: a model of its own, in the run's layout, that computes log-probabilities alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.fingerprint import fingerprint_of
from engine.checkpoint.folder import ADAPTER_CONFIG
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_folder import ModelFolder, open_model
from engine.checkpoint.tokenizer_files import holds_tokenizer
from engine.checkpoint.verification import checked_together
from engine.checkpoint.weight_source import WeightSource
from engine.choices import STORED
from engine.config.distillation import BASE, is_server
from engine.config.hub import instead_of
from engine.config.run import RunConfig
from engine.conversion.proof import Live
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.inference.options import ModelChoice
from engine.layers.context import TrainingPlan
from engine.planning.rank_layout import Companion
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.base_encoding import fill_base, has_formats
from engine.training.build import Training
from engine.training.build_optimizer import host_places, weight_placement
from engine.training.build_stages import build_stages
from engine.training.device_choices import choose_for_device
from engine.training.generation import live_sources
from engine.training.rank_stages import Stages
from engine.training.stage_layout import plan_partition
from engine.training.start_model import ModelPlan, check_model

_FIRST = ("layers.0.lora_A",)
"""A parameter of the first layer: stages are split as those of a model that trains from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTeacher:
    """A teacher that is known to fit the run, but not built yet.

    Args:
        config: of the run, with the teacher in place of its model.
        source: the base.
        live: the model with its adapter.
        tokenizer: where the tokenizer is that it was trained with; None where it has none.
    """

    config: RunConfig
    source: WeightSource
    live: Live
    tokenizer: Path | None


def model_choice(config: RunConfig, folder: Path) -> ModelChoice:
    """Returns the model in a folder: a checkpoint, or an adapter with its base."""
    if (folder / ADAPTER_CONFIG).is_file():
        return ModelChoice(path=Path(config.model.path), adapter=folder, download=config.hub.download)
    if (folder / "config.json").is_file():
        return ModelChoice(path=folder)
    return ModelChoice(path=None, adapter=folder, base_dtype=config.model.base_dtype, download=config.hub.download)


def open_teacher(config: RunConfig, folder: Path, world_size: int, log: Log) -> OpenTeacher:
    """Opens a teacher, and checks that it fits the layout; reads no weights.

    Raises:
        UserError: no model, an adapter that does not fit it, or a model that does not divide over the ranks.
    """
    source, live, trained, _ = live_sources(model_choice(config, folder), log)
    source.model.check_tokens()
    base = config.model.base_dtype
    if base == STORED and not has_formats(source):  # one in 16 bits may teach one in few
        base = None
    own = replace(
        config,
        model=replace(
            config.model, path=str(source.model.path), init="checkpoint", base_dtype=base, base_products="decoded"
        ),
        trainable=(),
        lora=replace(config.lora, rank=0, init_from=None, merge_aware=False),
        train=replace(config.train, router_aux_loss_coef=0.0),
        memory=replace(config.memory, cuda_graph="none"),
    )
    check_model(own, source.model, world_size, source)
    places = (source.model.path if trained.path is None else trained.path, source.model.path)
    tokenizer = next(filter(holds_tokenizer, places), None)
    return OpenTeacher(config=own, source=source, live=live, tokenizer=tokenizer)


def check_teacher(
    config: RunConfig,
    launch: Launch,
    name: str,
    teacher: str,
    *,
    model: ModelFolder,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Checks that a teacher on the run's devices can judge its tokens. Collective.

    Args:
        name: in reports.
        teacher: its folder.
        model, tokenizer: that are trained.
        texts: that tokenizers are compared with; on rank 0.
        say: prints a line on rank 0.

    Raises:
        UserError: it cannot be opened, does not fit the layout, or has other tokens; on all ranks.
    """
    opened = open_teacher(config, Path(teacher), launch.world_size, Log(rank=1))
    found = opened.live.config
    if found.vocab_size < model.decoder.vocab_size:
        raise UserError(
            f"distillation.teachers has {teacher}, whose vocabulary has {found.vocab_size} entries, and that of "
            f"{config.model.path} has {model.decoder.vocab_size}: choose a teacher of the same family."
        )
    problem = _other_tokens(config, teacher, opened, tokenizer, texts) if launch.rank == 0 else None
    if (told := broadcast_object(problem)) is not None:
        raise UserError(str(told))
    note = "" if opened.tokenizer is not None else "; it has no tokenizer that could be compared"
    say(f"teacher {name}: {found.family}, {found.num_layers} layers of {found.hidden}{note}")


def _other_tokens(
    config: RunConfig, teacher: str, opened: OpenTeacher, tokenizer: Tokenizer, texts: Sequence[str]
) -> str | None:
    """Returns a sentence where a teacher's tokenizer makes other tokens of some texts than the run's."""
    path = opened.tokenizer
    if path is None or path.resolve() == Path(config.data.tokenizer or config.model.path).resolve():
        return None
    own = load_tokenizer(path)
    if all(list(own.encode(text)) == list(tokenizer.encode(text)) for text in texts):
        return None
    return (
        f"distillation.teachers has {teacher}, whose tokenizer makes other tokens of the texts than the model's, so "
        "that its probabilities are of other texts: choose a teacher of the same family."
    )


def companions(config: RunConfig) -> Iterator[Companion]:
    """Yields the teachers of a run that lie on its devices, for the planner; see
    `engine.config.objective.ObjectiveKind`. Of a model its config.json is enough.

    Raises:
        UserError: a teacher is not there.
    """
    for teacher in config.distillation.teachers:
        if teacher == BASE or is_server(teacher):
            continue
        if not Path(teacher).is_dir():
            advice = instead_of(teacher, "give the folder of a model, of a PEFT adapter or of a run")
            raise UserError(f"distillation.teachers has {teacher}, which is not a folder{advice}.")
        choice = model_choice(config, Path(teacher))
        if choice.adapter is None and choice.path is not None:
            yield Companion(open_model(choice.path).decoder, TrainingPlan())
            continue
        _, live, _, _ = live_sources(choice, Log(rank=1))
        yield Companion(live.config, live.plan)


def teacher_identity(opened: OpenTeacher) -> str:
    """Returns a hash of a teacher's sizes and of some rows of each of its tensors."""
    with opened.source.checks.glancing():
        return fingerprint_of(opened.live.tensors, opened.source.model.hf_config)


def build_teacher(opened: OpenTeacher, launch: Launch, training: Training, log: Log) -> Stages:
    """Builds this rank's part of a teacher, and reads its weights. Collective.

    Args:
        training: the model that learns from it, on whose mesh it lies.
    """
    config, live, mesh = opened.config, opened.live, training.mesh
    partition = plan_partition(config, live.config, _FIRST, launch.world_size)
    weights = weight_placement(config, mesh, host_places(config.memory, launch.device).weights)
    stages = build_stages(
        config,
        launch,
        ModelPlan(modules=live.plan, partition=partition, shapes={}, trained={}),
        choose_for_device(config, launch.device, live.config, opened.source.format),
        mesh,
        decoder=live.config,
        weights=weights,
        objective=training.objective,
        loss_scale=None,
        base=None,
        log=Log(rank=1),  # its kernels are those of the model
    )
    parts = [part for entry in stages.entries() for part in weights.parts(entry)]
    with checked_together([opened.source.checks], mesh.world):
        total = sum(part.tensor.nbytes for part in parts)
        with Progress(log, "reading weights of a teacher", total, "bytes") as progress:
            load_parameters(parts, live.tensors, progress=progress.advance)
        checkpoint = opened.source
        fill_base(config, checkpoint.model, live.tensors, stages.models(), weights, log, checkpoint=checkpoint)
    return stages
