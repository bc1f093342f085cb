"""Opens this rank's part of a model for generation: any checkpoint the engine reads, and an adapter beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from engine.checkpoint.folder import ADAPTER_CONFIG, CONFIG
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.run.step_folders import latest_checkpoint
from engine.checkpoint.run.training_state import open_run
from engine.checkpoint.tokenizer_files import (
    BASES_OWN,
    TrainedTokenizer,
    adapter_template,
    end_tokens,
    trained_tokenizer,
)
from engine.checkpoint.verification import checked_together
from engine.checkpoint.weight_source import WeightSource
from engine.choices import STORED
from engine.config.hub import instead_of
from engine.config.model import DType, ModelOptions
from engine.config.parallel import ParallelOptions
from engine.config.run import RunConfig
from engine.conversion.commands import open_trained
from engine.conversion.live_logits import RoundedFactors
from engine.conversion.lora_scales import Scale
from engine.conversion.merged_model import LORA_A, MergedSource, fully_trained
from engine.conversion.peft_read import AdapterSource
from engine.conversion.proof import Live, live_model
from engine.distributed.mesh import Axis, Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.inference.options import ModelChoice
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.encoded_storage import encoded_entries
from engine.layers.merged_codes import mark_as_base, merge_codes, merging_storages
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder, Part, build_decoder, split_parts
from engine.models.decoder_config import DecoderConfig
from engine.models.dtypes import TORCH_DTYPES
from engine.models.expert_ranks import check_expert_ranks
from engine.models.flops import head_in_layers
from engine.ops.encoded_weight import Formats
from engine.pipeline.partition import LayerWeights, split_layers
from engine.runtime.launch import Launch
from engine.telemetry.format import counted
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.base_encoding import base_encoding, check_base, fill_base
from engine.training.device_choices import attention_blocks, choose_model_kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A model on this rank.

    Args:
        decoder: this rank's part, with weights.
        config: of the whole model.
        mesh: of the ranks.
        folder: of the model, where its tokenizer and generation_config.json are.
        tokenizer: the parts of the adapter's tokenizer that are not the model's own.
        full: modules that were trained in full beside the adapter.
        read_base: reads the base's encoded weights again. Collective.
    """

    decoder: Decoder
    config: DecoderConfig
    mesh: Mesh
    folder: Path
    tokenizer: TrainedTokenizer
    read_base: Callable[[], None]
    full: tuple[str, ...] = ()

    def use_adapters(self, on: bool) -> int:
        """Prepares passes with the adapters or without them: codes have merge-aware ones in them for the former, and
        are the base's, read again, for the latter. Collective.

        Returns:
            The number of linears of this rank whose codes took adapters.
        """
        if on:
            return merge_codes((self.decoder,))
        if any(one.state.in_codes for one in merging_storages((self.decoder,))):
            self.read_base()
            mark_as_base((self.decoder,))
        return 0

    def end_tokens(self, tokenizer_end: int | None) -> frozenset[int]:
        """Returns the tokens that end an answer."""
        return end_tokens(self.folder, tokenizer_end)


