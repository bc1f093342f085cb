"""The options of each section, as frozen records from which the command line is made. Does not import torch.

An option without a default of its own takes one by the device it runs on (`for_device`): a GPU gets the sizes that the
targets are stated for, a CPU sizes that a laptop finishes.
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from engine.choices import ENCODED, IMPLEMENTATIONS, MERGED_DTYPES
from engine.config.model import KERNELS, DType
from engine.errors import UserError

DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
"""The engine's dtypes without float16, which needs a loss scale that the peers' sides do not have."""
DEVICES = ("auto", "cpu", "cuda")
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "llama3-8b": {
        "hidden": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "intermediate": 14336,
        "vocab": 128256,
        "rows": 2,
        "length": 4096,
        "dtype": "bfloat16",
        "dropout": 0.1,
    },
}
"""Name -> options that it sets, unless they are given beside it."""
_CEILING = "size of the square product that measures the speed of arithmetic"
_RUNS = "timed runs of each contestant; 0 checks the results and times nothing"
FORMER_NAMES = {"pictures": "images"}
"""Earlier name of an option -> its name; both are taken."""


def option(default: Any, text: str, choices: tuple[str, ...] | None = None, *, least: int | None = None) -> Any:
    """Returns a field with the same default on every device.

    Args:
        default: value.
        text: its help.
        choices: the words it takes; None for any value.
        least: the smallest number it takes; None for any.
    """
    text = f"{text} (default {default})"
    return field(default=default, metadata={"help": text, "choices": choices, "least": least})


def by_device(
    cpu: Any, cuda: Any, text: str, choices: tuple[str, ...] | None = None, *, least: int | None = None
) -> Any:
    """Returns a field that stays None until `for_device` gives it the default of the device; see `option`."""
    text = f"{text} (default {cpu} on a CPU, {cuda} on a GPU)"
    metadata = {"help": text, "choices": choices, "least": least, "cpu": cpu, "cuda": cuda}
    return field(default=None, metadata=metadata)


def _check_heads(record: Any) -> None:
    hidden, heads, kv_heads = record.hidden, record.heads, record.kv_heads
    if None in (hidden, heads, kv_heads):
        return
    if hidden % heads or hidden // heads % 2:
        raise UserError(f"--hidden {hidden} over --heads {heads} must give a whole, even head size: change one.")
    if heads % kv_heads:
        raise UserError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}: change one.")


def check_documents(record: Any) -> None:
    """Checks that each document of a row can have 2 tokens, so that one can be predicted."""
    if record.length < 2 * record.documents:
        raise UserError(
            f"--length {record.length} leaves documents of less than 2 tokens with --documents {record.documents}: "
            "give longer rows or fewer documents."
        )


def chosen_names(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Returns the names in a list such as `a,b`, "all" or "none".

    Raises:
        UserError: a name that is not known.
    """
    if text in ("all", "none"):
        return known if text == "all" else ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise UserError(f"--{option} has {name!r}: give all, none, or some of {','.join(known)}.")
    return names


def whole_numbers(name: str, text: str, example: str, least: int | None = None) -> tuple[int, ...]:
    """Returns the numbers of a list such as `1,4,16`.

    Args:
        name: of the option.
        text: its value.
        example: of a value.
        least: the smallest number it takes; None for any.

    Raises:
        UserError: one that is not a number, or is too small.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--{name} is {text!r}: give whole numbers, such as {example}.") from None
    if least is not None and min(numbers) < least:
        raise UserError(f"--{name} is {text!r}: give numbers of at least {least}.")
    return numbers


BASES = ("none", *ENCODED, "fp8_channel")
"""How frozen weights are stored; the last is a format that checkpoints alone have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionOptions:
    """The options of a section; None counts as not yet set.

    Raises:
        UserError: a number below its least, a word or a peer that is not known; in the records of sections also sizes
            that do not fit together.
    """

    PEERS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            value, choices, least = getattr(self, item.name), item.metadata["choices"], item.metadata["least"]
            if value is None:
                continue
            if least is not None and value < least:
                raise UserError(f"--{item.name.replace('_', '-')} is {value}: give a number of at least {least}.")
            if item.name == "dropout" and not 0.0 <= value < 1.0:
                raise UserError(f"--dropout is {value}: give a probability of at least 0 and below 1.")
            if choices is not None and value not in choices:
                raise UserError(f"--{item.name} is {value!r}: choose one of {', '.join(choices)}.")
            if item.name == "peers":
                chosen_names(value, self.PEERS, "peers")


