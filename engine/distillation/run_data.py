"""The data of a run that learns a teacher's distributions of given texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.model_folder import ModelFolder
from engine.config.objective import ObjectiveOptions
from engine.config.run import RunConfig
from engine.data.tokenizer import Tokenizer
from engine.distillation.teacher_model import build_teacher, check_teacher, open_teacher
from engine.distillation.teacher_states import TeacherPasses
from engine.distillation.top_tokens import TopTokenColumns
from engine.errors import UserError
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.training.build import Training
from engine.training.row_data import RowData, read_rows
from engine.training.run_data import Supplied
from engine.training.step_source import RowSource

_COMPARED = 16
"""Texts that are given to the tokenizers of teachers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaughtData(RowData):
    """Rows whose teachers are models on the run's devices; see `engine.training.run_data.RunData`."""

    def source(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        *,
        metrics: MetricsWriter,
        say: Callable[[str], None],
        run_dir: Path,
    ) -> RowSource:
        log = Log(launch.rank)
        teachers = [
            build_teacher(open_teacher(config, Path(teacher), launch.world_size, log), launch, training, log)
            for teacher in config.distillation.teachers
        ]
        vocab_size = training.stages.models()[-1].config.vocab_size
        training.stages.prepare = TeacherPasses(teachers, vocab_size).taught
        return RowData.source(self, config, launch, training, metrics=metrics, say=say, run_dir=run_dir)


def read_taught(
    config: RunConfig,
    launch: Launch,
    model: ModelFolder,
    tokenizer: Tokenizer,
    log: Log,
    *,
    images: Any,
    supplied: Supplied,
) -> RowData:
    """Reads texts, and the teacher's tokens that they have, or opens the models that teach; see
    `engine.training.run_data.DataReader`."""
    options: dict[str, Any] = {"images": images, "supplied": supplied}
    if not config.distillation.teachers:
        stored = read_rows(config, launch, model, tokenizer, log, **options)
        _require_known(stored, config, model.decoder.vocab_size)
        return stored
    texts = replace(config, objective=ObjectiveOptions())
    rows = read_rows(texts, launch, model, tokenizer, log, **options)
    dataset = rows.train.dataset
    shown = [tokens for row in range(min(_COMPARED, len(dataset))) for tokens, _ in dataset.documents(row)]
    sample = [tokenizer.decode(tokens.tolist()) for tokens in shown[:_COMPARED]]
    for name, teacher in zip(config.distillation.names, config.distillation.teachers, strict=True):
        check_teacher(config, launch, name, teacher, model=model, tokenizer=tokenizer, texts=sample, say=log.info)
    return TaughtData(tokenizer=rows.tokenizer, train=rows.train, validation=rows.validation)


def _require_known(rows: RowData, config: RunConfig, vocabulary: int) -> None:
    """Refuses a teacher's tokens that the model does not have.

    Args:
        vocabulary: entries of the model's.
    """
    datasets = [rows.train.dataset] + ([] if rows.validation is None else [rows.validation.dataset])
    for name, dataset in zip(("data.train", "data.validation"), datasets, strict=False):
        columns = dataset.extra(TopTokenColumns)
        assert columns is not None, "records without a teacher's tokens"
        if (largest := int(columns.ids.max(initial=0))) >= vocabulary:
            raise UserError(
                f"the records of {name} have token {largest} among a teacher's, and the vocabulary of "
                f"{config.model.path} has {vocabulary} entries: write them with a teacher of the same family, or leave "
                "such tokens out."
            )
