"""From a configuration to the objects that train: model, data, optimizer, on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from engine.checkpoint.loading import load_parameters
from engine.checkpoint.peft_read import AdapterSource
from engine.checkpoint.source import ModelFolder, WeightSource, open_model, open_source
from engine.config.rules import data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader, EvalLoader
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.distributed.launch import Launch
from engine.distributed.mesh import Axis, Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.plan import TensorLayout, TrainingPlan
from engine.layers.recompute import MemoryPlan
from engine.layers.rounding import FLOAT8
from engine.layers.sharded_storage import SpreadWeights
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.describe import meta_model
from engine.models.initialise import initialise_adapters, initialise_weights
from engine.models.plain_torch import plain_torch_parts
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.attention_blocks import REFERENCE_BLOCKS, choose_attention_blocks
from engine.ops.backends import choose_kernels
from engine.ops.ulysses_attention import check_context_heads
from engine.ops.varlen_attention import choose_attention
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import choose_backend
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.optim.sharding import Sharding
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.cuda_graph.build import Graphs, build_graphs, check_graphs, graphs_sentence
from engine.training.partition import Partition, plan_partition
from engine.training.plan import training_plan
from engine.training.stage import ModelStage
from engine.training.stages import Stages
from engine.training.step import TrainStep

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED_DTYPES = {None: None, "bfloat16": torch.bfloat16, "float8": FLOAT8}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """What is known of the model before it is built.

    Args:
        model: its description.
        weights: its tensors; None when they are drawn anew.
    """

    model: ModelFolder
    weights: WeightSource | None

    def fingerprint(self) -> str | None:
        """Of the weights; None when there are none."""
        return self.weights.fingerprint() if self.weights is not None else None


def model_source(config: RunConfig) -> ModelSource:
    """Opens `model.path`; reads no weights yet.

    Raises:
        UserError: the folder is not a model the engine knows.
    """
    if config.model.init == "random":
        return ModelSource(model=open_model(config.model.path), weights=None)
    weights = open_source(config.model.path)
    return ModelSource(model=weights.model, weights=weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model ready to train on this rank."""

    source: ModelSource
    plan: TrainingPlan
    partition: Partition
    mesh: Mesh
    parts: tuple[Decoder, ...]
    """The model, or under pipeline parallelism this rank's parts of it."""
    optimizer: FlatAdamW
    stages: Stages
    step: TrainStep
    graphs: Graphs | None = None
    """What the loop calls in place of `step`, where graphs are asked for."""

    def trainable_parameters(self) -> int:
        """Over the whole model, each parameter once."""
        entries = shard_entries(meta_model(self.source.model.decoder, plan=self.plan))
        return sum(prod(entry.spec.global_shape) for entry in entries if entry.sink is not None)


