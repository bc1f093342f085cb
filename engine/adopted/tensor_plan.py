"""How a model's tensor plan, in transformers' words, splits modules over tensor-parallel ranks.

| style of the plan               | here                                                              |
|---------------------------------|-------------------------------------------------------------------|
| colwise                         | output rows split                                                 |
| rowwise                         | input features split, outputs summed                              |
| replicated_with_grad_allreduce  | whole on every rank, whose gradients are parts of a sum           |
| colwise_gather_output,          | whole on every rank, or, where one linear makes the halves that a |
| rowwise_split_input             | gated MLP multiplies, each half's rows split                      |
| packed_colwise, rowwise of a    | experts' inner features split, outputs of all experts summed      |
| stack; of one with inputs first |                                                                   |
| packed_rowwise, colwise;        |                                                                   |
| moe_tp_experts                  |                                                                   |
| moe_identity_expert             | its output divided by the ranks, whose outputs are summed         |
| mla_kv_a_proj                   | whole on every rank; the gradient of the rotated keys is summed   |
| anything else                   | refused                                                           |

What no plan names is whole on every rank, and every rank computes the same with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from engine.adopted.plain_plan import plain_styles
from engine.distributed.mesh import Axis
from engine.distributed.sharding import Piece, ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from engine.layers.context import LayerContext, TensorLayout
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Section

Split = Literal["whole", "rows", "shared", "halves", "column_halves", "columns", "partial"]
"""Of a module: whole, output rows split, the same where several ranks have one head's, the rows of both halves split,
the same of a stack's columns, input features split, or whole with gradients that are parts of a sum."""
_SPLITS: dict[str, Split] = {
    "colwise": "rows",
    "rowwise": "columns",
    "replicated_with_grad_allreduce": "partial",
    "packed_colwise": "halves",
    "packed_rowwise": "column_halves",
}
_SHARED = (".k_proj", ".v_proj", ".key", ".value")
_HEADS = (".q_proj", ".query", *_SHARED)
_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The splits of a model's modules.

    Args:
        family: of the model, for errors.
        styles: of the plan, as transformers calls them, by names inside the body with * in place of numbers.
        rope_width: features of a key that are rotated and shared by all heads, in latent attention; else None.
        shares_heads: attention takes a rank's heads of queries with as many of keys and values as there are.
    """

    family: str
    styles: Mapping[str, str]
    rope_width: int | None = None
    shares_heads: bool = False

    @classmethod
    def of(cls, family: str, body: nn.Module, layers: str, *, shares_heads: bool) -> TensorPlan | None:
        """Returns the plan that transformers declares, or that the names of linears say; None for neither.

        Args:
            body: of the whole model.
            layers: the name of its list of layers.
        """
        styles = _declared(body.config, "base_model_tp_plan") or {
            _INDEX.sub(".*", name): style for name, style in plain_styles(body.get_submodule(layers), layers).items()
        }
        rope_width = getattr(body.config.get_text_config(), "qk_rope_head_dim", None)
        return cls(family, styles, rope_width, shares_heads) if styles else None

    def split(self, name: str) -> Split:
        """Returns how a module, or a parameter of one, is split.

        Args:
            name: inside the body, such as `layers.3.self_attn.q_proj`.

        Raises:
            UserError: the plan's style for it is none that can be computed.
        """
        pattern = _INDEX.sub(".*", name)
        style = self.styles.get(pattern)
        if style is None or style in ("moe_tp_experts", "replicate", "mla_kv_a_proj"):
            return "whole"
        if style in ("colwise_gather_output", "rowwise_split_input"):
            return self._gated(pattern)
        if style not in _SPLITS:
            raise UserError(
                f"the tensor plan of {self.family} models has {pattern} in style {style}, which is not supported: set "
                "parallel.tensor to 1."
            )
        return _SPLITS[style]

    def _gated(self, pattern: str) -> Split:
        """Returns the split of a linear whose output the plan gathers, or whose input it splits."""
        parent = pattern.rpartition(".")[0]
        pair = (f"{parent}.gate_up_proj", f"{parent}.down_proj")
        if tuple(self.styles.get(name) for name in pair) == ("colwise_gather_output", "rowwise_split_input"):
            return "halves" if pattern == pair[0] else "columns"
        return "whole"

    def shared_width(self, name: str) -> int | None:
        """Returns how many of a linear's last outputs all heads share; None for a linear without such outputs."""
        return self.rope_width if self.styles.get(_INDEX.sub(".*", name)) == "mla_kv_a_proj" else None

    def divides_output(self, name: str) -> bool:
        """Returns whether a module, the same on every rank, adds to an output that is summed over ranks."""
        return self.styles.get(_INDEX.sub(".*", name)) == "moe_identity_expert"

    def sums_experts(self, name: str) -> bool:
        """Returns whether a module's output is a sum over ranks of its experts' parts."""
        return self.styles.get(_INDEX.sub(".*", name)) == "moe_tp_experts"


def _declared(config: Any, name: str) -> dict[str, str]:
    """Returns a plan of transformers' record of a config, or of its text's."""
    return dict(getattr(config, name, None) or getattr(config.get_text_config(), name, None) or {})


