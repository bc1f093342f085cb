"""The data sets of a run: files and token stores, read, held out from and mixed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.config.data import split_mix
from engine.config.run import RunConfig
from engine.data.build import RecordReader, build_dataset
from engine.data.dataset import TokenDataset
from engine.data.sources import RecordSource, Sources
from engine.data.store_paths import is_store
from engine.data.text_reader import build_texts
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.seams import resolve
from engine.telemetry.format import counted
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.node_data import NodeData
from engine.training.prefixes import PrefixSharing, choose_sharing


@dataclass(frozen=True)
class DataSets:
    """Reads the data sets of a run.

    Args:
        config: of the run.
        tokenizer: of the model.
        images: reads conversations of a vision-language model; None for text alone.
        decoder: the model.
        log: gets a line on each.
        node: shares data sets among the ranks of a machine.
        sources: of records that do not come from files.
    """

    config: RunConfig
    tokenizer: Tokenizer
    images: Any
    decoder: DecoderConfig
    log: Log
    node: NodeData
    sources: Sources

    def training_set(self, path: str) -> tuple[TokenDataset, TokenDataset | None]:
        """Returns data.train mixed with data.mix, and the rows of data.train that data.validation_split holds out."""
        config = self.config
        whole, held_out = self.dataset(path, "training"), None
        share, seed = config.data.validation_split, config.train.seed
        if share is not None:
            from engine.data.hold_out import hold_out

            whole, held_out = hold_out(whole, share, seed)
            self.log.info(
                f"validation data: {counted(len(held_out), 'row')} held out of data.train (data.validation_split "
                f"{share:g}, train.seed {seed}), {counted(held_out.report.target_tokens, 'token')} evaluated; "
                f"{counted(len(whole), 'row')} left to train on"
            )
        if not config.data.mix:
            return whole, held_out
        from engine.data.blend import blend

        entries = [split_mix(entry) for entry in config.data.mix]
        more = [self.dataset(path, f"training ({self.sources.get(path, path)})") for path, _ in entries]
        parts = [whole, *more]
        mixed = blend(parts, [1.0, *(weight for _, weight in entries)])
        self.log.info(f"mixed training data: {counted(len(mixed), 'row')} per epoch")
        return mixed, held_out

    def dataset(self, path: str, what: str) -> TokenDataset:
        """Returns the rows of a file of records, of a token store, or of the source that `path` names."""
        given = self.sources.get(path, path)
        stored = given is path and is_store(path)
        dataset = self._stored(path) if stored else self.node.get(lambda: self.sharing.rows(self._read(given, what)))
        dataset.read_with(None if self.images is None else self.images.family)
        if self.decoder.needs_images and (count := int((dataset.feature_counts == 0).sum())):
            raise UserError(
                f"{given} has {counted(count, 'document')} without an image, but every layer of this "
                f"{self.decoder.family} model attends to one: give records with an image each (token stores and "
                "answers that are plain texts have none)."
            )
        if dataset.max_token >= self.decoder.vocab_size:
            raise UserError(
                f"{given} has token id {dataset.max_token}, but the model's vocabulary has {self.decoder.vocab_size} "
                "entries: set data.tokenizer to the tokenizer this model was trained with."
            )
        self.log.info(f"{what} data: {dataset.report.summary()}")
        if self.sharing.obstacle is not None:
            self.log.info(f"{what} data: documents that begin alike share nothing: {self.sharing.obstacle}")
        for warning in dataset.report.warnings():
            self.log.warning(f"{what} data: {warning}")
        return dataset

    def _stored(self, path: str) -> TokenDataset:
        objective = self.config.objective
        if objective.kind.records is not None:
            why = "compares answers" if objective.kind.answers else "has records of another form"
            raise UserError(f"{path} is a token store, but objective.name {objective.name} {why}: give their records.")
        from engine.data.stored_rows import stored_dataset

        dataset = stored_dataset(path, tokenizer=self.tokenizer, **self._rows)
        # to find beginnings that are alike all of it is read, which a store is there to avoid
        return self.sharing.rows(dataset) if self.config.data.share_prefixes is True else dataset

    @cached_property
    def sharing(self) -> PrefixSharing:
        """Whether documents of a row share their beginnings."""
        return choose_sharing(self.config, self.decoder)

    @property
    def _rows(self) -> dict[str, Any]:
        """The options that say how documents become rows."""
        data = self.config.data
        return {"seq_length": data.seq_length, "packing": data.packing, "overlong": data.overlong}

    def _read(self, path: str | RecordSource, what: str) -> TokenDataset:
        with Progress(self.log, f"reading {what} data", None, "records") as progress:
            data, records = self.config.data, self.config.objective.kind.records
            if records is None:
                return build_texts(
                    path,
                    tokenizer=self.tokenizer,
                    data_format=data.format,
                    mask_prompt=data.mask_prompt,
                    images=self.images,
                    progress=progress.advance,
                    **self._rows,
                )
            assert data.packing != "concatenate", "which would tear answers apart"
            reader: RecordReader[Any] = resolve(records)(self.tokenizer, images=self.images)
            return build_dataset(path, reader, progress=progress.advance, **self._rows)


def show_samples(config: RunConfig, dataset: TokenDataset, tokenizer: Tokenizer, log: Log) -> None:
    """Prints the first rows of a data set, as many as data.show says."""
    if not (log.enabled and config.data.show):
        return
    from engine.data.preview import preview

    for row in range(min(config.data.show, len(dataset))):
        for document, (tokens, targets) in zip(dataset.rows.row(row).tolist(), dataset.documents(row), strict=True):
            spans = dataset.feature_spans(document)
            log.info(f"sample of row {row + 1}: {counted(len(tokens), 'token')}, {int(targets.sum()):,} trained on")
            log.info(preview(tokens, targets, tokenizer, colour=log.live, images=spans))