PADDED = "peft-padded"
"""The peer that gives each document of a packed row a row of its own, padded."""
BITSANDBYTES = "peft-bitsandbytes"
"""The peer whose frozen weights bitsandbytes stores, in the same NF4 as the engine."""
WITHOUT_PEFT = ("transformers", "transformers-kept-memory")
"""The peers that train all parameters."""
MERGE_AWARE = "merge-aware"
"""The method of adapters that the base takes before it is rounded, against adapters beside the same base."""
METHODS = ("lora", "dora", "full", MERGE_AWARE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(SectionOptions):
    """A random Llama and the batch it sees."""

    PEERS: ClassVar[tuple[str, ...]] = ("peft", "peft-kept-memory", "liger")

    preset: str = option("none", "sizes of a known model; options given beside it win", tuple(PRESETS))
    model_type: str = option("llama", "type of the model, as config.json has it")
    implementation: str = option("auto", "the engine's layers, as in model.implementation", IMPLEMENTATIONS)
    hidden: int = option(512, "width of the residual stream", least=1)
    layers: int = option(6, "number of layers", least=1)
    heads: int = option(8, "number of query heads; the head size is hidden / heads", least=1)
    kv_heads: int = option(4, "number of key/value heads", least=1)
    intermediate: int = option(1408, "width of the MLP", least=1)
    vocab: int = option(32000, "vocabulary size", least=1)
    rank: int = option(16, "rank of the adapters", least=1)
    rows: int = option(2, "rows in a batch", least=1)
    length: int = option(512, "tokens in a row")
    documents: int = option(1, "documents in a row, of mixed lengths; peers do not pack, and one pads them", least=1)
    dropout: float = option(0.0, "dropout on the adapters' input")
    dtype: str = option("float32", "of weights and activations", DTYPES)
    kernels: str = option("auto", "the engine's kernels", KERNELS)
    base_dtype: str = option("none", "how the engine stores frozen weights; none as --dtype", BASES)
    peers: str = option("all", "peers to compare the engine with: all, none, or a list")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice", least=0)
    device: str = option("auto", "auto takes a GPU where there is one", DEVICES)

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        if self.length < 2:
            raise UserError(f"--length is {self.length}: give at least 2 tokens, so that one can be predicted.")
        _check_heads(self)
        self._check_packing()
        self._check_base()

    def _check_base(self) -> None:
        rounds = BITSANDBYTES in self.PEERS and self.base_dtype == "nf4"
        named = set() if self.peers == "all" and rounds else set(chosen_names(self.peers, self.PEERS, "peers"))
        if self.base_dtype != "none" and named - ({BITSANDBYTES} if rounds else set()):
            others = f" or {BITSANDBYTES}" if rounds else ""
            raise UserError(
                f"--base-dtype {self.base_dtype} rounds weights, which these peers keep: add --peers none{others}."
            )

    def _check_packing(self) -> None:
        # of all peers, a section that has one that pads takes those that can see its rows
        fitting = self.peers == "all" and PADDED in self.PEERS
        named = set() if fitting else set(chosen_names(self.peers, self.PEERS, "peers"))
        if self.documents > 1 and named - {PADDED}:
            others = f" or {PADDED}" if PADDED in self.PEERS else ""
            raise UserError(
                f"--documents {self.documents} packs rows, which these peers do not: add --peers none{others}."
            )
        if self.documents == 1 and PADDED in named:
            raise UserError(f"--peers {PADDED} pads the documents of packed rows: add --documents 2 or more.")

    @property
    def tokens(self) -> int:
        """The number of tokens of a batch."""
        return self.rows * self.length

    @property
    def kv_width(self) -> int:
        """Features of the keys, which are also those of the values."""
        return self.hidden // self.heads * self.kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions(ModelOptions):
    """A whole training step against transformers + PEFT and against its matrix products alone.

    A random model with adapters on all linears of a block, or trained in full, AdamW, gradient clipping. First all
    sides must give the same losses; then they are timed in turn.
    """

    PEERS: ClassVar[tuple[str, ...]] = (*ModelOptions.PEERS, PADDED, BITSANDBYTES, *WITHOUT_PEFT)

    method: str = option(
        "lora",
        "adapters, adapters with trained lengths of rows, all parameters, or adapters as with lora.merge_aware",
        METHODS,
    )
    repeats: int = option(15, "timed steps of each side", least=1)
    warmup: int = option(2, "untimed steps of each side, after those that check the losses", least=0)

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        check_documents(self)
        if self.method == MERGE_AWARE:
            if self.base_dtype not in MERGED_DTYPES:
                raise UserError(
                    f"--method {MERGE_AWARE} merges into a base that is stored encoded, and --base-dtype is "
                    f"{self.base_dtype}: add --base-dtype nvfp4, or another of {', '.join(MERGED_DTYPES[1:])}."
                )
            if self.dropout > 0:
                raise UserError(f"--method {MERGE_AWARE} drops no inputs: leave --dropout out.")
        elif self.method != "lora" and self.base_dtype != "none":
            raise UserError(
                f"--method {self.method} needs weights as numbers, which --base-dtype {self.base_dtype} encodes: leave "
                "one of them out."
            )
        if self.method == "full" and (self.dropout > 0 or self.documents > 1):
            wrong = "--dropout" if self.dropout > 0 else "--documents"
            raise UserError(f"--method full is measured without {wrong}, which is for adapters here: leave it out.")


def method_of(options: ModelOptions) -> str:
    """Returns what a section trains, one of METHODS; sections without the option train LoRA adapters."""
    return options.method if isinstance(options, StepOptions) else "lora"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsOptions(StepOptions):
    """The step of a mixture of experts, with adapters on attention and all experts, against transformers + PEFT.

    Of a random model, gate and up of an expert share one A, as PEFT's `target_parameters` have it. First all sides must
    give the same losses and gradient norms; then they are timed in turn, beside the matrix products alone.
    """

    PEERS: ClassVar[tuple[str, ...]] = ("peft-experts", "peft-experts-kept-memory", "peft-experts-loop")

    model_type: str = option("qwen3_moe", "type of the model, as config.json has it")
    experts: int = option(8, "number of experts", least=2)
    per_token: int = option(2, "experts that the router chooses for a token", least=1)
    rank: int = option(8, "rank of the adapters", least=1)

    def __post_init__(self) -> None:
        StepOptions.__post_init__(self)
        if self.method != "lora":
            raise UserError(f"--method is {self.method!r}, but experts are measured with LoRA alone: leave it out.")
        if self.per_token > self.experts:
            raise UserError(f"--per-token is {self.per_token}, but there are --experts {self.experts}: give no more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions(ModelOptions):
    """Memory of a LoRA step: its peak, and the tensors that each layer keeps for backward.

    The peak is that above the loaded model, each side in its own process. A layer's kept bytes are counted tensor by
    tensor, and compared with the arithmetic of a plain implementation and of the engine's design.
    """

    PEERS: ClassVar[tuple[str, ...]] = ("peft", "peft-checkpointing", "liger")

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        check_documents(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOptions(SectionOptions):
    """Each op of a step alone: the engine's backends, its peers, and the machine's limits.

    Every contestant's result is compared with one in float64 before anything is timed.
    """

    PEERS: ClassVar[tuple[str, ...]] = (
        "torch", "compile", "liger", "quack", "flash-attn", "flash-attn-4", "fla", "compressed-tensors", "torchao",
    )  # fmt: skip
    GROUPS: ClassVar[tuple[str, ...]] = (
        "norm", "swiglu", "rope", "dropout", "low-rank", "loss", "head", "optimizer", "attention",
        "quantize", "frozen", "states", "product",
    )  # fmt: skip

    tokens: int | None = by_device(1024, 8192, "tokens", least=1)
    length: int | None = by_device(512, 4096, "tokens in a document, or in a row of several, for attention", least=1)
    hidden: int | None = by_device(1024, 4096, "width of the residual stream", least=1)
    heads: int | None = by_device(16, 32, "number of query heads; the head size is hidden / heads", least=1)
    kv_heads: int | None = by_device(8, 8, "number of key/value heads", least=1)
    intermediate: int | None = by_device(2816, 14336, "width of the MLP", least=1)
    vocab: int | None = by_device(32000, 128256, "vocabulary size", least=1)
    trained: int | None = by_device(4_000_000, 42_000_000, "parameters that the optimizer updates", least=1)
    rank: int = option(16, "rank of the adapters", least=1)
    dropout: float = option(0.1, "dropout on the adapters' input, where an op is measured with it")
    dtype: str | None = by_device("float32", "bfloat16", "of weights and activations", DTYPES)
    only: str = option("all", f"which ops: all, or a list of {','.join(GROUPS)}")
    peers: str = option("all", "peers to compare the engine with: all, none, or a list")
    compile: bool = option(False, "torch.compile as a peer on a CPU too")
    copy_mib: int | None = by_device(128, 1024, "MiB of the copy that measures memory's speed", least=1)
    ceiling: int | None = by_device(2048, 8192, _CEILING, least=1)
    repeats: int | None = by_device(15, 50, _RUNS, least=0)
    warmup: int = option(2, "untimed runs of each contestant, after the one that is checked", least=0)
    threads: int = option(0, "CPU threads; 0 leaves torch's choice", least=0)
    device: str = option("auto", "auto takes a GPU where there is one", DEVICES)

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        _check_heads(self)
        chosen_names(self.only, self.GROUPS, "only")
        if self.tokens is not None and self.length is not None and self.tokens % self.length:
            raise UserError(f"--tokens {self.tokens} must be a multiple of --length {self.length}: change one.")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


_TAX_ON_CPU = (
    "column:1024x1024x1024,column:1024x1024x2816,row:1024x1024x1024,row:1024x2816x1024,"
    "norm-column:1024x1024x1024+512+512,norm-column:1024x1024x2816+2816,swiglu-row:1024x2816x1024"
)
_TAX_ON_GPU = (
    "column:2048x4096x4096,column:8192x4096x4096,column:8192x4096x14336,row:8192x4096x4096,row:8192x14336x4096,"
    "norm-column:8192x4096x4096+1024+1024,norm-column:8192x4096x14336+14336,swiglu-row:8192x14336x4096,"
    "column:2048x8192x8192,column:8192x8192x8192"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of one linear.

    Args:
        kind: "column" and "row" take their input as it is, "norm-column" makes it by a norm, "swiglu-row" by SwiGLU.
        tokens, inputs: of x.
        outputs: of each logical linear; several share one product.
    """

    kind: str
    tokens: int
    inputs: int
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{self.tokens}x{self.inputs}x{'+'.join(map(str, self.outputs))}"


KINDS = ("column", "row", "norm-column", "swiglu-row")


def read_shapes(text: str) -> tuple[Shape, ...]:
    """Reads the shapes from a list such as `column:1024x1024x2816,norm-column:1024x1024x1024+512+512`."""
    return tuple(_read_shape(part.strip()) for part in text.split(","))


def _read_shape(text: str) -> Shape:
    kind, _, sizes = text.partition(":")
    parts = sizes.split("x")
    try:
        tokens, inputs = (int(part) for part in parts[:-1])
        outputs = tuple(int(part) for part in parts[-1].split("+"))
    except ValueError:
        tokens, inputs, outputs = 0, 0, ()
    if kind not in KINDS or not outputs or min(tokens, inputs, *outputs) < 1 or ("row" in kind and len(outputs) > 1):
        raise UserError(
            f"--shapes has {text!r}: give KIND:TOKENSxINPUTSxOUTPUTS with one of {', '.join(KINDS)}, such as "
            "column:1024x1024x2816, or norm-column:1024x1024x1024+512+512 for several linears in one product."
        )
    return Shape(kind=kind, tokens=tokens, inputs=inputs, outputs=outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaxOptions(SectionOptions):
    """A linear with adapters, forward and backward, over the same linear frozen.

    As the model uses them: through the parallel linears, their input made by a norm or SwiGLU or given. Every
    contestant's output and gradients are compared with those in float64 before anything is timed.
    """

    PEERS: ClassVar[tuple[str, ...]] = ("torch", "peft")

    shapes: str | None = by_device(_TAX_ON_CPU, _TAX_ON_GPU, "which linears: KIND:TOKENSxINPUTSxOUTPUTS[+...],...")
    rank: int = option(16, "rank of the adapters", least=1)
    dropout: float = option(0.1, "dropout of the second measurement of each shape; 0 skips it")
    dtype: str | None = by_device("float32", "bfloat16", "of weights and activations", DTYPES)
    peers: str = option("all", "peers to compare the engine with: all, none, or a list")
    ceiling: int | None = by_device(2048, 8192, _CEILING, least=1)
    repeats: int | None = by_device(15, 30, _RUNS, least=0)
    warmup: int = option(2, "untimed runs of each contestant, after the one that is checked", least=0)
    threads: int = option(0, "CPU threads; 0 leaves torch's choice", least=0)
    device: str = option("auto", "auto takes a GPU where there is one", DEVICES)

    def __post_init__(self) -> None:
        SectionOptions.__post_init__(self)
        if self.shapes is not None:
            read_shapes(self.shapes)


T = TypeVar("T")


def _plain_type(hint: Any) -> type:
    """Returns `int` of `int | None`."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Adds one `--name-of-field` for each field of the record."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        name, plain = f"--{item.name.replace('_', '-')}", _plain_type(hints[item.name])
        names = [*(f"--{former}" for former, now in FORMER_NAMES.items() if now == item.name), name]
        # only options that were typed are in the namespace, so that a preset sets the others
        common = {"dest": item.name, "default": argparse.SUPPRESS, "help": item.metadata["help"]}
        if plain is bool:
            parser.add_argument(*names, action="store_true", **common)
            continue
        choices = item.metadata["choices"]
        metavar = None if choices else plain.__name__.upper()
        parser.add_argument(*names, type=plain, choices=choices, metavar=metavar, **common)


def read_options(arguments: argparse.Namespace, kind: type[T]) -> T:
    """Returns the record that the parsed command line describes."""
    typed = {item.name: vars(arguments)[item.name] for item in fields(kind) if item.name in arguments}  # type: ignore[arg-type]
    return kind(**{**PRESETS[typed.get("preset", "none")], **typed})


def for_device(options: T, device_type: str) -> T:
    """Returns the record with every unset option set for "cpu" or "cuda"."""
    left_open = {
        item.name: item.metadata[device_type]
        for item in fields(options)  # type: ignore[arg-type]
        if getattr(options, item.name) is None and item.default is not MISSING
    }
    return replace(options, **left_open)  # type: ignore[type-var]
