"""Hunyuan's mixtures: the dense models' attention, and experts beside an MLP that all tokens have in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UserError
from engine.experts.families.routed import read_routed, routed_sizes
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.hunyuan import DEFAULTS, MODULES, hunyuan_switches
from engine.models.families.reading import decoder_config, filled
from engine.models.names import NameMap
from engine.sentences import listed

_LINEARS = ("gate_proj", "up_proj", "down_proj")
NAMES = NameMap(
    layer_modules={
        **{name: place for name, place in MODULES.items() if not name.startswith("mlp.")},
        "mlp.router": "mlp.gate.wg",
        **{f"mlp.experts.*.{name}": f"mlp.experts.*.{name}" for name in _LINEARS},
        **{f"mlp.shared_expert.{name}": f"mlp.shared_mlp.{name}" for name in _LINEARS},
    }
)
_COUNTS = {"num_experts": "num_local_experts", "moe_topk": "num_experts_per_tok"}
"""What every layer has one of -> what others call it."""


def _counts(hf: Mapping[str, Any]) -> dict[str, set[int]]:
    """Returns the experts of layers and of tokens, which configs may list by layer, by the names of others."""
    found = {}
    for key, usual_name in _COUNTS.items():
        given = next((hf[name] for name in (key, usual_name) if hf.get(name) is not None), 1)
        found[usual_name] = set(given if isinstance(given, list) else [given])
    return found


def hunyuan_v1_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a mixture of Hunyuan.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    counts = _counts(hf)
    hf = {key: value for key, value in hf.items() if key not in (*_COUNTS, "moe_intermediate_size")}
    hf = read_routed(filled(hf, DEFAULTS), {}, ("output_router_logits",))
    for key, values in counts.items():
        if len(values) != 1:
            raise UserError(
                f"config.json has layers with {listed(sorted(values))} for {key}, but those of all layers "
                "are expected to be alike here: set model.implementation to auto or adopted."
            )
        (hf[key],) = values
    intermediate = int(hf["intermediate_size"])
    sizes = routed_sizes(
        hf,
        usual=1,
        intermediate=intermediate,
        renormalises=True,
        rounds=False,
        rule={"wide": True},
        shared=intermediate,
        gates_shared=False,
    )
    return decoder_config(hf, "hunyuan_v1_moe", variants=(sizes,), **hunyuan_switches(hf))


def _computes(hf: Mapping[str, Any]) -> bool:
    """Returns whether all layers have equally many experts, and tokens."""
    return all(len(values) == 1 for values in _counts(hf).values())


FAMILY = Family(hunyuan_v1_moe, NAMES, computes=_computes)