def open_for_generation(
    choice: ModelChoice, launch: Launch, log: Log, *, image: str | None = None, adapters: bool = True
) -> OpenedModel:
    """Builds this rank's part of the model and reads its weights. Collective.

    Args:
        image: the option or field that names a prompt's image, for a message; None where prompts are text alone.
        adapters: whether the first passes are with the adapters, see `OpenedModel.use_adapters`.

    Raises:
        UserError: no such model or adapter, an adapter that does not fit the model, a layout that does not fit the
            model, or an image for a model of text alone.
    """
    tensor = choice.tensor_size(launch.world_size)
    source, live, tokenizer, full = live_sources(choice, log)
    source.model.check_tokens()
    if image is not None and not live.config.sees_images:
        raise UserError(
            f"{image} names an image, but the model reads text alone: give a vision-language model, or leave "
            "images out."
        )
    for line in (source.outside_note(), source.encoding_note(decodes=choice.base_dtype != STORED)):
        if line is not None:
            log.info(line)
    dtype_name: DType = choice.dtype or ("bfloat16" if launch.device.type == "cuda" else "float32")
    if live.plan.merge_aware and (line := _other_factors(live.tensors, dtype_name)) is not None:
        log.warning(line)
    options = RunConfig(
        model=ModelOptions(
            path=str(source.model.path), dtype=dtype_name, base_dtype=choice.base_dtype, kernels=choice.kernels
        ),
        parallel=ParallelOptions(tensor=tensor, pipeline=choice.pipeline, expert=choice.expert),
    )
    parallel = options.parallel
    if choice.expert > 1 and not live.config.splits_tokens:
        raise UserError(
            f"--expert is {choice.expert}, but the experts of this {live.config.family} model, whose layers are "
            "transformers' own modules, are cut by the ranks of --tensor alone: leave --expert out."
        )
    check_expert_ranks(live.config, expert=parallel.expert, tensor=tensor, folds=parallel.has_expert_mesh)
    check_base(options, live.config, live.plan, source)
    cuts = options.parallel.shards_experts
    grid = RankGrid(tp=tensor, cp=1, dp=1, pp=choice.pipeline, ep=choice.expert, shards_experts=cuts)
    part_of = _parts(live.config, choice.pipeline)
    mesh = build_mesh(grid, device_type=launch.device.type, num_kv_heads=live.config.num_kv_heads)
    decoder = build_decoder(
        live.config,
        layout=_layout(options, mesh, live.config, launch, log, source.format),
        plan=live.plan,
        device=launch.device,
        dtype=TORCH_DTYPES[dtype_name],
        part=part_of[mesh.pp.rank],
    )
    shards = [entry.shard for entry in shard_entries(decoder)]
    with checked_together([source.checks], mesh.world):
        with Progress(log, "reading weights", sum(shard.tensor.nbytes for shard in shards), "bytes") as progress:
            load_parameters(shards, live.tensors, progress=progress.advance)
        placement = WeightPlacement(Axis("dp_cp"))
        fill_base(options, source.model, live.tensors, (decoder,), placement, log, checkpoint=source)

    def read_base() -> None:
        with checked_together([source.checks], mesh.world):
            fill_base(options, source.model, live.tensors, (decoder,), placement, log, checkpoint=source)

    opened = OpenedModel(
        decoder=decoder,
        config=live.config,
        mesh=mesh,
        folder=source.model.path,
        tokenizer=tokenizer,
        full=full,
        read_base=read_base,
    )
    if adapters and (count := opened.use_adapters(True)):
        log.info(f"merge-aware adapters: {counted(count, 'linear')} of this rank have them in their codes")
    return opened


def live_sources(choice: ModelChoice, log: Log) -> tuple[WeightSource, Live, TrainedTokenizer, tuple[str, ...]]:
    """Opens a model without reading its weights.

    Returns:
        The base, the live model of it and the adapter, the adapter's tokenizer, and the modules trained in full.

    Raises:
        UserError: no such model or adapter, or an adapter that does not fit the model.
    """
    if choice.adapter is None:
        assert choice.path is not None
        _refuse_adapter(choice.path)
        source = open_source(choice.path)
        return source, Live(source.model.decoder, source, TrainingPlan()), BASES_OWN, ()
    source, trained, scale, encoded, tokenizer, factors = _adapter(choice, log)
    # what is stored has the same numbers when it is decoded
    is_same = encoded == STORED and choice.base_dtype is None and factors is None
    if encoded not in (None, choice.base_dtype) and not is_same:
        log.warning(
            f"the adapter was trained beside a base in {encoded}, and --base-dtype is "
            f"{choice.base_dtype or 'not given'}: --base-dtype {encoded} gives the model that was trained"
        )
    merged = MergedSource(source.model, source, trained, scale=scale)
    live = live_model(merged.model.decoder, merged.base, trained, scale)
    if factors is not None and encoded == choice.base_dtype:
        live = live_model(live.config, merged.base, RoundedFactors(trained, factors), scale)
        live = live._replace(plan=replace(live.plan, merge_aware=True))
    full = {name.rpartition(".")[0] for name in fully_trained(trained.tensor_names())}
    if full and choice.base_dtype is not None:  # modules trained in full were not encoded
        live = live._replace(plan=replace(live.plan, trains=full.__contains__))
    return source, live, tokenizer, tuple(sorted(full))


def _other_factors(tensors: TensorReader, dtype_name: DType) -> str | None:
    """Returns a warning where a merge-aware run's factors, as it merged them, are no numbers of this dtype."""
    factors = next(tensors.dtype(name) for name in tensors.tensor_names() if name.endswith(f".{LORA_A}"))
    if torch.promote_types(factors, TORCH_DTYPES[dtype_name]) == TORCH_DTYPES[dtype_name]:
        return None
    trained = str(factors).removeprefix("torch.")
    return (
        f"the merge-aware run merged adapters in {trained}, and --dtype {dtype_name} rounds them first, so that some "
        f"codes are others: --dtype {trained} gives the model that was trained"
    )


