"""The adapters of one linear of a layer's experts, or of gate and up: which there are, and which factors experts share.

`TrainingPlan.experts` says the latter, for the linears by their side of the residual stream:

| form         | A of gate and up | B of gate and up | A of down    | B of down    |
|--------------|------------------|------------------|--------------|--------------|
| per_expert   | each expert's    | each expert's    | each expert's| each expert's|
| shared_outer | one              | each expert's    | each expert's| one          |
| shared       | one              | one              | one          | one          |

An expert's own factor is a parameter of its module, `<prefix>.3.gate_proj.lora_A`; one that all share is named without
the expert, `<prefix>.gate_proj.lora_A`. Where the plan fuses gate and up, both have one adapter, `gate_up_proj`.

Experts of one layer may have adapters of different rank and scale, or none: their places in H are as wide as the
widest, and the rest of it is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.choices import ExpertFactors
from engine.distributed.sharding import ShardSpec
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TrainingPlan
from engine.layers.linear import Section, concatenated


class Sharing(NamedTuple):
    """Whether all experts have one A, and one B."""

    a: bool
    b: bool


def sharing(form: ExpertFactors, *, reads_stream: bool) -> Sharing:
    """Returns which factors the experts share.

    Args:
        reads_stream: the linear's input is the residual stream, as of gate and up; else its output is.
    """
    if form == "shared_outer":
        return Sharing(a=reads_stream, b=not reads_stream)
    return Sharing(a=form == "shared", b=form == "shared")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertAdapter:
    """An adapter that stands at the same place in every expert.

    Args:
        leaf: last component of its module's name.
        rows: its output rows, here.
        spec: shard of the weight of these rows.
        settings: of each expert; None where it has no such adapter.
    """

    leaf: str
    rows: slice
    spec: ShardSpec
    settings: tuple[AdapterSettings | None, ...]

    @property
    def present(self) -> list[AdapterSettings]:
        return [settings for settings in self.settings if settings is not None]

    @property
    def rank(self) -> int:
        """That of the expert with the largest."""
        return max(settings.rank for settings in self.present)


def expert_adapters(
    prefix: str, leaves: Sequence[str], spec: ShardSpec, fused: str | None, num_experts: int, plan: TrainingPlan
) -> list[ExpertAdapter]:
    """Returns the adapters of the experts' linears on one input, in the order of their output rows.

    Args:
        prefix: of the experts' module names, such as `layers.3.mlp.experts`.
        leaves: names of the linears, in the order of their rows.
        spec: shard of the weight of each.
        fused: name of the one adapter that may stand over all of them; None where there is none.
        num_experts: of the layer.

    Raises:
        UserError: adapters that experts cannot have, or that differ and are to share a factor.
    """
    height = spec.local_shape[0]
    places = [(leaf, slice(i * height, (i + 1) * height), spec) for i, leaf in enumerate(leaves)]
    if fused is not None and any(plan.fused(f"{prefix}.{expert}.{fused}") for expert in range(num_experts)):
        whole = replace(concatenated([Section(name=leaf, spec=spec) for leaf in leaves], fused).spec, data=spec.data)
        places.append((fused, slice(0, height * len(leaves)), whole))
    found = []
    for leaf, rows, own in places:
        settings = tuple(plan.adapter(f"{prefix}.{expert}.{leaf}") for expert in range(num_experts))
        if any(settings):
            found.append(ExpertAdapter(leaf=leaf, rows=rows, spec=own, settings=settings))
    shares = sharing(plan.experts, reads_stream=spec.dim == 0)
    for adapter in found:
        _check(adapter, lambda expert, leaf=adapter.leaf: f"{prefix}.{expert}.{leaf}", shares, plan.experts)
    return found


def _check(adapter: ExpertAdapter, name: Callable[[int], str], shares: Sharing, form: ExpertFactors) -> None:
    first = next(index for index, settings in enumerate(adapter.settings) if settings is not None)
    for option, asked in (("dora", adapter.present[0].dora), ("bias", adapter.present[0].bias)):
        if asked:
            raise UserError(
                f"lora.{option} is true and {name(first)} is to have an adapter, but experts that a router chooses "
                f"have plain adapters alone: set lora.{option} to false, or leave that module out of lora.targets."
            )
    if not any(shares):
        return
    for index, settings in enumerate(adapter.settings):
        if settings != adapter.settings[first]:
            differs = "has none" if settings is None or adapter.settings[first] is None else "another rank or alpha"
            raise UserError(
                f"lora.experts is {form}, so that {name(0)} and {name(index)} share a factor, but of their adapters "
                f"one {differs}: write lora.targets, lora.rank_pattern and lora.alpha_pattern so that they agree, or "
                "set lora.experts to per_expert."
            )
