"""A tensor plan for models of which transformers declares none: what their linears' names say of a plain structure.

Names are a guess. Whether it is right the proof at the start finds, which compares tensor ranks with transformers.
"""

from __future__ import annotations

import inspect

from torch import nn

from engine.layers.plain_module import is_linear

_FIRST_AND_LAST: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"gate_proj", "up_proj"}), frozenset({"down_proj"})),
    (frozenset({"up_proj"}), frozenset({"down_proj"})),
    (frozenset({"w1", "w3"}), frozenset({"w2"})),
    (frozenset({"fc1"}), frozenset({"fc2"})),
    (frozenset({"fc_in"}), frozenset({"fc_out"})),
    (frozenset({"c_fc"}), frozenset({"c_proj"})),
    (frozenset({"dense_h_to_4h"}), frozenset({"dense_4h_to_h"})),
    (frozenset({"intermediate.dense"}), frozenset({"output.dense"})),
)
"""Names of an MLP's linears that its input goes into, and of those that make its output."""
_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj"})
_OUTPUTS = (frozenset({"o_proj"}), frozenset({"out_proj"}))


def plain_styles(layers: nn.Module, prefix: str) -> dict[str, str]:
    """Returns the styles of a plan, by names inside the body; none where nothing is plain.

    Args:
        layers: of the whole model.
        prefix: their list's name inside the body.
    """
    styles: dict[str, str] = {}
    for index, layer in layers.named_children():
        for name, module in layer.named_modules():
            within = ".".join(filter(None, (prefix, index, name))) + "."
            linears = {child for child, one in module.named_modules() if is_linear(one) and child.count(".") < 2}
            if any(linears == _PROJECTIONS | output for output in _OUTPUTS) and _splits(module):
                first = _PROJECTIONS
                others = [child for child, _ in module.named_children() if child not in linears]
                shared = (within.rstrip("."), *(f"{within}{child}" for child in others))
                styles |= dict.fromkeys(shared, "replicated_with_grad_allreduce")
            else:
                found = (pair for pair in _FIRST_AND_LAST if pair[0] | pair[1] <= linears)
                first, last = next(found, (frozenset(), frozenset()))
                linears = {*first, *last}
            styles |= {f"{within}{child}": "colwise" if child in first else "rowwise" for child in linears}
    return styles


def _splits(attention: nn.Module) -> bool:
    """Returns whether an attention's forward takes as many heads as its projections make, with nothing else by head."""
    source = inspect.getsource(type(attention).forward)
    by_width = "-1, self.head_dim" in source and "self.num_heads" not in source
    return by_width and not list(attention.parameters(recurse=False))
