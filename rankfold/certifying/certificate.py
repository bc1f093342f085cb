"""Records the results of one layout in a few steps, piece by piece, for comparison with another layout.

`record_run` is one rank's side: it trains and writes the pieces it holds, replicated or not. `Recording` is the other
side, in one process without ranks: it assembles whole tensors from all ranks' pieces, and checks that copies on several
ranks are equal. Tolerances are applied elsewhere.

The run is the configured one, from its base, except for options that would prove nothing or hide differences in
rounding: see `certificate_config`, and factors of adapters that start at zero, which are drawn, because the gradient of
the other factor would vanish.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from engine.checkpoint.reshard import boxes_of
from engine.checkpoint.safetensors_file import SafetensorsReader, SafetensorsWriter
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.models.initialise import fill_normal
from engine.models.run_proof import RunProof
from engine.preferences.data.answer_columns import put_reference
from engine.preferences.reference_logps import companion_name, compute_references
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import Training, build_training
from engine.training.data import build_data
from engine.training.device_choices import choose_for_device
from engine.training.start_model import check_model, model_source
from engine.training.start_proof import prove_model

GRADIENT, PARAMETER = "gradient", "parameter"
"""Tensors: complete sums before clipping, of each step; fp32 masters, before the first step and after the last."""
LOSS, NORM = "loss", "gradient norm"
"""Figures of each step: mean loss over the target tokens of the global batch; norm of the gradient before clipping."""
MAX_LR = 2e-4
DRAWN_STD = 0.02
"""Standard deviation of factors that would be zero: adapters' outputs are then smaller than the base's, but not
lost.
"""


def record_run(config: RunConfig, launch: Launch, log: Log, folder: Path, num_steps: int) -> None:
    """Trains `num_steps` steps on this rank and records gradients and parameters. Collective.

    Args:
        config: of the run, in the layout that `launch` has the ranks for.
        launch: this rank.
        log: reports each finished step.
        folder: gets this rank's files; a `Recording` reads them.
        num_steps: optimizer steps, 1 or more.

    Raises:
        UserError: something in the configuration, the model or the data cannot work.
    """
    # as torch.use_deterministic_algorithms, without loading torch's compiler, which takes seconds
    torch.set_deterministic_debug_mode("error")
    source = model_source(config)
    plan = check_model(config, source.model, launch.world_size, source.weights)
    config = certificate_config(config, plan.num_trained())
    choose_for_device(config, launch.device, source.model.decoder, source.formats)
    plan, mesh = prove_model(config, launch, log, source, plan)
    if plan.proof is not None and launch.rank == 0:
        _proof_file(folder).write_text(json.dumps(plan.proof.record()), encoding="utf-8")
    loader = build_data(config, launch, source.model, log).train
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"objective.name is {config.objective.name}, whose rows depend on the model as it trains, and a "
            "certificate compares layouts on the same rows: set objective.name to language_modeling, with data of "
            "answers."
        )
    if config.distillation.teachers:
        raise UserError(
            f"objective.name is {config.objective.name} and distillation.teachers names models, which a certificate "
            "does not have beside the trained one: set objective.name to language_modeling, and distillation.teachers "
            "to []."
        )
    training = build_training(config, launch, source, plan, log, mesh=mesh)
    _know_references(config, training, loader.dataset, log)
    optimizer = training.optimizer
    if draws_factors(config):
        _draw_zero_factors(training, config.train.seed)
    flat = optimizer.flat
    _write_pieces(_pieces_file(folder, launch.rank, PARAMETER, 0), flat.master_shards())
    losses, norms = [], []
    starts = loader.order.starts(0, num_steps)
    for step, (start, batches) in enumerate(zip(starts, loader.stream(0, num_steps), strict=True), 1):
        targets = loader.target_count(start)
        # the phases of engine.training.step, separated to read the gradient between them
        losses.append(float(training.step.gradients(batches, targets)))
        _write_pieces(_pieces_file(folder, launch.rank, GRADIENT, step), flat.gradient_shards())
        norms.append(float(optimizer.step(config.optim.lr)))
        training.stages.step.add_(1)
        log.info(f"step {step}/{num_steps}  loss {losses[-1]:.4f}  grad norm {norms[-1]:.3g}")
    _write_pieces(_pieces_file(folder, launch.rank, PARAMETER, num_steps), flat.master_shards())
    figures = {LOSS: losses, NORM: norms}
    _figures_file(folder, launch.rank).write_text(json.dumps(figures), encoding="utf-8")


def _know_references(config: RunConfig, training: Training, dataset: TokenDataset, log: Log) -> None:
    """Computes the reference of an objective that compares with the initial model, before factors are drawn."""
    if config.objective.compared_with != "initial":
        return
    companions = {companion_name(part): companion for part, companion in dataset.companions.items()}
    for name, one in {"training": dataset, **companions}.items():
        put_reference(one, compute_references(config, training, one, log, name))


def draws_factors(config: RunConfig) -> bool:
    """Returns whether the run has adapters that start with a factor of zeros, which a certificate draws."""
    return config.lora.rank > 0 and config.lora.init_from is None


def certificate_config(config: RunConfig, num_trained: int) -> RunConfig:
    """Returns the configuration of the run that is certified.

    Its learning rates are constant from the first step on, the highest at most MAX_LR: a higher one lets rounding grow
    from step to step. Adam's eps is at least a hundredth of an element's size where the gradient's norm is 1. Adam
    divides each element by its own size, so without this the rounding of an element that should be zero would decide
    the sign of a whole step; with it, rounding of 1e-6 of an element's usual size moves none by more than 1e-4 of a
    step. Validation data is not read, and no CUDA graph is captured: gradients cannot be read in the middle of a
    replayed step.

    Args:
        config: of the run.
        num_trained: elements of all trained tensors.
    """
    eps = max(config.optim.eps, 1e-2 * num_trained**-0.5)
    highest = max(config.optim.lr, *(config.optim.lr_pattern or {}).values(), 0.0)
    optim = replace(
        config.optim,
        lr=config.optim.lr * min(1.0, MAX_LR / highest),
        eps=eps,
        schedule="constant",
        warmup_steps=0,
        warmup_ratio=None,
        min_lr=0.0,
    )
    memory = replace(config.memory, cuda_graph="none", graph_documents=None)
    return replace(config, optim=optim, memory=memory, data=replace(config.data, validation=None))


def _draw_zero_factors(training: Training, seed: int) -> None:
    """Draws the factors that `initialise_adapters` leaves at zero, from global coordinates like all others."""
    flat = training.optimizer.flat
    for shard in flat.master_shards():
        zero = ".lora_A" if shard.name.startswith("embed_tokens.") else ".lora_B"
        if shard.name.endswith(zero):
            fill_normal(shard, DRAWN_STD, seed)
    flat.publish()


def _pieces_file(folder: Path, rank: int, kind: str, step: int) -> Path:
    return folder / f"rank_{rank:05d}.{kind}_{step:05d}.safetensors"


def _figures_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


def _proof_file(folder: Path) -> Path:
    return folder / "proof.json"


def _write_pieces(path: Path, shards: list[NamedShard]) -> None:
    """Writes one tensor per box of each shard, without padding; the header says which box it is."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = {}
    for name, tensor, spec in shards:
        for box, local_offset in boxes_of(spec):
            key = f"{name}@{len(tensors)}"
            tensors[key] = tensor if box.dim is None else tensor.narrow(box.dim, local_offset, box.length)
            places[key] = name, box.ranges(spec.global_shape)
    declared = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    with SafetensorsWriter(path, declared, {"pieces": json.dumps(places)}) as writer:
        for key, tensor in tensors.items():
            writer.write(key, tensor)


