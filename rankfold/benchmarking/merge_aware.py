"""Section `merge-aware`: the share of what adapters gained that is left when they are merged into a base in few bits.

A trained model is stored in a format, and adapters are trained on text of another kind, with lora.merge_aware and
without, from the same factors on the same batches. The gain is what the evaluation loss fell by. Plain adapters are
then merged in two ways: by the rule of merge-aware training, which keeps the scale of a block as long as it can, and
with the scales that the merged weights would be given alone, as other tools do. A merge-aware model is its own merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

from engine.batch import Batch
from engine.checkpoint.loading import load_encoded, load_parameters
from engine.checkpoint.model_weights import open_source
from engine.data.tokenizer import load_tokenizer
from engine.distributed.mesh import Axis, single_process_mesh
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import encoded_entries
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder, build_decoder
from engine.models.initialise import initialise_adapters
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.backends import choose_kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.base_encoding import named_encoding
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.model import ADAMW, CLIP_GRAD_NORM, packed_batch
from rankfold.benchmarking.sections import MergeAwareOptions
from rankfold.benchmarking.table import Table, progress

CPU = torch.device("cpu")
_BUCKET_BYTES = 32 * 2**20
_COLUMNS = (
    "base", "loss of the base", "loss with adapters", "left: plain, merged with new scales", "left: plain, merged",
    "left: merge-aware",
)  # fmt: skip


class _Study:
    """The data and the stored model of one measurement."""

    def __init__(self, options: MergeAwareOptions) -> None:
        self._options, self._source = options, open_source(Path(options.model))
        self._kernels, self.sentence = choose_kernels(options.kernels, device=CPU, dtype=torch.float32)
        text = Path(options.data).read_text(encoding="utf-8")
        ids = torch.tensor(load_tokenizer(Path(options.model)).encode(text[: options.characters]))
        width = options.rows * options.length
        batches = list(ids[: len(ids) // width * width].view(-1, options.rows, options.length))
        self.held, self.train = batches[: options.held], batches[options.held :]

    def model(self, base: str, seed: int, *, merges: bool, adapters: bool = True) -> Decoder:
        """Returns the model with a base in the format, and fresh adapters."""
        options = self._options
        settings = AdapterSettings(rank=options.rank, scale=options.alpha / options.rank, dropout=0.0)
        plan = TrainingPlan(
            adapter=lambda module: settings if adapters and module.endswith("_proj") else None,
            merge_aware=merges,
            seed=seed,
        )
        layout = TensorLayout(kernels=self._kernels, base=named_encoding(base, options.kernels, CPU))
        model = build_decoder(self._source.model.decoder, layout=layout, plan=plan, device=CPU, dtype=torch.float32)
        load_parameters([one.shard for one in shard_entries(model) if one.sink is None], self._source)
        place = WeightPlacement(Axis("dp_cp"))
        load_encoded(encoded_entries(model), self._source, holding=place.materialize)
        return model

    def trained(self, model: Decoder, seed: int) -> None:
        """Trains the adapters, on batches in the seed's order."""
        options, mesh = self._options, single_process_mesh()
        flat = FlatParameters(list(shard_entries(model)), CPU)
        initialise_adapters(flat.master_shards(), seed)
        flat.publish()
        optimizer = FlatAdamW(flat, mesh, **ADAMW, clip_grad_norm=CLIP_GRAD_NORM)
        stages = Stages.whole(ModelStage(model, LanguageModeling(), CPU))
        step = TrainStep(stages, GradientReducer(flat, mesh, bucket_bytes=_BUCKET_BYTES), optimizer, mesh)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        for number in range(options.steps):
            ids = self.train[int(order[number % len(order)])]
            rate = options.lr * min(1.0, (number + 1) / options.warmup, 2 * (1 - number / options.steps))
            step([self._batch(ids)], float(options.rows * (options.length - 1)), rate)
        flat.publish()
        flat.finish_publish()

    def loss(self, model: Decoder) -> float:
        """Returns the mean loss of the held-out tokens."""
        found = 0.0
        for ids in self.held:
            batch = self._batch(ids)
            with torch.no_grad():
                losses = model(batch, torch.zeros((), dtype=torch.int64), training=False)
            found += float(LanguageModeling().loss_sum(losses, batch) / batch.loss_weights_BS.sum())
        return found / len(self.held)

    def _batch(self, ids_BS: Tensor) -> Batch:
        return packed_batch(ids_BS, [ids_BS.shape[1]] * ids_BS.shape[0])