class ExpertPlan(frozenset[str]):
    """The modules of a body whose experts ranks may have apart, by names inside it with * in place of numbers."""

    @classmethod
    def of(cls, config: Any) -> ExpertPlan:
        """Returns the plan that transformers' record of a config declares; empty where it declares none."""
        styles = _declared(config, "base_model_ep_plan")
        return cls(name for name, style in styles.items() if style == "ep_dispatch_experts")

    def divides(self, name: str) -> bool:
        """Returns whether it names a module of the body."""
        return _INDEX.sub(".*", name) in self


def parameter_spec(shape: tuple[int, ...], split: Split, tp: Axis, *, name: str) -> ShardSpec:
    """Returns the shard of a parameter that no linear holds, or of a linear's weight; a stack's first dimension are its
    experts.

    Raises:
        UserError: the dimension does not divide over the ranks.
    """
    if split in ("whole", "partial") or tp.size == 1:
        reduce = ("tp",) if split == "partial" else ()
        return replicated_spec(shape, rank=tp.rank, size=tp.size, grad_reduce=reduce)
    stacked = len(shape) == 3
    if split == "columns":
        return split_spec(shape, len(shape) - 1, rank=tp.rank, size=tp.size, what=f"the input width of {name}")
    dim = 1 if stacked else 0
    if split == "rows":
        return split_spec(shape, dim, rank=tp.rank, size=tp.size, what=f"the output width of {name}")
    if split == "column_halves":
        dim = len(shape) - 1
    half = shape[dim] // 2
    if half % tp.size:
        raise UserError(
            f"half of the output width of {name} is {half}, which does not divide over parallel.tensor {tp.size}: use "
            f"a parallel.tensor that divides {half}."
        )
    part = half // tp.size
    local = (*shape[:dim], 2 * part, *shape[dim + 1 :])
    pieces = (Piece(tp.rank * part, 0, part), Piece(half + tp.rank * part, part, part))
    return ShardSpec(global_shape=shape, local_shape=local, dim=dim, pieces=pieces)


def head_split(
    name: str, attention: nn.Module, plain: nn.Linear, split: Split, layout: TensorLayout, *, shares: bool
) -> Split:
    """Returns how a projection is split; of one of queries, keys or values each tensor rank has whole heads.

    Args:
        name: the linear's engine name.
        attention: the module that it is in.
        split: by the plan.
        shares: ranks may have the same head of keys or values, where there are fewer heads than ranks.

    Raises:
        UserError: there are no whole heads for each.
    """
    width, size = getattr(attention, "head_dim", None), layout.tp.size
    if split != "rows" or size == 1 or not isinstance(width, int) or not name.endswith(_HEADS):
        return split
    heads = plain.out_features // width
    if heads % size == 0:
        return split
    if shares and name.endswith(_SHARED) and heads * layout.kv_replica.size == size:
        return "shared"
    raise UserError(
        f"{name} makes {heads} heads, which do not divide over parallel.tensor {size}: use a parallel.tensor that "
        f"divides {heads}."
    )


def _shared_spec(shape: tuple[int, ...], layout: TensorLayout) -> ShardSpec:
    """Returns the shard of a projection with fewer heads than ranks: each has one, as its neighbours do."""
    replicas = layout.kv_replica
    rows = shape[0] * replicas.size // layout.tp.size
    return ShardSpec(
        global_shape=shape,
        local_shape=(rows, *shape[1:]),
        dim=0,
        pieces=(Piece(layout.tp.rank // replicas.size * rows, 0, rows),),
        grad_reduce=("kv_replica",),
        replicated=("kv_replica",),
        owner=replicas.rank == 0,
    )


def parallel_linear(
    name: str, plain: nn.Linear, split: Split, site: int, build: LayerContext
) -> ColumnParallelLinear | RowParallelLinear:
    """Builds the engine's linear in place of one of transformers.

    Args:
        name: its engine name.
        site: dropout site of its input.
    """
    tp = build.layout.tp
    if split == "columns" and tp.size > 1:
        bias = plain.bias is not None
        return RowParallelLinear(name, plain.in_features, plain.out_features, bias=bias, site=site, build=build)
    return parallel_sections({name: plain}, split, site, build)


def parallel_sections(
    plain: Mapping[str, nn.Linear], split: Split, site: int, build: LayerContext
) -> ColumnParallelLinear:
    """Builds one linear in place of several of transformers that take one input, none of whose inputs are split.

    Args:
        plain: engine name -> the linear, in the order of output rows.
        split: of each.
        site: dropout site of the input.
    """
    tp, bias = build.layout.tp, any(one.bias is not None for one in plain.values())
    shapes = {name: (one.out_features, one.in_features) for name, one in plain.items()}
    if split in ("rows", "halves", "shared") and tp.size > 1:
        sections = [
            Section(
                name=name,
                spec=_shared_spec(shape, build.layout)
                if split == "shared"
                else parameter_spec(shape, split, tp, name=name),
            )
            for name, shape in shapes.items()
        ]
        return ColumnParallelLinear(sections, bias=bias, site=site, build=build)
    alone = replace(build, layout=replace(build.layout, tp=Axis("tp"), sequence_parallel=False))
    sections = [Section(name=name, spec=replicated_spec(shape, rank=0, size=1)) for name, shape in shapes.items()]
    linear = ColumnParallelLinear(sections, bias=bias, site=site, build=alone)
    if tp.size > 1:  # every rank computes the same with it, and the first one saves it
        linear.entries[:] = [
            entry._replace(spec=replace(entry.spec, replicated=("tp",), owner=tp.rank == 0)) for entry in linear.entries
        ]
    return linear
