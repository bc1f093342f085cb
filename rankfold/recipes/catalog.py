"""The models, GPUs and methods that recipes are for, and the plans stored for them. Nothing here imports torch.

`models.json` holds facts of released models: names on the hub, and of each config.json what sizes and layers follow
from. `planned.json` holds the planner's answers; `rankfold.recipes.update` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from engine.choices import STORED
from engine.config.suggestions import closest
from engine.errors import UserError
from engine.sentences import listed

FOLDER = Path(__file__).resolve().parent
MODELS_FILE, PLANS_FILE = FOLDER / "models.json", FOLDER / "planned.json"

Method = Literal["sft", "dpo", "grpo"]
METHODS: tuple[Method, ...] = get_args(Method)
TITLES: dict[Method, str] = {
    "sft": "supervised fine-tuning", "dpo": "DPO on pairs of answers", "grpo": "GRPO on sampled completions",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A kind of GPU.

    Args:
        name: as a user gives it.
        title: as a page has it.
        machine: the planner's name of its speeds; a key of `engine.planning.machine.MACHINES`.
        memory: GiB that nvidia-smi reports, or a little less: vendors sell 48 GB of which ECC takes a share.
        counts: numbers of them for which plans of sft are stored.
    """

    name: str
    title: str
    machine: str
    memory: float
    counts: tuple[int, ...]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="rtx4090", title="RTX 4090, 24 GB", machine="rtx4090-24", memory=23.5, counts=(1, 2, 4)),
        Gpu(name="l40s", title="L40S, 48 GB", machine="l40s-48", memory=44.5, counts=(1, 2, 4)),
        Gpu(name="a100", title="A100, 80 GB", machine="a100-80", memory=79.5, counts=(1, 8)),
        Gpu(name="h100", title="H100, 80 GB", machine="h100-80", memory=79.5, counts=(1, 2, 4, 8)),
        Gpu(name="h200", title="H200, 141 GB", machine="h200-141", memory=140, counts=(1, 8)),
        Gpu(name="b200", title="B200, 180 GB", machine="b200-180", memory=179, counts=(1, 8)),
    )
}
NODE = 8
"""GPUs of a node."""
_BILLION = 10**9
_SMALL = 5 * _BILLION
"""Parameters below which a micro-batch has two rows."""
_FOR_NODES = 60 * _BILLION
"""Parameters from which recipes for two nodes are stored."""
_FOR_CLUSTERS = 500 * _BILLION
"""Parameters from which recipes are stored for two nodes of large GPUs alone."""
_LARGE = 100
"""GiB of those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A released model.

    Args:
        name: as a user gives it.
        hub: its name on the Hugging Face hub.
        parameters: their number, of what a run loads; counted by the engine.
        config: of its config.json, what sizes and layers follow from.
        implementation: as model.implementation.
        targets: as lora.targets; () for all linears.
        sees_images: whether its recipes train on images too.
        methods: for which recipes are stored.
    """

    name: str
    hub: str
    parameters: int
    config: dict[str, Any]
    implementation: str = "auto"
    targets: tuple[str, ...] = ()
    sees_images: bool = False
    methods: tuple[Method, ...] = ("sft",)

    @property
    def path(self) -> str:
        """The model.path of its run files."""
        return self.hub

    @property
    def encodings(self) -> tuple[str | None, ...]:
        """How its base may be stored, in the order in which recipes try it; as model.base_dtype."""
        return (None, STORED, "nf4") if "quantization_config" in self.config else (None, "nf4")

    @property
    def context(self) -> int:
        """Tokens whose positions it knows."""
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return int(text["max_position_embeddings"])

    @property
    def rows(self) -> int:
        """Rows, or pairs of answers, of a micro-batch: more than one where one keeps a GPU too short."""
        return 2 if self.parameters < _SMALL else 1

    def counts(self, gpu: Gpu) -> tuple[int, ...]:
        """Returns the numbers of GPUs for which plans of sft are stored, where they fit."""
        if self.parameters >= _FOR_CLUSTERS:
            return (2 * NODE,) if gpu.memory >= _LARGE else ()
        if self.parameters < _SMALL:
            return tuple(count for count in gpu.counts if count in (1, NODE))
        return (*gpu.counts, 2 * NODE) if self.parameters >= _FOR_NODES and NODE in gpu.counts else gpu.counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The purpose of a run file."""

    model: Model
    gpu: Gpu
    count: int
    method: Method = "sft"

    @property
    def name(self) -> str:
        """Its name, which needs no quotes in a shell."""
        return f"{self.model.name}-{self.method}-{self.count}x{self.gpu.name}"

    @property
    def nodes(self) -> int:
        return -(-self.count // NODE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The planner's answer for a recipe; all of it is predicted.

    Args:
        base_dtype: as model.base_dtype.
        parallel, memory: the options of these sections that differ from their defaults.
        layout: both in words.
        gib: that the fullest GPU takes.
        step_seconds, tokens: of a step, and tokens a second on each GPU: slow, likely, fast.
        part: name of the largest part of the memory.
    """

    base_dtype: str | None
    layout: str
    gib: float
    step_seconds: tuple[float, float, float]
    tokens: tuple[int, int, int]
    part: str
    parallel: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


@cache
def models() -> dict[str, Model]:
    """Returns all models by name, in the order of the file."""
    found = {}
    for one in json.loads(MODELS_FILE.read_text(encoding="utf-8")):
        lists = {name: tuple(one[name]) for name in ("targets", "methods") if name in one}
        found[one["name"]] = Model(**{**one, **lists})
    return found


@cache
def plans() -> dict[str, Plan]:
    """Returns the stored plans by the names of their recipes."""
    found = {}
    for name, one in json.loads(PLANS_FILE.read_text(encoding="utf-8")).items():
        ranges = {key: tuple(one[key]) for key in ("step_seconds", "tokens")}
        found[name] = Plan(**{**one, **ranges})
    return found


PLACES: dict[Method, tuple[tuple[str, int], ...]] = {
    "dpo": (("rtx4090", 1), ("l40s", 1), ("h100", 1), ("h100", NODE), ("h200", 1)),
    "grpo": (("h100", 1), ("h100", NODE), ("h200", 1)),
}
"""Method -> the kinds and numbers of GPUs for which plans are stored; of sft, all."""


def recipes() -> Iterator[Recipe]:
    """Yields every recipe that is planned; those that do not fit have no stored plan."""
    for model in models().values():
        for method in model.methods:
            for gpu in GPUS.values():
                for count in model.counts(gpu):
                    if method == "sft" or (gpu.name, count) in PLACES[method]:
                        yield Recipe(model=model, gpu=gpu, count=count, method=method)


def model_named(name: str) -> Model:
    """Returns a model.

    Raises:
        UserError: there is none of that name.
    """
    known = models()
    for one in known.values():
        if name.lower() in (one.name, one.hub.lower()):
            return one
    hint = closest(name.lower(), known)
    meant = f"did you mean {hint}?" if hint else "rankfold recipe list has them all."
    raise UserError(f"there is no recipe for {listed([name])}, but for {len(known)} other models: {meant}")


def gpu_named(name: str) -> Gpu:
    """Returns a kind of GPU.

    Raises:
        UserError: there is none of that name.
    """
    if name.lower() not in GPUS:
        raise UserError(f"--gpu is {listed([name])}, but one of {', '.join(GPUS)} is expected: give the nearest.")
    return GPUS[name.lower()]