def _refuse_adapter(path: Path) -> None:
    """Refuses an adapter or a run where a model is expected."""
    if (path / CONFIG).is_file():
        return
    if (path / ADAPTER_CONFIG).is_file():
        raise UserError(f"--model {path} is a PEFT adapter: give it as --adapter, and its base as --model.")
    if path.is_dir() and latest_checkpoint(path) is not None:
        raise UserError(f"--model {path} is the folder of a run: give it as --adapter.")


class _Adapter(NamedTuple):
    """A trained adapter, with the base and tokenizer that it was trained with.

    Args:
        source: the base.
        trained: values, and `scale` theirs.
        encoded: encoding of the base in training; None where it had none or is not known.
        tokenizer: the one that they were trained with.
        factors: dtype of the factors that the base took before it was rounded to that encoding; None where they stayed
            beside it.
    """

    source: WeightSource
    trained: TensorReader
    scale: Scale
    encoded: str | None
    tokenizer: TrainedTokenizer
    factors: torch.dtype | None = None


def _adapter(choice: ModelChoice, log: Log) -> _Adapter:
    folder = choice.adapter
    assert folder is not None
    if not folder.is_dir():
        advice = instead_of(folder, "give that of a PEFT adapter, or of a run")
        raise UserError(f"--adapter {folder} is not a folder{advice}.")
    if (folder / ADAPTER_CONFIG).is_file():
        if choice.path is None:
            raise UserError(f"--adapter {folder} is a PEFT adapter, which holds no base: give its base with --model.")
        if choice.step is not None:
            raise UserError(f"--step chooses a checkpoint of a run, but {folder} is a PEFT adapter: leave it out.")
        base = open_source(choice.path)
        adapter = AdapterSource(folder, names=base.model.names, decoder=base.model.decoder, with_saved_modules=True)
        return _Adapter(adapter.on(base), adapter, adapter.scale, None, adapter_template(folder))
    checkpoint = open_run(folder, step=choice.step)
    trained = open_trained(checkpoint, choice.path, log, download=choice.download)
    if trained.weights is None:
        raise UserError(
            f"the run in {folder} began with random weights and is no adapter: export it with rankfold convert export "
            "--format hf, and give the result to --model."
        )
    tokenizer = trained_tokenizer(checkpoint.state, checkpoint.folder / MANIFEST)
    encoded = checkpoint.base.get("dtype")
    if checkpoint.base.get("products") == "codes":
        log.info("note: trained with model.base_products codes, whose inputs are rounded; here they are not")
    return _Adapter(trained.weights, trained.values, trained.scale, encoded, tokenizer, trained.merged_factors)


def _layout(
    options: RunConfig, mesh: Mesh, config: DecoderConfig, launch: Launch, log: Log, formats: Formats
) -> TensorLayout:
    """Lays out this rank's tensors; adapters are folded also without sequence parallelism, as nothing trains."""
    attention, sentence = choose_model_kernels(options, launch.device, config, packed=True)
    log.info(sentence)
    return TensorLayout.over(
        mesh,
        joint_reduce=True,
        kernels=attention.kernels,
        attention_blocks=attention_blocks(options, launch.device, config),
        base=base_encoding(options, launch.device, formats),
    )


def _parts(config: DecoderConfig, pipeline: int) -> list[Part]:
    """Returns the part of each pipeline rank.

    Raises:
        UserError: fewer layers than ranks.
    """
    return split_parts(split_layers(config.num_layers, pipeline, LayerWeights(head=head_in_layers(config))))


def storage_bytes(decoder: Decoder, *, each_token: bool = False) -> int:
    """Returns the bytes of the weights on this rank, encoded ones as they are stored.

    Args:
        each_token: only of the weights that every pass reads as a whole: not of an embedding, unless it is the head as
            well.
    """
    parts = (decoder.layers, decoder.norm, decoder.head) if each_token else (decoder,)
    tensors = [parameter for part in parts if part is not None for parameter in part.parameters()]
    if each_token and decoder.head is not None and decoder.config.tied_embeddings:
        tensors.append(decoder.head.operands.weight_OI)
    tensors += [entry.memory for entry in encoded_entries(decoder)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
