"""Rows of a run's data, read again after the run, for what an export learns and measures with them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from engine.batch import Batch
from engine.checkpoint.model_folder import ModelFolder
from engine.config.load import from_yaml
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.loader import EvalLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.telemetry.log import Log
from engine.training.data import chat_options, with_hub_data
from engine.training.data_sets import DataSets
from engine.training.node_data import NodeData


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of a run's data.

    Args:
        config: of the run, as its checkpoint has it.
        model: that it trained.
        log: gets a line on what is read.
    """

    config: RunConfig
    model: ModelFolder
    log: Log

    @classmethod
    def recorded(cls, run_config: str, model: ModelFolder, log: Log) -> RunRows:
        """Returns the rows of the run with this configuration, as YAML."""
        return cls(from_yaml(run_config), model, log)

    def training(self, count: int) -> list[Batch]:
        """Returns the first rows of data.train, each in a batch of its own.

        Raises:
            UserError: they cannot be read, or are no texts.
        """
        assert self.config.data.train is not None
        return self._read(self.config.data.train, "calibration", count)

    def validation(self, path: Path | None) -> list[Batch]:
        """Returns the rows of a file, or of data.validation, as many as the run evaluates.

        Raises:
            UserError: as of `training`, or the run has no such data.
        """
        found = self.config.data.validation if path is None else str(path)
        if found is None:
            raise UserError("--evaluate is validation, and the run has no data.validation: give a file of records.")
        return self._read(found, "evaluation", self.config.train.eval_samples)

    def _read(self, path: str, what: str, count: int | None) -> list[Batch]:
        config = self.config
        if config.objective.kind.records is not None or self.model.decoder.sees_images:
            raise UserError(
                f"--calibrate and --evaluate read texts and conversations, and this run was on "
                f"{'images' if self.model.decoder.sees_images else config.objective.name}: leave them out."
            )
        tokenizer = load_tokenizer(config.data.tokenizer or self.model.hf_path, chat_options(config))
        with ExitStack() as opened:
            sources = with_hub_data(config.data, None, opened).sources
            node = NodeData(self.log.info, None, rank=0, size=1)
            sets = DataSets(config, tokenizer, None, self.model.decoder, self.log, node, sources)
            dataset: TokenDataset = sets.dataset(path, what)
            return list(islice(EvalLoader(dataset), count))
