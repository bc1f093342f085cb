"""A layout of ranks, the workload that is trained under it, and the completions that it may sample first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from engine.branches import Parents
from engine.choices import STORED, EntropyUse
from engine.config.parallel import ParallelOptions
from engine.config.rollout import RolloutOptions
from engine.data.row_shape import evened, round_up
from engine.layers.context import TrainingPlan
from engine.models.decoder_config import DecoderConfig
from engine.ops.encoded_weight import Formats
from engine.planning.shared_rows import AlikeDocuments, SharedRows

if TYPE_CHECKING:
    from engine.planning.machine import Machine

Routing = Literal["balanced", "worst"]
"""How tokens choose among experts that are divided over ranks; see engine.planning.traced_batch.expert_rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks of each axis, and how they work together.

    Args:
        parallel: as in a run's configuration.
        data: data-parallel ranks, which follow from the number of ranks there.
    """

    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.parallel.model_parallel_size * self.data

    @property
    def data_and_context(self) -> int:
        """The number of ranks that sum gradients."""
        return self.data * self.parallel.context

    @property
    def copies(self) -> dict[str, int]:
        """The number of ranks that hold copies of parameters for different tokens, by the name that `ShardSpec.data`
        has for them: of experts that are spread over other ranks than the rest "edp"."""
        parallel, ranks = self.parallel, self.data_and_context
        whole = ranks if parallel.shards_experts else ranks * parallel.tensor
        return {"dp_cp": ranks, "edp": whole // parallel.expert if parallel.has_expert_mesh else 1}

    def label(self) -> str:
        """Returns a label such as "tensor 2, pipeline 4x2, data 1"."""
        parallel = self.parallel
        parts = [f"tensor {parallel.tensor}" + ("" if parallel.sequence is not False else " without sequence")]
        if parallel.pipeline > 1:
            parts.append(f"pipeline {parallel.pipeline}" + (f"x{parallel.virtual}" if parallel.virtual else ""))
        if parallel.context > 1:
            parts.append(f"context {parallel.context}")
        parts.append(f"data {self.data}")
        if parallel.has_expert_mesh:
            parts.append(f"expert {parallel.expert}")
        if parallel.has_expert_mesh and parallel.tensor > 1:
            parts.append("experts cut" if parallel.shards_experts else "experts whole")
        if parallel.shard != "none":
            parts.append(f"shard {parallel.shard}")
        return ", ".join(parts)


class Neighbour(NamedTuple):
    """The memory that processes of the run which are no ranks hold on a device.

    Args:
        gpu: its number; None for host memory.
        nbytes: of it.
        copies: processes that each hold a part of it.
    """

    gpu: int | None
    nbytes: int
    copies: int

    def on_rank(self, layout: Layout, pipeline_rank: int) -> int:
        """Returns the bytes on the GPUs of a pipeline rank: those of the first GPU are on the first one, and others
        count on each."""
        if self.gpu is None or self.gpu >= layout.world_size or (self.gpu == 0 and pipeline_rank > 0):
            return 0
        return self.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The completions that a step trains on, which are sampled first.

    Args:
        predictor: "module:NAME" of what predicts their memory and time, a `SamplesPredictor`.
        options: how they are sampled.
        prompt, completion: tokens of each prompt, and of each completion.
        batch: completions that are sampled together, over all ranks.
        steps: optimizer steps that are taken on them.
        compared: whether their log-probabilities are computed once more before the first of these.
        entropies: what training takes of the entropies of their tokens.
        moves_reference: whether another copy of the masters is the reference.
        seed: of the sampling.
        neighbour: what other processes of the run hold on one of the GPUs; None for nothing.
    """

    predictor: str
    options: RolloutOptions
    prompt: int
    completion: int
    batch: int
    steps: int = 1
    compared: bool = False
    entropies: EntropyUse = "none"
    moves_reference: bool = False
    seed: int = 0
    neighbour: Neighbour | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a prompt with its completion."""
        return self.prompt + self.completion


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesCost:
    """What sampling a batch of completions takes on one rank.

    Args:
        cache: bytes of the key/value cache.
        peak: bytes while completions are sampled, beside what is always there.
        prefill, decode: seconds of the prompts, and of the completions' tokens.
        passes: that decode, each of a token for every slot.
        pass_seconds: of one of them.
        launches: of one of them.
        nbytes: that these read and write.
        choice_launches, choice_bytes: of that, the choice of the tokens behind the head's product, with its random
            numbers, and their log-probabilities.
        graphed: whether these are replayed as CUDA graphs.
        host_limits: whether launching takes longer than computing.
        turns: of each completion.
        result_tokens: tokens of the results between two turns.
        between: seconds of the passes of these.
        merging: seconds in which merge-aware adapters are put into codes before the first pass.
    """

    cache: int
    peak: int
    prefill: float
    decode: float
    passes: int
    pass_seconds: float
    launches: int
    graphed: bool
    host_limits: bool
    turns: int = 1
    result_tokens: int = 0
    between: float = 0.0
    merging: float = 0.0
    nbytes: int = 0
    choice_launches: int = 0
    choice_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode + self.between + self.merging


class Companion(NamedTuple):
    """A frozen model that lies beside the trained one, in the same layout and dtypes.

    Args:
        decoder: its sizes.
        plan: its adapters.
    """

    decoder: DecoderConfig
    plan: TrainingPlan


class SamplesPredictor(Protocol):
    """Predicts what sampling takes on a rank; `Samples.predictor` names one."""

    def __call__(self, workload: Workload, layout: Layout, machine: Machine | None) -> SamplesCost:
        """Returns the cost.

        Args:
            workload: with its samples.
            layout: of the ranks.
            machine: whose speeds count; None where only memory is asked for.
        """
        ...


@lru_cache
def _everywhere(base_dtype: str | None) -> Callable[[str], str | None] | None:
    """Returns one function for each name, so that what is made for it is found again."""
    return None if base_dtype is None else lambda weight_name: base_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The parts of a run that do not depend on the layout.

    Args:
        decoder: of the model.
        plan: trained modules, and the adapters.
        dtype: of weights and activations.
        micro_batch: rows of a micro-batch.
        global_batch: rows of a step, over all ranks.
        seq_length: tokens of a row.
        tiles: (rows, columns) in patches of each tile of a micro-batch, where the model has a vision model.
        longest_document: tokens of the longest document of a row; 0 where one fills the row.
        answers: of a micro-batch, where the objective compares answers; else 0.
        refers_to_base: each step goes through the model without adapters first, for the objective to compare with.
        balances: the routers' auxiliary loss is trained on beside the objective's.
        base_dtype: how frozen weights of the layers are stored; None for `dtype`.
        rounds_inputs: whether linears multiply codes, where their format has such products.
        stored: where that is "stored": name of a weight -> its format in the checkpoint, None for `dtype`.
        device_type: "cuda" or "cpu".
        beside: frozen parameters of other parts than the decoder, in `dtype`; their computation is not counted.
        kernels: the backend of the ops, see engine.ops.kernels.
        polls_sends: whether completed sends can be found without waiting; see engine.planning.pipeline_parts.
        square_sum_writes: whether the gradient's norm writes the squares of a region, as plain torch does.
        offload_weights: whether frozen weights are kept in host memory.
        offload_optimizer: whether masters and moments do.
        routing: how tokens choose among experts that are divided over ranks.
        packed: whether rows may hold several documents even where one fills a row, which chooses the kernel of
            attention.
        samples: of an objective that samples what it trains on; None where data are given.
        companions: frozen models beside the trained one, each of which goes through the rows once.
        base_teachers: how many times the model without its adapters does, as a companion would.
        teaches_each_step: whether they do so in each step, and not once for a batch of completions.
        block_losses: fp32 copies of a block of logits that the loss of whole distributions makes; 0 for that of labels.
        keeps_outputs: whether the companions' last outputs are kept for all micro-batches of a step.
        graphed: whether micro-batches are replayed as CUDA graphs, which costs the host no time.
        tenants: runs on one base that share a micro-batch, each with adapters like those of the plan; 0 where the
            model is one run's own.
        alike: documents of which rows compute beginnings once, as far as a layout's ranks allow; None for none, and
            in the workload of a layout (`on`), which has its rows.
        tree: lengths and parents of the documents of each row, where some continue others; see `engine.branches`.
        trained_tokens: of a step, each document with its beginning, where they are not those of its rows; else 0.
    """

    decoder: DecoderConfig
    plan: TrainingPlan
    dtype: torch.dtype
    micro_batch: int
    global_batch: int
    seq_length: int
    kernels: str
    tiles: tuple[tuple[int, ...], ...] = ()
    longest_document: int = 0
    answers: int = 0
    refers_to_base: bool = False
    balances: bool = False
    base_dtype: str | None = None
    rounds_inputs: bool = False
    stored: Formats | None = None
    device_type: str = "cuda"
    beside: int = 0
    polls_sends: bool = True
    square_sum_writes: bool = True
    offload_weights: bool = False
    offload_optimizer: bool = False
    routing: Routing = "balanced"
    packed: bool = False
    samples: Samples | None = None
    companions: tuple[Companion, ...] = ()
    base_teachers: int = 0
    teaches_each_step: bool = False
    block_losses: int = 0
    keeps_outputs: bool = False
    graphed: bool = False
    tenants: int = 0
    alike: AlikeDocuments | None = None
    tree: tuple[tuple[int, ...], Parents] = ((), ())
    trained_tokens: int = 0

    @property
    def formats(self) -> Formats | None:
        """Name of a weight -> how it is stored where it does not train; None where all have `dtype`."""
        return self.stored if self.base_dtype == STORED else _everywhere(self.base_dtype)

    @property
    def merges_once(self) -> bool:
        """Whether completions are sampled from codes that were merged before their first pass."""
        samples = self.samples
        return (
            samples is not None
            and samples.options.server is None
            and samples.options.merge_once
            and self.plan.merge_aware
        )

    def shared_rows(self, layout: Layout) -> SharedRows | None:
        """Returns the rows that compute beginnings once under a layout; None where none do."""
        return None if self.alike is None else self.alike.rows(layout.data)

    def on(self, layout: Layout) -> Workload:
        """Returns the workload with the rows that it has under a layout."""
        rows, parallel = self.shared_rows(layout), layout.parallel
        if rows is None:
            return self
        assert self.alike is not None
        return replace(
            self,
            alike=None,
            micro_batch=evened(self.micro_batch, rows.count, layout.data),
            global_batch=rows.count,
            seq_length=round_up(rows.length, parallel.tensor * (2 * parallel.context if parallel.context > 1 else 1)),
            longest_document=self.alike.common + self.alike.own,
            packed=True,
            tree=(rows.lengths, rows.parents),
            trained_tokens=rows.alone,
        )

    @property
    def document_length(self) -> int:
        """Tokens of the longest document."""
        return self.longest_document or self.seq_length

    @property
    def packs_documents(self) -> bool:
        """Whether rows may hold several documents."""
        return self.packed or self.document_length < self.seq_length

    def of_companion(self, companion: Companion) -> Workload:
        """Returns the work of one of the companions on the same rows."""
        return replace(
            self,
            decoder=companion.decoder,
            plan=companion.plan,
            beside=0,
            samples=None,
            companions=(),
            base_teachers=0,
            block_losses=0,
            keeps_outputs=False,
            rounds_inputs=False,
            refers_to_base=False,
            balances=False,
            graphed=False,
        )

    def num_microbatches(self, layout: Layout) -> int:
        """Micro-batches of each rank in a step; the last may be filled up where completions were packed."""
        return -(-self.global_batch // (self.micro_batch * layout.data))

    @property
    def step_tokens(self) -> int:
        """Tokens that a step trains on, over all ranks."""
        if self.samples is None:
            return self.trained_tokens or self.global_batch * self.seq_length
        return self.samples.batch * self.samples.tokens * self.iterations // self.samples.steps

    @property
    def iterations(self) -> int:
        """Passes over each batch of completions."""
        return 1 if self.samples is None else self.samples.steps // self.samples.options.steps_per_generation
