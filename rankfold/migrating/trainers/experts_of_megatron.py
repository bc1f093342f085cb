"""Rules for Megatron-LM's flags of experts that a router chooses.

Its auxiliary loss is a sum over layers, each

    loss = c E sum_e f_e P_e        f_e = choices of expert e / (tokens x k)

for the tokens of a micro-batch. Ours has all layers and the global batch in one mean, and k in f. So where the experts'
shares are alike in all layers, ours is Megatron's with c x layers / k.
"""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, number
from rankfold.migrating.given import Given

_COEFFICIENT = "train.router_aux_loss_coef"
_LOSSES = {
    "aux_loss": "each micro-batch", "seq_aux_loss": "each sequence", "global_aux_loss": "all micro-batches so far",
}  # fmt: skip
"""Kinds of the loss -> whose tokens it counts together."""
_NO_DROPS = "no token is dropped: each goes to all experts that its router chose"


def capacity(conversion: Conversion, given: Given) -> None:
    if given.value is None or number(given) < 0:
        conversion.drop(given, "switched off")
    else:
        conversion.unsupported(given, _NO_DROPS)


def finish(conversion: Conversion) -> None:
    """Sets the coefficient of the routers' auxiliary loss, or reports a setting that has no counterpart."""
    facts = conversion.facts
    kinds = facts.get("router_losses", ["aux_loss"])
    coefficients = facts.get("router_coefficients", [0.0])
    if len(coefficients) == 1:
        coefficients = coefficients * len(kinds)
    used = [(kind, one) for kind, one in zip(kinds, coefficients, strict=False) if kind in _LOSSES and one]
    if "sinkhorn" in kinds:
        conversion.notes.append(
            "moe_router_load_balancing_type sinkhorn has no counterpart, and the run will differ: routers choose the "
            "experts with the largest scores"
        )
    if not used:
        return
    coefficient = sum(one for _, one in used)
    layers, chosen = _mixtures(conversion), facts.get("router_topk", 2)
    if layers is None:
        conversion.set_default("derived", "moe_aux_loss_coeff", _COEFFICIENT, coefficient)
        conversion.to_fill.append(
            f"{_COEFFICIENT}: times the number of layers with experts and divided by the experts of a token; the flags "
            "do not say both"
        )
    else:
        value = float(f"{coefficient * layers / chosen:.6g}")
        note = f"{coefficient:g} x {layers} layers with experts / {chosen} experts a token"
        conversion.set_default("derived", "moe_aux_loss_coeff", _COEFFICIENT, value, note)
    conversion.notes.append(
        f"Megatron's {' and '.join(kind for kind, _ in used)} counts each layer by itself, in "
        f"{' and '.join(dict.fromkeys(_LOSSES[kind] for kind, _ in used))}: here the routers' loss is over the global "
        "batch and all layers at once"
    )


def _mixtures(conversion: Conversion) -> int | None:
    """Returns the number of layers with experts; None where the flags do not give it in numbers."""
    layers, every = conversion.facts.get("shape_num_hidden_layers"), conversion.facts.get("mixture_every", "1")
    if layers is None or not str(layers).isdecimal() or not every.isdecimal() or not int(every):
        return None
    return -(-int(layers) // int(every))
