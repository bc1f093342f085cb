"""Compares the memory that the planner predicts with the run's: one line at the start, and a warning where they differ.

The prediction is for rows as long as the longest one of the data, with as many tiles of images as any of them has;
tiles are taken to be of the family's usual size. Only rank 0 predicts and reports. A run that the
planner cannot describe has no prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.row_shape import round_up
from engine.errors import UserError
from engine.planning.ledger import largest_part
from engine.planning.memory_plan import memory_plan_of
from engine.planning.peak import PeakEstimate, predict_layout
from engine.planning.predict import usual_tiles, workload_of
from engine.planning.rank_layout import Layout, Workload
from engine.runtime.launch import Launch
from engine.telemetry.format import format_bytes
from engine.training.build import Training
from engine.training.observer import Observer, StepReport
from engine.training.row_shape import shape_of_launch

TOLERANCE = 0.1
"""Share of the prediction by which the measured peak may differ before that is reported."""


class MemoryForecast(Observer):
    """The prediction of a run on this rank.

    Args:
        config: of the run.
        launch: rank, ranks and device.
        training: of the run.
        dataset: the training rows; None where they are not known yet.
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        dataset: TokenDataset | None,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._say, self._memory = say, 0
        self._rank, self._device = launch.rank, launch.device.type
        decoder = training.source.model.decoder
        missing = [("the memory of graphs", config.memory.cuda_graph != "none")]
        missing.append(("what images take", decoder.sees_images and not decoder.fronts))  # transformers' modules
        self._missing = [what for what, is_missing in missing if is_missing]
        self._is_bound = config.objective.kind.samples
        """Whether the prediction is of the longest completions, of which a run may have sampled none."""
        self._spoken = False
        self._reason = ""
        self.estimate: PeakEstimate | None = None
        if launch.rank != 0:
            return
        try:
            self.estimate = _predict(config, launch, training, dataset)
        except UserError as error:
            self._reason = str(error)

    def line(self) -> str | None:
        """The prediction's line for the log at the start; None on other ranks than 0."""
        if self._rank != 0:
            return None
        if self.estimate is None:
            return f"memory: {self._reason}"
        estimate, host = self.estimate, ""
        moment, parts = estimate.fullest()
        name = largest_part(parts)
        if estimate.host:
            host = f", and {format_bytes(estimate.host)} in host memory"
        missing = f"; {' and '.join(self._missing)} comes on top" if self._missing else ""
        return (
            f"memory: {format_bytes(estimate.peak)} of tensors predicted for rank 0{host}, fullest in {moment}, the "
            f"largest part {name} with {format_bytes(parts[name])}{missing}"
        )

    def read(self, report: StepReport) -> None:
        """Compares the memory that is held with the prediction."""
        self._memory = report.memory
        self._warn(last=False)

    def finish(self, step: int, consumed: int) -> None:
        """Compares the peak of the whole run with the prediction."""
        if self._memory:
            self._warn(last=True)

    def _warn(self, *, last: bool) -> None:
        if (warning := self.seen(self._memory, last=last)) is not None:
            self._say(warning)

    def seen(self, measured: int, *, last: bool = False) -> str | None:
        """Takes the peak so far.

        Args:
            measured: bytes, torch's count on a GPU. On a CPU it is the whole process's, which is not predicted.
            last: whether the run is at its end, so that the peak cannot rise further.

        Returns:
            A warning, once, where it differs by more than TOLERANCE.
        """
        if self.estimate is None or self._spoken or self._missing or self._device != "cuda":
            return None
        predicted = self.estimate.peak
        over, under = measured > predicted * (1 + TOLERANCE), last and measured < predicted * (1 - TOLERANCE)
        under = under and not self._is_bound
        if not over and not under:
            return None
        self._spoken = True
        return (
            f"warning: rank 0 has held {format_bytes(measured)}, {abs(measured / predicted - 1):.0%} "
            f"{'more' if over else 'less'} than the {format_bytes(predicted)} predicted: measure "
            "other layouts with rankfold plan memory --probe before trusting their predictions."
        )


def _predict(config: RunConfig, launch: Launch, training: Training, dataset: TokenDataset | None) -> PeakEstimate:
    """Predicts the peak memory of rank 0.

    Raises:
        UserError: the planner does not know the configuration.
    """
    device = launch.device
    source = training.source
    workload = workload_of(
        config, source.model.decoder, training.plan.modules, device_type=device.type, stored=source.formats
    )
    data = max(1, launch.world_size // config.parallel.model_parallel_size)
    layout = Layout(parallel=config.parallel, data=data)
    if dataset is not None:
        workload = _with_rows(workload, config, launch, dataset)
    return predict_layout(workload, layout, memory_plan_of(config))[0]


def _with_rows(workload: Workload, config: RunConfig, launch: Launch, dataset: TokenDataset) -> Workload:
    """Returns the workload with rows as they are padded: to the longest of the data, unless they are packed."""
    if fronts := workload.decoder.fronts:
        tiles_of_row = -(-dataset.most_features() // fronts[0].num_features(fronts[0].usual_tile))
        tiles = usual_tiles(workload.decoder, config.train.micro_batch_size * tiles_of_row)
        workload = replace(workload, tiles=tiles)
    if dataset.packing or not len(dataset):
        return workload
    longest = shape_of_launch(config, launch).padded(int(dataset.row_lengths.max()), dataset.seq_length)
    length = min(workload.seq_length, round_up(longest, 2 * config.parallel.context * config.parallel.tensor))
    return replace(workload, seq_length=length, longest_document=min(workload.document_length, length))
