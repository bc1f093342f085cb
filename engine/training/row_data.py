"""Rows that are there before a run begins: records and token stores, read and tokenised once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack

from engine.checkpoint.model_folder import ModelFolder
from engine.config.data import split_mix
from engine.config.rules import check_warmup
from engine.config.run import RunConfig
from engine.data.blend import blend
from engine.data.build import Advance
from engine.data.data_report import context_warning
from engine.data.dataset import TokenDataset
from engine.data.hold_out import hold_out
from engine.data.loader import DataLoader, EvalLoader
from engine.data.order import DataOrder
from engine.data.preview import preview
from engine.data.row_means import RowMeanLoader
from engine.data.store import is_store
from engine.data.stored_rows import stored_dataset
from engine.data.text_reader import build_texts
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.format import counted
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.progress import Progress
from engine.training.build import Training
from engine.training.node_data import NodeData
from engine.training.row_shape import shape_of_launch
from engine.training.step_source import RowSource


class _ReaderOptions(TypedDict):
    """The options that every reader of records takes; see `engine.data.build.build_dataset`."""

    tokenizer: Tokenizer
    seq_length: int
    overlong: str
    progress: Advance
    images: Any


class RecordReader(Protocol):
    """The function that `engine.config.objective.ObjectiveKind.records` names."""

    def __call__(self, paths: str, *, packing: bool, **common: Unpack[_ReaderOptions]) -> TokenDataset:
        """Reads and tokenises files of records.

        Raises:
            UserError: a file or record that cannot be used, or nothing left to train on.
        """
        ...


class ReferenceLoader(Protocol):
    """The function that `engine.config.objective.ObjectiveKind.references` names."""

    def __call__(
        self,
        config: RunConfig,
        training: Training,
        sets: dict[str, TokenDataset],
        log: Log,
        *,
        run_dir: Path,
        rank: int,
        resumed: Path | None,
    ) -> None:
        """See `engine.training.run_data.RunData.know_reference`; `sets` are the rows, by their names."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowData:
    """Training and validation rows of this rank; see `engine.training.run_data.RunData`."""

    tokenizer: Tokenizer
    train: DataLoader
    validation: EvalLoader | None

    @property
    def rows(self) -> TokenDataset:
        return self.train.dataset

    def earlier_order(self, before: RunConfig) -> DataOrder:
        return replace(self.train.order, batch=before.train.global_batch_size, last_batch=before.train.last_batch)

    def know_reference(
        self, config: RunConfig, training: Training, log: Log, *, run_dir: Path, rank: int, resumed: Path | None
    ) -> None:
        objective = config.objective
        if objective.kind.references is None or objective.compared_with != "initial":
            return
        sets = {"train": self.train.dataset}
        if self.validation is not None:
            sets["validation"] = self.validation.dataset
        load: ReferenceLoader = resolve(objective.kind.references)
        load(config, training, sets, log, run_dir=run_dir, rank=rank, resumed=resumed)

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
        return RowSource(self.train)


def read_rows(
    config: RunConfig,
    launch: Launch,
    model: ModelFolder,
    tokenizer: Tokenizer,
    log: Log,
    *,
    images: Any,
) -> RowData:
    """Reads records and token stores; see `engine.training.run_data.DataReader`."""
    assert config.data.train is not None
    decoder = model.decoder
    source = _Source(config, tokenizer, images, decoder, log, NodeData.of_this_process(launch))
    train, held_out = source.training_set(config.data.train)
    show_samples(config, train, tokenizer, log)
    shape = shape_of_launch(config, launch)
    workers, pinned = config.data.num_workers, launch.device.type == "cuda"
    loader = DataLoader(
        train,
        shape,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        last_batch=config.train.last_batch,
        num_workers=workers,
        pin_memory=pinned,
    )
    if config.train.num_epochs is not None:
        check_warmup(config, loader.order.steps_left(0, config.train.num_epochs))
    if config.data.validation is not None:
        held_out = source.dataset(config.data.validation, "validation")
    validation = None
    if held_out is not None:
        kind = RowMeanLoader if config.train.eval_mean == "rows" else EvalLoader
        validation = kind(
            held_out, shape, max_samples=config.train.eval_samples, num_workers=workers, pin_memory=pinned
        )
    if (too_long := context_warning(config.data.seq_length, train.lengths, decoder.context_length)) is not None:
        log.warning(too_long)
    return RowData(tokenizer=tokenizer, train=loader, validation=validation)


