"""LoRA options: where adapters sit, their rank, scale and form (arXiv 2106.09685)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from engine.choices import ExpertFactors
from engine.config.checks import require, require_at_least, require_choices, require_positive
from engine.config.matching import BLOCK_LINEARS, matches_target
from engine.config.option import IGNORED, REPORTED, option
from engine.config.patterns import PatternFlaw, name_pattern
from engine.sentences import as_written

Fused = Literal["auto", "none", "qkv", "gate_up", "all"]

_ALTERING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
Number = TypeVar("Number", int, float)
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """LoRA: low-rank adapters beside frozen linears, y = x W^T + scale * (dropout(x) A^T) B^T.

    Args:
        rank: Rank of the adapters; 0 trains none (trainable then names the trained modules).
        alpha: Numerator of the scale: alpha / rank, or alpha / sqrt(rank) with lora.rslora.
        dropout: Probability that an input feature of an adapter is dropped during training, 0 to below 1.
        targets: Modules that get an adapter, as names (q_proj) or regular expressions that match the whole name
            (.*self_attn\\.(q|v)_proj), in the engine's or the checkpoint's spelling; all-linear means every linear of
            the layers. lm_head and embed_tokens can be targets too.
        exclude: Modules that get no adapter even if lora.targets matches them, written in the same way.
        layers: Indices, from 0, of the layers whose modules get adapters; null means all layers.
        rank_pattern: Ranks that differ from lora.rank, by module name or expression as in lora.targets, such as
            {down_proj: 32}; the first that matches a module counts. null for none.
        alpha_pattern: Alphas that differ from lora.alpha, in the same way.
        rslora: Scale by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732).
        dora: Use DoRA: train the magnitude of each output row separately from its direction (arXiv 2402.09353). Dropout
            still acts on the adapter's input alone, where PEFT's also drops the base's.
        bias: Give each adapter a bias, trained and scaled with it; not with lora.dora.
        init: Initial values of A: "kaiming" is uniform, as PEFT has it by default; "gaussian" is normal with standard
            deviation 1 / rank. B starts at zero (for an embedding, A is zero and B is drawn).
        fused: Which projections share one adapter, with one A: "qkv" query, key and value, "gate_up" gate and up, "all"
            both, and key and value of attention to encoded images, "none" none of them. "auto" follows PEFT:
            one adapter where the checkpoint stores several projections as one matrix (Phi-3's qkv_proj and
            gate_up_proj) and all of them are targets; with lora.init_from, wherever that adapter is fused.
        experts: Which factors the adapters of a layer's experts share, where a router chooses these: "per_expert" none,
            "shared_outer" A of gate and up and B of down, the factors on the side of the residual stream, "shared"
            both. lora.fused decides whether gate and up have one A.
        merge_aware: Compute, forward and backward, with the merged weights of linears that are stored encoded, rounded
            as a merged checkpoint in the base's format has them (model.base_dtype): that checkpoint then is the model
            that was trained, bit for bit. A step takes longer, since each product makes its weight from the base and
            the adapters. Not with lora.dropout, lora.dora or lora.bias.
        ensure_weight_tying: Train an embedding and the head that the model ties to it as one matrix, where trainable
            names one of them. By default, as in PEFT, a copy of the named matrix is trained, and the other stays as it
            is. Without adapters they stay tied.
        init_from: Folder of a PEFT adapter to start from, or its name on the hub; null starts from fresh adapters.
    """

    rank: int = option(16, REPORTED)
    alpha: float = option(32.0, REPORTED)
    dropout: float = option(0.0, REPORTED)
    targets: tuple[str, ...] = option(BLOCK_LINEARS, REPORTED)
    exclude: tuple[str, ...] = option((), REPORTED)
    layers: tuple[int, ...] | None = option(None, REPORTED)
    rank_pattern: dict[str, int] | None = option(None, REPORTED)
    alpha_pattern: dict[str, float] | None = option(None, REPORTED)
    rslora: bool = option(False, REPORTED)
    dora: bool = option(False, REPORTED)
    bias: bool = option(False, REPORTED)
    init: str = option("kaiming", IGNORED)  # factors come from the checkpoint
    fused: Fused = option("auto", REPORTED)
    experts: ExpertFactors = option("per_expert", REPORTED)
    merge_aware: bool = option(False, REPORTED)
    ensure_weight_tying: bool = option(False, REPORTED)
    init_from: str | None = option(None, IGNORED)  # factors come from the checkpoint

    def __post_init__(self) -> None:
        require_choices("lora", self)
        require_at_least("lora.rank", self.rank, 0, "use for example 16, or 0 for no adapters")
        require_positive("lora.alpha", self.alpha, "use for example twice lora.rank")
        require(
            0 <= self.dropout < 1,
            f"lora.dropout is {self.dropout}, but a probability from 0 to below 1 is expected: use for example 0.05.",
        )
        require(
            not isinstance(self.targets, str),
            f"lora.targets is the text {self.targets!r}, but a list is expected: write [{self.targets}].",
        )
        for target in self.targets:
            _check_target("lora.targets", target)
        for target in self.exclude:
            _check_target("lora.exclude", target)
        for layer in self.layers or ():
            require_at_least("lora.layers", layer, 0, "layers are counted from 0")
        for target, rank in (self.rank_pattern or {}).items():
            _check_target("lora.rank_pattern", target)
            require_at_least(f"lora.rank_pattern of {target}", rank, 1, "use for example 16, or lora.exclude for none")
        for target, alpha in (self.alpha_pattern or {}).items():
            _check_target("lora.alpha_pattern", target)
            require_positive(f"lora.alpha_pattern of {target}", alpha, "use for example twice the rank")
        require(
            not self.init.startswith(_ALTERING_INITS),
            f"lora.init is {self.init}, which changes the base that it starts from: use kaiming or gaussian, or let "
            "PEFT start, convert the result to a plain adapter (path_initial_model_for_weight_conversion), and name "
            "its folder in lora.init_from.",
        )
        require(
            self.init in ("kaiming", "gaussian"),
            f"lora.init is {self.init!r}, but it must be one of kaiming, gaussian: choose one of them.",
        )
        require(
            not (self.bias and self.dora),
            "lora.bias and lora.dora are true, but a DoRA adapter has no bias: set one of them to false.",
        )
        for name, value, why in (
            ("dropout", self.dropout, "a merged weight drops no inputs"),
            ("dora", self.dora, "DoRA needs the lengths of rows of an encoded base"),
            ("bias", self.bias, "a linear without a bias has none in a merged checkpoint"),
        ):
            require(
                not (self.merge_aware and value),
                f"lora.merge_aware is true and lora.{name} is {as_written(value)}, but {why}: set lora.{name} to "
                f"{'0' if name == 'dropout' else 'false'}, or lora.merge_aware to false.",
            )

    def targets_module(self, module: str, aliases: Sequence[str] = ()) -> bool:
        """Returns whether an adapter sits on `module`.

        Args:
            module: full name in the engine.
            aliases: further full names of it.
        """
        layer = _LAYER.match(module)
        in_layers = self.layers is None or (layer is not None and int(layer[1]) in self.layers)
        excluded = matches_target(module, self.exclude, aliases)
        return in_layers and not excluded and matches_target(module, self.targets, aliases)

    def rank_of(self, module: str, aliases: Sequence[str] = ()) -> int:
        """Returns the rank of the adapter on `module`; arguments as for `targets_module`."""
        return patterned(self.rank_pattern, self.rank, module, aliases)

    def scale_of(self, module: str, aliases: Sequence[str] = ()) -> float:
        """Returns the factor on the output of the adapter on `module`; arguments as for `targets_module`."""
        alpha = patterned(self.alpha_pattern, self.alpha, module, aliases)
        return adapter_scale(self.rank_of(module, aliases), alpha, rslora=self.rslora)


def adapter_scale(rank: int, alpha: float, *, rslora: bool) -> float:
    """Returns the factor on B A; 0 without adapters."""
    if rank == 0:
        return 0.0
    return alpha / (rank**0.5 if rslora else rank)


def patterned(pattern: Mapping[str, Number] | None, default: Number, module: str, aliases: Sequence[str]) -> Number:
    """Returns the value of the first key that matches `module`, as a target does; `default` where none does.

    Args:
        pattern: `lora.rank_pattern` or `lora.alpha_pattern`.
        default: of all other modules.
        module, aliases: as for `LoraOptions.targets_module`.
    """
    return next((value for key, value in (pattern or {}).items() if matches_target(module, (key,), aliases)), default)


def _check_target(option: str, target: str) -> None:
    # the parser leaves the keys of a mapping as YAML reads them
    require(
        isinstance(target, str),
        f"{option} contains {target!r}, but names are expected: put it in quotes where it is one.",
    )
    require(bool(target), f"{option} contains an empty name, but module names are expected: remove it.")
    try:
        name_pattern(target)
    except PatternFlaw as flaw:
        shown = target if len(target) <= 80 else f"{target[:80]}..."
        require(
            False,
            f"{option} contains {shown!r}, which is not a valid regular expression ({flaw}): "
            "write a module name such as q_proj, or correct the expression.",
        )