class Difference(NamedTuple):
    """Two ranks that should hold the same numbers and do not.

    Args:
        first, second: the ranks.
        relative: norm of the difference over the norm of the first one's tensor; infinite or NaN where that is.
    """

    first: int
    second: int
    relative: float


class AssembledTensor(NamedTuple):
    """A tensor assembled from the ranks' pieces.

    Args:
        tensor: fp32, global shape; NaN where no rank holds a part.
        is_complete: whether the ranks' pieces cover all of it.
        copies: pieces that other ranks hold too, in whole or in part, counted once per further rank.
        differences: copies whose bits differ from those before them.
    """

    tensor: Tensor
    is_complete: bool
    copies: int
    differences: tuple[Difference, ...]


class _Piece(NamedTuple):
    """A rank's tensor under `key`, and which rows, columns, .. of the whole it is."""

    rank: int
    key: str
    place: tuple[slice, ...]


class Recording:
    """The recording of one layout: the files of its ranks.

    Args:
        folder: of the files.
        num_ranks: of them.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self._opened = ("", -1)
        self._readers: list[SafetensorsReader] = []
        self._held: dict[str, list[_Piece]] = {}

    def figures(self, name: str) -> list[list[float]]:
        """Returns LOSS or NORM of each step, as each rank recorded it."""
        ranks = [
            json.loads(_figures_file(self._folder, rank).read_text(encoding="utf-8"))[name]
            for rank in range(self._num_ranks)
        ]
        return [list(step) for step in zip(*ranks, strict=True)]

    def proof(self) -> RunProof | None:
        """Returns the proof that the layout computes the model; None for a model that has none."""
        file = _proof_file(self._folder)
        return RunProof.of(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def names(self, kind: str, step: int) -> set[str]:
        """Returns the tensors of which some rank holds a part; see `whole`."""
        self._open(kind, step)
        return set(self._held)

    def whole(self, kind: str, step: int, name: str, shape: tuple[int, ...]) -> AssembledTensor:
        """Assembles a tensor from all ranks' pieces.

        Args:
            kind: GRADIENT or PARAMETER.
            step: from 1; parameters are there after step 0, which is before the first one, and after the last.
            name: logical name.
            shape: global.
        """
        self._open(kind, step)
        tensor = torch.full(shape, torch.nan)
        holder = torch.full(shape, -1, dtype=torch.int32)
        copies, differences = 0, []
        for rank, key, place in self._held.get(name, ()):
            values, part, first = self._readers[rank].view(key), tensor[place], holder[place]
            is_copy = first >= 0
            if is_copy.any():
                copies += 1
                if not torch.equal(values[is_copy], part[is_copy]):
                    relative = relative_deviation(values[is_copy], part[is_copy])
                    differences.append(Difference(int(first[is_copy][0]), rank, relative))
            part.copy_(torch.where(is_copy, part, values))
            first.copy_(torch.where(is_copy, first, rank))
        return AssembledTensor(tensor, bool((holder >= 0).all()), copies, tuple(differences))

    def _open(self, kind: str, step: int) -> None:
        """Maps the ranks' files of this moment; those of the previous moment are closed."""
        if self._opened == (kind, step):
            return
        self._opened, self._held = (kind, step), {}
        paths = [_pieces_file(self._folder, rank, kind, step) for rank in range(self._num_ranks)]
        self._readers = [SafetensorsReader(path) for path in paths]
        for rank, path in enumerate(paths):
            with safe_open(path, framework="pt") as file:
                pieces = json.loads(file.metadata()["pieces"])
            for key, (name, ranges) in pieces.items():
                place = tuple(slice(start, stop) for start, stop in ranges)
                self._held.setdefault(name, []).append(_Piece(rank, key, place))


def relative_deviation(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of `expected`, in fp64.

    0 where both are zero, infinite where only `expected` is, NaN where a number of either is not finite.
    """
    difference = float(torch.linalg.vector_norm(found.double() - expected.double()))
    size = float(torch.linalg.vector_norm(expected.double()))
    if size == 0 and not math.isnan(difference):
        return math.inf if difference > 0 else 0.0
    return difference / size if math.isfinite(size) else math.nan


def severity(relative: float) -> tuple[bool, float]:
    """Orders deviations: NaN is worse than any number."""
    return (True, 0.0) if math.isnan(relative) else (False, relative)
