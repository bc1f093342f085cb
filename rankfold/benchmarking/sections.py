"""The sections by name, and the options of those that measure one capability each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from engine.choices import MERGED_DTYPES
from engine.config.model import KERNELS
from engine.errors import UserError
from rankfold.benchmarking.options import (
    DEVICES,
    DTYPES,
    ExpertsOptions,
    KernelOptions,
    MemoryOptions,
    ModelOptions,
    SectionOptions,
    StepOptions,
    TaxOptions,
    by_device,
    check_documents,
    chosen_names,
    option,
    whole_numbers,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedOptions(SectionOptions):
    """The speeds of this machine that all other figures are held against: memory, products, and launches."""

    copy_mib: int | None = by_device(128, 4096, "MiB of the copy", least=1)
    size: int | None = by_device(2048, 8192, "rows and columns of the square products", least=1)
    repeats: int = option(15, "timed runs of each", least=1)
    warmup: int = option(3, "untimed runs of each before", least=0)
    device: str = option("auto", "auto takes a GPU where there is one", DEVICES)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOptions(ModelOptions):
    """A step replayed as CUDA graphs against the same step without, on packed rows."""

    PEERS: ClassVar[tuple[str, ...]] = ()

    rows: int = option(1, "rows in a micro-batch", least=1)
    dtype: str = option("bfloat16", "of weights and activations; no graph is captured in float32", DTYPES)
    lengths: str = option("512,1024,2048,4096", "tokens in a row, one measurement for each; --length is not read")
    documents: int = option(8, "documents in a row", least=1)
    accumulation: int = option(1, "micro-batches in a step", least=1)
    repeats: int = option(20, "timed steps of each", least=1)
    warmup: int = option(2, "untimed steps of each, after those that check the losses")

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        if min(self.row_lengths()) < 2 * self.documents:
            raise UserError(
                f"--lengths {self.lengths} leaves documents of less than 2 tokens with --documents {self.documents}: "
                "give longer rows or fewer documents."
            )

    def row_lengths(self) -> tuple[int, ...]:
        """Returns the row lengths, one for each measurement."""
        return whole_numbers("lengths", self.lengths, "512,1024")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions(SectionOptions):
    """Tokenising a file of records into a store beside plain loops over the same tokenizer."""

    records: str = option("", "JSONL or JSON file of records with texts; it is repeated up to --mb")
    tokenizer: str = option("", "folder of a fast tokenizer")
    mb: int = option(64, "megabytes of records", least=1)
    repeats: int = option(3, "timed calls of each", least=1)

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        for name in ("records", "tokenizer"):
            if not Path(getattr(self, name)).exists() or not getattr(self, name):
                raise UserError(f"--{name} is {getattr(self, name)!r}, which does not exist: give a path.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions(SectionOptions):
    """Import, reshard, export and merge of a synthetic checkpoint beside cp, and a kill halfway.

    The disk needs room for four times the checkpoint.
    """

    gb: float = option(8.0, "GB of the checkpoint, about")
    hidden: int = option(4096, "width of the residual stream; a multiple of 512", least=1)
    intermediate: int = option(11008, "width of the MLP", least=1)
    vocab: int = option(32000, "vocabulary size", least=1)
    rank: int = option(16, "rank of the adapter that is merged", least=1)
    folder: str = option("", "folder to work in; the temporary one where empty")

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        if self.hidden % 512:
            raise UserError(f"--hidden is {self.hidden}: give a multiple of 512, heads are 128 wide and 4 to a key.")
        if self.gb <= 0:
            raise UserError(f"--gb is {self.gb}: give more than 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardsOptions(ModelOptions):
    """The cost of a run's guards, on data-parallel ranks that hold copies of each other's parameters.

    On CPU ranks of this machine, one process each.
    """

    PEERS: ClassVar[tuple[str, ...]] = ()

    documents: int = option(4, "documents in a row", least=1)
    ranks: int = option(2, "processes, which share the machine's cores", least=2)
    repeats: int = option(30, "timed runs of each work", least=1)
    warmup: int = option(3, "untimed runs of each work before", least=0)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        check_documents(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions(ModelOptions):
    """The cost to training of saving a checkpoint: waiting for the disk, and writing beside the steps.

    The checkpoint is opened again and compared with the parameters of that moment.
    """

    PEERS: ClassVar[tuple[str, ...]] = ()

    repeats: int = option(9, "saves of each kind", least=1)
    steps: int = option(3, "steps after each save, and in each turn without one", least=1)
    folder: str = option("", "where checkpoints are written; empty for a temporary folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(ModelOptions):
    """Greedy generation against transformers' generate, from one folder of random weights."""

    PEERS: ClassVar[tuple[str, ...]] = ()

    prompt: int = option(128, "tokens of a prompt; --length and --rows are not read", least=4)
    new: int = option(32, "tokens that each row is continued by", least=2)
    batches: str = option("1,4,16", "rows at a time, one measurement for each")
    repeats: int = option(5, "timed turns", least=1)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        self.row_counts()

    def row_counts(self) -> tuple[int, ...]:
        """Returns the numbers of rows, one for each measurement."""
        return whole_numbers("batches", self.batches, "1,4,16", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions(ModelOptions):
    """Sampled tokens with passes replayed as CUDA graphs against passes without, on a model with adapters."""

    PEERS: ClassVar[tuple[str, ...]] = ()

    prompt: int = option(256, "tokens of a prompt; --length, --rows and --documents are not read", least=1)
    new: int = option(128, "tokens that each row is continued by", least=2)
    batches: str = option("1,16,64", "rows at a time, one measurement for each")
    repeats: int = option(5, "timed turns", least=1)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        self.row_counts()

    def row_counts(self) -> tuple[int, ...]:
        """Returns the numbers of rows, one for each measurement."""
        return whole_numbers("batches", self.batches, "1,16,64", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutsOptions(ModelOptions):
    """Sampled completions of groups with an adapter, against generate of transformers + PEFT."""

    PEERS: ClassVar[tuple[str, ...]] = ()

    prompts: int = option(16, "prompts", least=1)
    prompt: int = option(128, "tokens of the longest prompt; the shortest has a quarter", least=4)
    group: int = option(8, "completions of each prompt", least=1)
    new: int = option(64, "tokens of a completion", least=2)
    repeats: int = option(5, "timed turns", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsOptions(ModelOptions):
    """Steps of GRPO whose model calls tools of an environment, against TRL's GRPOTrainer with PEFT."""

    PEERS: ClassVar[tuple[str, ...]] = ("trl",)

    prompts: int = option(8, "prompts of a step", least=1)
    prompt: int = option(32, "tokens of a prompt", least=8)
    group: int = option(8, "conversations of each prompt", least=2)
    new: int = option(256, "tokens of a conversation, with all its turns, at most", least=8)
    turns: int = option(4, "turns of the model in a conversation, at most", least=1)
    workers: int = option(0, "processes of environments, of the engine; 0 for one of each conversation", least=0)
    micro_batch: int = option(4, "rows of a micro-batch of the engine, which packs conversations into rows", least=1)
    micro_batch_of_peer: int = option(0, "conversations of a micro-batch of TRL; 0 for all at once", least=0)
    repeats: int = option(7, "timed turns, of one step of each side", least=1)
    warmup: int = option(2, "untimed steps of each side before", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixesOptions(ModelOptions):
    """Training steps whose rows compute common beginnings once, against rows that compute each.

    Policy gradients on groups of completions, DPO on pairs of answers, and completions that have nothing in common.
    """

    PEERS: ClassVar[tuple[str, ...]] = ()
    CASES: ClassVar[tuple[str, ...]] = ("completions", "pairs", "alone")

    prompts: int = option(2, "prompts of a step; --length, --rows and --documents are not read", least=1)
    prompt: int = option(256, "tokens of a prompt", least=1)
    group: int = option(8, "completions of each prompt", least=2)
    completion: int = option(64, "tokens of a completion", least=1)
    pairs: int = option(4, "pairs of answers of a step", least=1)
    question: int = option(512, "tokens of the question of a pair", least=1)
    answer: int = option(128, "tokens of the longest answer; the shortest has half of it", least=1)
    only: str = option("all", f"which cases: all, or a list of {','.join(CASES)}")
    times_only: bool = option(False, "do not measure the peak memory of a step, in a process of its own")
    repeats: int = option(9, "timed steps of each", least=1)
    warmup: int = option(1, "untimed steps of each, after those that check the losses", least=0)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        self.case_names()

    def case_names(self) -> tuple[str, ...]:
        """Returns the cases that are measured."""
        return chosen_names(self.only, self.CASES, "only")


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantsOptions(ModelOptions):
    """Steps of several adapters on one base, together, against each alone and against PEFT, which switches."""

    PEERS: ClassVar[tuple[str, ...]] = ("peft",)

    adapters: int = option(8, "adapters, each with a batch of its own", least=1)
    rows: int = option(1, "rows in an adapter's batch", least=1)
    length: int = option(64, "tokens in a row")
    joined: int = option(4096, "tokens of a joined micro-batch, at most", least=1)
    repeats: int = option(15, "timed turns, a step of every adapter each", least=1)
    warmup: int = option(2, "untimed turns before", least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerOptions(SectionOptions):
    """A SigLIP tower against transformers' own: time and peak memory, forward alone or with backward to all weights."""

    images: int = option(2, "images at a time", least=1)
    side: int = option(448, "pixels on a side of an image, in patches of 14", least=14)
    layers: int = option(4, "blocks; the released tower has 27", least=1)
    width: int = option(1152, "width of a block", least=1)
    heads: int = option(16, "attention heads", least=1)
    mlp: int = option(4304, "width of the MLP", least=1)
    dtype: str = option("float32", "of weights and activations", DTYPES)
    repeats: int = option(9, "timed runs of each", least=1)
    warmup: int = option(2, "untimed runs of each before", least=0)
    device: str = option("auto", "auto takes a GPU where there is one", DEVICES)

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        if self.width % self.heads:
            raise UserError(f"--width {self.width} does not divide into --heads {self.heads}: give a multiple of it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions(SectionOptions):
    """The time that a step waits for images that threads read from the disk and decode."""

    images: int = option(64, "files, one in a row", least=1)
    side: int = option(448, "pixels on a side of an image, in patches of 14", least=14)
    rows: int = option(4, "rows in a step", least=1)
    step_ms: int = option(200, "milliseconds of a step, in which the processor is free", least=1)
    steps: int = option(30, "steps with each number of threads", least=1)
    workers: str = option("0,1,2", "threads, one measurement for each number")

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        if self.side % 14:
            raise UserError(f"--side is {self.side}: give a multiple of 14.")
        self.worker_counts()

    def worker_counts(self) -> tuple[int, ...]:
        """Returns the numbers of threads, one for each measurement."""
        return whole_numbers("workers", self.workers, "0,1,2", least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeAwareOptions(SectionOptions):
    """The share of what adapters gained that is left when they are merged into a base in few bits.

    With lora.merge_aware and without, of a trained model that is stored in a format, on text that is new to it.
    """

    model: str = option("", "folder of a trained model, as transformers writes it")
    data: str = option("", "text file that the adapters are trained on")
    characters: int = option(200000, "of the file, from its beginning", least=1)
    formats: str = option("nvfp4,mxfp4,int4", "how the base is stored, one row for each")
    seeds: int = option(10, "trainings of each kind", least=1)
    rank: int = option(8, "rank of the adapters", least=1)
    alpha: float = option(16.0, "numerator of their scale")
    lr: float = option(3e-3, "highest learning rate; it rises over --warmup steps and falls over the second half")
    warmup: int = option(5, "steps", least=1)
    steps: int = option(100, "steps of a training", least=1)
    rows: int = option(4, "rows in a batch", least=1)
    length: int = option(128, "tokens in a row", least=2)
    held: int = option(16, "batches that are evaluated, from the beginning of the text", least=1)
    kernels: str = option("auto", "the engine's kernels", KERNELS)
    threads: int = option(0, "CPU threads; 0 leaves torch's choice", least=0)
    device: str = option("cpu", "where it runs", ("cpu",))

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        for name in ("model", "data"):
            if not getattr(self, name) or not Path(getattr(self, name)).exists():
                raise UserError(f"--{name} is {getattr(self, name)!r}, which does not exist: give a path.")
        if self.alpha <= 0 or self.lr <= 0:
            raise UserError(f"--alpha is {self.alpha:g} and --lr {self.lr:g}: give more than 0.")
        self.format_names()

    def format_names(self) -> tuple[str, ...]:
        """Returns the formats that are measured."""
        return chosen_names(self.formats, MERGED_DTYPES[1:], "formats")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions(SectionOptions):
    """Seconds from a command to its first training step, against transformers + PEFT, and to the end of its help."""

    hidden: int = option(256, "width of the residual stream; a multiple of 16", least=16)
    layers: int = option(4, "number of layers", least=1)
    records: int = option(256, "records of the training data, of 200 tokens", least=2)
    ranks: int = option(2, "data-parallel ranks of a second measurement under torchrun; 1 leaves it out", least=1)
    repeats: int = option(5, "timed turns", least=1)

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        if self.hidden % 16:
            raise UserError(f"--hidden is {self.hidden}: give a multiple of 16, which 8 heads of an even size take.")


SECTIONS: dict[str, type] = {
    "step": StepOptions,
    "experts": ExpertsOptions,
    "kernels": KernelOptions,
    "lora-tax": TaxOptions,
    "machine-speed": SpeedOptions,
    "memory": MemoryOptions,
    "graph": GraphOptions,
    "decode": DecodeOptions,
    "preprocess": PreprocessOptions,
    "convert": ConvertOptions,
    "guards": GuardsOptions,
    "save": SaveOptions,
    "generate": GenerateOptions,
    "rollouts": RolloutsOptions,
    "turns": TurnsOptions,
    "prefixes": PrefixesOptions,
    "tenants": TenantsOptions,
    "tower": TowerOptions,
    "loader": LoaderOptions,
    "merge-aware": MergeAwareOptions,
    "start": StartOptions,
}
"""Section name -> its options. The section is also a module of `rankfold.benchmarking`, with _ for -, whose
`run(options)` gives a Table or a Report."""