def _copied(source: Decoder, target: Decoder) -> Decoder:
    """Gives the target the adapters of the source; returns it."""
    values = {entry.name: entry.parameter.data for entry in shard_entries(source)}
    for entry in shard_entries(target):
        entry.parameter.data.copy_(values[entry.name])
    return target


def _encoded_anew(source: Decoder, target: Decoder, scale: float) -> Decoder:
    """Encodes the source's merged weights in the target, which has no adapters, by their own scales; returns it."""
    factors = {entry.name: entry.parameter.data for entry in shard_entries(source)}
    for before, after in zip(encoded_entries(source), encoded_entries(target), strict=True):
        a, b = (factors[f"{before.name.removesuffix('.weight')}.lora_{leaf}"] for leaf in "AB")
        after.encode(before.decoded(torch.float32) + scale * (b @ a))
    return target


def _of_seed(study: _Study, base: str, seed: int, scale: float) -> dict[str, float]:
    """Returns the losses of one seed."""
    bare = study.model(base, seed, merges=False, adapters=False)
    found = {"base": study.loss(bare)}
    plain = study.model(base, seed, merges=False)
    study.trained(plain, seed)
    found["plain"] = study.loss(plain)
    found["plain, merged"] = study.loss(_copied(plain, study.model(base, seed, merges=True)))
    found["plain, merged with new scales"] = study.loss(_encoded_anew(plain, bare, scale))
    aware = study.model(base, seed, merges=True)
    study.trained(aware, seed)
    found["merge-aware"] = study.loss(aware)
    return found


def _left(losses: Sequence[dict[str, float]], name: str) -> list[float]:
    return [(one["base"] - one[name]) / (one["base"] - one["plain"]) for one in losses]


def _spread(values: Sequence[float], form: str) -> str:
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def run(options: MergeAwareOptions) -> Table:
    """Trains and merges for every format and seed.

    Raises:
        UserError: there is no such model, or the text is too short.
    """
    set_up(options, keeps_freed_memory=False)
    study = _Study(options)
    rows, data = [], {}
    for base in options.format_names():
        losses = []
        for seed in range(options.seeds):
            losses.append(_of_seed(study, base, seed, options.alpha / options.rank))
            progress("merge-aware", f"{base}, seed {seed + 1} of {options.seeds}")
        data[base] = losses
        kept = [_left(losses, name) for name in ("plain, merged with new scales", "plain, merged", "merge-aware")]
        rows.append(
            (
                base,
                _spread([one["base"] for one in losses], ".4f"),
                _spread([one["plain"] for one in losses], ".4f"),
                *(_spread(values, ".2f") for values in kept),
            )
        )
    return Table(
        title=f"The share of the gain that is left after merging: rank {options.rank}, alpha {options.alpha:g}, "
        f"{options.steps} steps of {options.rows}x{options.length} tokens, {options.seeds} seeds",
        columns=_COLUMNS,
        rows=tuple(rows),
        findings=(
            "A share is what the loss of held-out text fell by from the base's, over what it fell by with plain "
            "adapters beside the base; mean and standard deviation over the seeds.",
            f"The engine's {study.sentence}.",
        ),
        machine=describe(CPU, ("transformers",)),
        data={"section": "merge-aware", "options": asdict(options), "losses": data},
    )