def check_model(config: RunConfig, model: ModelFolder, world_size: int = 1) -> TrainingPlan:
    """What each module of the model does, once it is known that the model fits the layout.

    Raises:
        UserError: a pattern that matches nothing, sizes that do not divide over the ranks, or layers that cannot be
            split into the stages asked for.
    """
    plan = training_plan(config, model.decoder, model.names)
    meta_model(model.decoder, tensor_size=config.parallel.tensor, plan=plan)
    plan_partition(config, model, plan, world_size)
    parallel, decoder = config.parallel, model.decoder
    if parallel.context > 1 and parallel.context_method == "ulysses":
        heads = (decoder.num_heads // parallel.tensor, max(1, decoder.num_kv_heads // parallel.tensor))
        check_context_heads(*heads, parallel.context)
    return plan


def build_training(
    config: RunConfig,
    launch: Launch,
    source: ModelSource,
    plan: TrainingPlan,
    log: Log,
    *,
    documents_per_row: int | None = None,
) -> Training:
    """Model with weights, optimizer and step.

    Collective: every rank calls it. Freshly initialised or loaded; a checkpoint of the run is loaded on top by
    `engine.training.state`.

    Args:
        documents_per_row: most documents in any row of the training data; graphs are sized by it.
    """
    grid = RankGrid(
        tp=config.parallel.tensor,
        cp=config.parallel.context,
        dp=data_parallel_size(config, launch.world_size),
        pp=config.parallel.pipeline,
    )
    decoder = source.model.decoder
    partition = plan_partition(config, source.model, plan, launch.world_size)
    mesh = build_mesh(grid, device_type=launch.device.type, num_kv_heads=decoder.num_kv_heads)
    backend, choice = choose_backend(config.optim.backend, device=launch.device)  # refused before a weight is read
    layout = _layout(config, launch, mesh, partition, decoder, log)
    log.info(choice)
    weights = SpreadWeights(mesh.dp_cp if config.parallel.shard == "parameters" else Axis("dp_cp"))
    stages = _build_stages(config, launch, decoder, plan, partition, layout, mesh, weights)
    entries = stages.entries()
    flat = FlatParameters(entries, launch.device, sharding=_sharding(config, mesh, weights, log))
    _fill(config, source, plan, entries, flat, weights, log)
    optimizer = FlatAdamW(
        flat,
        mesh,
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        clip_grad_norm=config.optim.clip_grad_norm,
        backend=backend,
    )
    reducer = GradientReducer(flat, mesh, bucket_bytes=_bucket_bytes(config))
    step = TrainStep(stages, reducer, optimizer, mesh)
    graphs = build_graphs(
        config,
        step,
        stages,
        device=launch.device,
        num_microbatches=gradient_accumulation_steps(config, launch.world_size),
        data_ranks=mesh.dp_cp.size,
        most_documents=documents_per_row,
    )
    if graphs is not None:
        log.info(graphs_sentence(graphs))
    return Training(
        source=source,
        plan=plan,
        partition=partition,
        mesh=mesh,
        parts=stages.models(),
        optimizer=optimizer,
        stages=stages,
        step=step,
        graphs=graphs,
    )


def _bucket_bytes(config: RunConfig) -> int:
    return int(config.parallel.bucket_mb * 2**20)


def _sharding(config: RunConfig, mesh: Mesh, weights: SpreadWeights, log: Log) -> Sharding:
    """What of the optimizer is spread over ranks; said in the log."""
    sharding = Sharding(
        level=config.parallel.shard,
        axis=mesh.dp_cp,
        bucket_elements=max(1, _bucket_bytes(config) // 4),
        weights=weights,
    )
    if (sentence := sharding.sentence()) is not None:
        log.info(sentence)
    return sharding


def _layout(
    config: RunConfig, launch: Launch, mesh: Mesh, partition: Partition, decoder: DecoderConfig, log: Log
) -> TensorLayout:
    """How this rank's tensors lie, and the arithmetic behind the layers."""
    dtype = DTYPES[config.model.dtype]
    kernels, choice = choose_kernels(config.model.kernels, device=launch.device, dtype=dtype)
    log.info(choice)
    attention = choose_attention(
        kernels, device=launch.device, dtype=dtype, head_dim=decoder.head_dim, packed=config.data.packing
    )
    check_graphs(config, launch.device, attention, decoder)
    log.info(attention.sentence)
    if (sentence := plain_torch_parts(decoder)) is not None:
        log.warning(sentence)
    blocks = REFERENCE_BLOCKS
    if mesh.cp.size > 1:
        blocks = choose_attention_blocks("auto", device=launch.device, dtype=dtype, head_dim=decoder.head_dim)
        log.info(f"context parallelism: {config.parallel.context_method} attention, blocks by {blocks.name}")
    # in a V the first and the last stage are on one rank and share one tensor
    ends_meet = partition.stage_rank[0] == partition.stage_rank[-1]
    return TensorLayout(
        tp=mesh.tp,
        kv_replica=mesh.kv_replica,
        pp_ends=Axis("pp_ends") if ends_meet else mesh.pp_ends,
        sequence_parallel=config.parallel.sequence_parallel,
        joint_reduce=config.parallel.lora_reduce == "joint",
        kernels=attention.kernels,
        cp=mesh.cp,
        context_method=config.parallel.context_method,
        attention_blocks=blocks,
    )


def _build_stages(
    config: RunConfig, launch: Launch, decoder: DecoderConfig, plan: TrainingPlan, partition: Partition,
    layout: TensorLayout, mesh: Mesh, weights: SpreadWeights,
) -> Stages:  # fmt: skip
    """This rank's parts of the model, still empty, as stages."""
    first_trained = partition.choice.first_trainable_stage
    step = torch.zeros((), dtype=torch.int64, device=launch.device)
    memory = MemoryPlan(
        recompute=config.memory.recompute,
        recompute_layers=config.memory.recompute_layers,
        offload=config.memory.offload_activations,
        stored_dtype=STORED_DTYPES[config.memory.activation_dtype],
    )
    stages: dict[int, ModelStage] = {}
    embedding_weight = None
    for number, part in partition.parts(mesh.pp.rank).items():
        model = Decoder(
            decoder, layout=layout, plan=plan, device=launch.device, dtype=DTYPES[config.model.dtype], part=part,
            embedding_weight=embedding_weight, memory=memory, weights=weights,
        )  # fmt: skip
        if model.embedding is not None:
            embedding_weight = model.embedding.weight
        stages[number] = ModelStage(
            model,
            LanguageModeling(),
            launch.device,
            trains=number >= first_trained,
            gives_gradient=number > first_trained,
            step=step,
        )
    return Stages(stages, mesh.pp, partition.choice)


def _fill(
    config: RunConfig,
    source: ModelSource,
    plan: TrainingPlan,
    entries: list[ShardEntry],
    flat: FlatParameters,
    weights: SpreadWeights,
    log: Log,
) -> None:
    """Weights from the checkpoint (or drawn), adapters fresh or from PEFT. Trained tensors are filled in their fp32
    masters, so that nothing is rounded to the compute dtype on the way."""
    masters = flat.master_shards()
    frozen = [part for entry in entries if entry.sink is None for part in weights.parts(entry)]
    base = frozen + [shard for shard in masters if not shard.name.endswith((".lora_A", ".lora_B"))]
    adapters = [shard for shard in masters if shard.name.endswith((".lora_A", ".lora_B"))]
    if source.weights is None:
        std = float(source.model.hf_config.get("initializer_range", 0.02))
        initialise_weights(base, config.train.seed, std, norm=1.0 - source.model.decoder.norm_offset)
    else:
        total = sum(shard.tensor.nbytes for shard in base)
        with Progress(log, "reading weights", total, "bytes") as progress:
            load_parameters(base, source.weights, progress=progress.advance)
    if config.lora.rank > 0:
        if config.lora.init_from is None:
            initialise_adapters(adapters, config.train.seed)
        else:
            load_parameters(adapters, _adapter_source(config, source.model, plan))
    flat.publish()


def _adapter_source(config: RunConfig, model: ModelFolder, plan: TrainingPlan) -> AdapterSource:
    """The PEFT adapter of `lora.init_from`, found to be what this run would train."""
    lora = config.lora
    assert lora.init_from is not None
    source = AdapterSource(lora.init_from, names=model.names, decoder=model.decoder, fused_qkv=lora.fused_qkv)
    names = [entry.name for entry in shard_entries(meta_model(model.decoder, plan=plan))]
    modules = {name.rpartition(".")[0] for name in names if name.endswith(".lora_A")}
    source.require_matching(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, modules=modules)
    return source


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Training and validation rows of this rank."""

    tokenizer: Tokenizer
    train: DataLoader
    validation: EvalLoader | None


def build_data(config: RunConfig, launch: Launch, decoder: DecoderConfig, log: Log) -> RunData:
    """Reads, tokenises and arranges the data. Needs no process group, so that bad input is refused early.

    Raises:
        UserError: a record or tokenizer that cannot be used.
    """
    tokenizer = load_tokenizer(config.data.tokenizer or config.model.path)
    if tokenizer.vocab_size > decoder.vocab_size:
        log.warning(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {decoder.vocab_size}: tokens beyond the "
            "model's vocabulary will be refused."
        )
    data_size = data_parallel_size(config, launch.world_size)
    # tensor-parallel neighbours are neighbouring ranks and share a data rank
    tensor, context = config.parallel.tensor, config.parallel.context
    data_rank = launch.rank // (tensor * context) % data_size
    assert config.data.train is not None
    train = _dataset(config, config.data.train, tokenizer, decoder, log, "training")
    common = {
        "seq_length": config.data.seq_length,
        "micro_batch_size": config.train.micro_batch_size,
        "data_rank": data_rank,
        "data_size": data_size,
        "pad_multiple": tensor * (2 * context if context > 1 else 1) if config.parallel.sequence_parallel else 1,
        "context_rank": launch.rank // tensor % context,
        "context_size": context,
    }
    loader = DataLoader(
        train,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        num_workers=config.data.num_workers,
        pin_memory=launch.device.type == "cuda",
        **common,
    )
    validation = None
    if config.data.validation is not None:
        rows = _dataset(config, config.data.validation, tokenizer, decoder, log, "validation")
        validation = EvalLoader(rows, max_samples=config.train.eval_samples, **common)
    return RunData(tokenizer=tokenizer, train=loader, validation=validation)


def _dataset(
    config: RunConfig, path: str, tokenizer: Tokenizer, decoder: DecoderConfig, log: Log, what: str
) -> TokenDataset:
    with Progress(log, f"reading {what} data", None, "records") as progress:
        done = 0

        def advance(count: int, total: int) -> None:
            nonlocal done
            progress.advance(count - done)
            done = count

        dataset = TokenDataset.build(
            path,
            tokenizer=tokenizer,
            data_format=config.data.format,
            seq_length=config.data.seq_length,
            packing=config.data.packing,
            overlong=config.data.overlong,
            mask_prompt=config.data.mask_prompt,
            progress=advance,
        )
    if dataset.max_token >= decoder.vocab_size:
        raise UserError(
            f"{path} has token id {dataset.max_token}, but the model's vocabulary has {decoder.vocab_size} entries: "
            "set data.tokenizer to the tokenizer this model was trained with."
        )
    log.info(f"{what} data: {dataset.report.summary()}")
    return dataset