def show_samples(config: RunConfig, dataset: TokenDataset, tokenizer: Tokenizer, log: Log) -> None:
    """Prints the first rows of a data set, as many as data.show says."""
    if not log.enabled:
        return
    for row in range(min(config.data.show, len(dataset))):
        for document, (tokens, targets) in zip(dataset.rows.row(row).tolist(), dataset.documents(row), strict=True):
            spans = dataset.feature_spans(document)
            log.info(f"sample of row {row + 1}: {counted(len(tokens), 'token')}, {int(targets.sum()):,} trained on")
            log.info(preview(tokens, targets, tokenizer, colour=log.live, images=spans))


@dataclass(frozen=True, slots=True)
class _Source:
    """What the data sets of a run are read with."""

    config: RunConfig
    tokenizer: Tokenizer
    images: Any
    decoder: DecoderConfig
    log: Log
    node: NodeData

    def training_set(self, path: str) -> tuple[TokenDataset, TokenDataset | None]:
        """Returns data.train with what data.mix adds to it, and what data.validation_split holds out of data.train."""
        config = self.config
        whole, held_out = self.dataset(path, "training"), None
        share, seed = config.data.validation_split, config.train.seed
        if share is not None:
            whole, held_out = hold_out(whole, share, seed)
            self.log.info(
                f"validation data: {counted(len(held_out), 'row')} held out of data.train (data.validation_split "
                f"{share:g}, train.seed {seed}), {counted(held_out.report.target_tokens, 'token')} evaluated; "
                f"{counted(len(whole), 'row')} left to train on"
            )
        if not config.data.mix:
            return whole, held_out
        entries = [split_mix(entry) for entry in config.data.mix]
        more = [self.dataset(path, f"training ({path})") for path, _ in entries]
        parts = [whole, *more]
        mixed = blend(parts, [1.0, *(weight for _, weight in entries)])
        self.log.info(f"mixed training data: {counted(len(mixed), 'row')} per epoch")
        return mixed, held_out

    def dataset(self, path: str, what: str) -> TokenDataset:
        """Returns the rows of a file of records, or of a token store."""
        dataset = self._stored(path) if is_store(path) else self.node.get(lambda: self._read(path, what))
        dataset.read_with(None if self.images is None else self.images.family)
        if self.decoder.needs_images and (count := int((dataset.feature_counts == 0).sum())):
            raise UserError(
                f"{path} has {counted(count, 'document')} without an image, but every layer of this "
                f"{self.decoder.family} model attends to one: give records with an image each (token stores and "
                "answers that are plain texts have none)."
            )
        if dataset.max_token >= self.decoder.vocab_size:
            raise UserError(
                f"{path} has token id {dataset.max_token}, but the model's vocabulary has {self.decoder.vocab_size} "
                "entries: set data.tokenizer to the tokenizer this model was trained with."
            )
        self.log.info(f"{what} data: {dataset.report.summary()}")
        for warning in dataset.report.warnings():
            self.log.warning(f"{what} data: {warning}")
        return dataset

    def _stored(self, path: str) -> TokenDataset:
        data, objective = self.config.data, self.config.objective
        if objective.kind.answers:
            raise UserError(
                f"{path} is a token store, but objective.name {objective.name} compares answers: give their records."
            )
        return stored_dataset(
            path,
            tokenizer=self.tokenizer,
            seq_length=data.seq_length,
            packing=data.packing,
            overlong=data.overlong,
        )

    def _read(self, path: str, what: str) -> TokenDataset:
        with Progress(self.log, f"reading {what} data", None, "records") as progress:
            data, records = self.config.data, self.config.objective.kind.records
            common = _ReaderOptions(
                tokenizer=self.tokenizer,
                seq_length=data.seq_length,
                overlong=data.overlong,
                progress=progress.advance,
                images=self.images,
            )
            if records is None:
                return build_texts(
                    path, data_format=data.format, mask_prompt=data.mask_prompt, packing=data.packing, **common
                )
            assert data.packing != "concatenate", "which would tear answers apart"
            read: RecordReader = resolve(records)
            return read(path, packing=data.packing, **common)
