"""Reads and writes adapter_config.json of a PEFT LoRA adapter.

Only adapters that the engine computes the same way are accepted; everything else is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.checkpoint.folder import ADAPTER_CONFIG
from engine.config.hub import instead_of, looks_like_hub_name
from engine.config.lora import adapter_scale
from engine.config.patterns import NamePattern, PatternFlaw, name_pattern
from engine.errors import UserError
from engine.files.documents import read_json
from engine.sentences import as_written

# Keys about who wrote the adapter, where it sits (the tensors' names say that too) or how it is loaded elsewhere.
# fan_in_fan_out says how the base's weight lies in memory, which PEFT itself sets by the kind of module.
# fmt: off
_HARMLESS_KEYS = frozenset((
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type",
))
_READ_KEYS = frozenset((
    "alpha_pattern", "ensure_weight_tying", "lora_alpha", "lora_bias", "lora_dropout", "r", "rank_pattern", "use_dora",
    "use_rslora",
))
# fmt: on
SCORING = "SEQ_CLS"
"""The task of models that score texts."""
_TOO_LARGE = 1e9
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """The settings in an adapter_config.json.

    Args:
        rank, alpha: of modules that no pattern matches.
        rslora: whether the scale is rank-stabilised.
        dora: whether there are magnitudes.
        bias: whether each B has a bias.
        dropout: of the adapters' input.
        ensures_tying: an embedding and its tied head are saved as one matrix.
        rank_pattern, alpha_pattern: end of a module's name in the checkpoint, as an expression -> its rank or alpha.
        has_stacks: whether some adapters are those of parameters (`target_parameters`) that are no linear's.
    """

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    bias: bool
    dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    ensures_tying: bool = False
    has_stacks: bool = False

    @property
    def scale(self) -> float:
        """The factor on B A, where no pattern says otherwise."""
        return adapter_scale(self.rank, self.alpha, rslora=self.rslora)

    def rank_of(self, hf_module: str) -> int:
        """Returns the rank of the adapter on a module of the checkpoint."""
        return _first(self.rank_pattern, self.rank, hf_module)

    def scale_of(self, hf_module: str) -> float:
        """Returns the factor on B A of the adapter on a module of the checkpoint."""
        alpha = _first(self.alpha_pattern, self.alpha, hf_module)
        return adapter_scale(self.rank_of(hf_module), alpha, rslora=self.rslora)


def _first(pattern: Mapping[str, _Number], default: _Number, hf_module: str) -> _Number:
    """Looks a pattern up as PEFT does: the first that matches the whole name, or its end after a dot."""
    return next((value for key, value in pattern.items() if _ending(key).matches(hf_module)), default)


def _ending(key: str) -> NamePattern:
    return name_pattern(rf"(.*\.)?({key})")


def read_settings(folder: Path, *, with_saved_modules: bool) -> PeftSettings:
    """Reads adapter_config.json.

    Args:
        with_saved_modules: whether modules trained in full (`modules_to_save`) are accepted.

    Raises:
        UserError: it is not that of a LoRA adapter, is malformed, or asks for unsupported features.
    """
    path = folder / ADAPTER_CONFIG
    if looks_like_hub_name(folder):
        raise UserError(f"{folder} is not a folder{instead_of(folder, '')}.")
    if not path.is_file():
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}: give the folder of a PEFT LoRA adapter.")
    config = read_json(path)
    if (kind := config.get("peft_type")) != "LORA":
        raise UserError(f"{path} has peft_type {as_written(kind)}: expected LORA, use a LoRA adapter.")
    _refuse_unsupported(path, config, with_saved_modules)
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank < _TOO_LARGE:
        raise UserError(f"{path} has r {as_written(rank)}: expected a whole number of at least 1, correct it.")
    return PeftSettings(
        rank=rank,
        alpha=_number(path, config, "lora_alpha", math.nan),
        rslora=_flag(path, config, "use_rslora"),
        dora=_flag(path, config, "use_dora"),
        bias=_flag(path, config, "lora_bias"),
        dropout=_number(path, config, "lora_dropout", 0.0),
        rank_pattern=_pattern(path, config, "rank_pattern", (int,)),
        alpha_pattern=_pattern(path, config, "alpha_pattern", (int, float)),
        ensures_tying=_flag(path, config, "ensure_weight_tying"),
        has_stacks=any(not str(name).endswith(".weight") for name in config.get("target_parameters") or ()),
    )


def scores_texts(folder: Path) -> bool:
    """Returns whether a PEFT adapter is for a model that scores texts, whose head it saves."""
    path = folder / ADAPTER_CONFIG
    return path.is_file() and read_json(path).get("task_type") == SCORING


def _pattern(path: Path, config: Mapping[str, Any], key: str, kinds: tuple[type, ...]) -> dict[str, Any]:
    pattern = config.get(key) or {}
    if not isinstance(pattern, dict):
        raise UserError(
            f"{path} has {key} {as_written(pattern)}: expected an object of module names and numbers, correct it."
        )
    for name, value in pattern.items():
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < _TOO_LARGE:
            raise UserError(
                f"{path} has {as_written(value)} for {as_written(name)} in {key}: expected a positive number, "
                "correct it."
            )
        try:
            name_pattern(name)
            _ending(name)
        except PatternFlaw as flaw:
            raise UserError(
                f"{path} has {as_written(name)} in {key}, which is no expression that can be matched ({flaw}): "
                "correct it."
            ) from None
    return pattern


def _number(path: Path, config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _TOO_LARGE:
        raise UserError(f"{path} has {key} {as_written(value)}: expected a number, correct it.")
    return float(value)


def _flag(path: Path, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path} has {key} {as_written(value)}: expected true or false, correct it.")
    return bool(value)


def _refuse_unsupported(path: Path, config: Mapping[str, Any], with_saved_modules: bool) -> None:
    if (bias := config.get("bias", "none")) != "none":
        raise UserError(f"{path} has bias {as_written(bias)}, which is not supported: use an adapter with bias none.")
    known = _HARMLESS_KEYS | _READ_KEYS | ({"modules_to_save"} if with_saved_modules else set())
    for key, value in sorted(config.items()):
        if key not in known and value:
            raise UserError(
                f"{path} has {as_written(key)[1:-1]} {as_written(value)}, which is not supported: use an adapter "
                "without it."
            )
    if (init := config.get("init_lora_weights", True)) not in _HARMLESS_INITS:
        # These replace the base's weights by their remainder, so the factors mean nothing beside the plain base.
        raise UserError(
            f"{path} has init_lora_weights {as_written(init)}, which alters the base: "
            "convert it to a plain adapter first (PEFT: path_initial_model_for_weight_conversion)."
        )


def patterns(adapters: Mapping[str, tuple[int, float]], *, rank: int, alpha: float) -> dict[str, dict[str, float]]:
    """Returns rank_pattern and alpha_pattern for an adapter_config.json, without entries equal to the default.

    Args:
        adapters: module of the checkpoint -> rank and alpha of its adapter.
        rank, alpha: the values of "r" and "lora_alpha".
    """
    found = {
        "rank_pattern": _shortened({name: one[0] for name, one in adapters.items()}, rank),
        "alpha_pattern": _shortened({name: one[1] for name, one in adapters.items()}, alpha),
    }
    return {key: pattern for key, pattern in found.items() if pattern}


def _shortened(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Returns the values that are not the default, keyed by the last component of the name where all modules with
    that component agree.
    """
    leaves: dict[str, set[float]] = {}
    for name, value in values.items():
        leaves.setdefault(name.rpartition(".")[2], set()).add(value)
    pattern: dict[str, float] = {}
    for name, value in values.items():
        leaf = name.rpartition(".")[2]
        if not math.isclose(value, default, rel_tol=1e-12):
            value = int(value) if float(value).is_integer() else value
            pattern[leaf if len(leaves[leaf]) == 1 else re.escape(name)] = value
    return pattern
