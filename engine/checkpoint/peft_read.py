"""A PEFT LoRA adapter folder as a source of tensors by logical name.

An adapter on a fused module (`qkv_proj`, `gate_up_proj`) stands for adapters of its parts. They share A; or, where it
has the sum of their ranks, each has its own rows of A and columns of B, and B is zero elsewhere.

Only what the engine computes the same way is accepted; everything else in adapter_config.json is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.folder import ADAPTER_CONFIG
from engine.checkpoint.merge import LORA_A, LORA_B, adapted_modules, qkv_rows, unfused_modules
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import SafetensorsReader
from engine.errors import UserError
from engine.models.config import DecoderConfig
from engine.models.names import FUSED, QKV, NameMap, fused_parts, part_rows

ADAPTER_WEIGHTS = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."

_KEY = re.compile(r"^base_model\.model\.(.+)\.(?:(lora_[AB])\.weight|lora_embedding_([AB]))$")

# What says who wrote the adapter, where it sits (the tensors' names say that too) or how it is loaded elsewhere.
# fmt: off
_HARMLESS_KEYS = frozenset((
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
))
# fmt: on
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """What an adapter_config.json says: rank, lora_alpha, whether it is rank-stabilised, and its dropout."""

    rank: int
    alpha: float
    rslora: bool
    dropout: float

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class _Place(NamedTuple):
    """A tensor inside a stored one: these rows and columns of it, all where None."""

    key: str
    rows: slice = slice(None)
    columns: slice = slice(None)


class AdapterSource(TensorReader):
    """The factors in a PEFT folder: `<module>.lora_A` [r, in] and `<module>.lora_B` [out, r].

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        names: of the base, whose modules the adapter sits on.
        decoder: of the base.
        fused_qkv: present adapters of query, key and value as the one at `...qkv_proj`; needs equal A factors.
        with_saved_modules: take modules that were trained in full (`modules_to_save`) too, as `<module>.weight`.

    Raises:
        UserError: the folder is not a LoRA adapter for this model, or uses a PEFT feature that is not supported.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        names: NameMap,
        decoder: DecoderConfig,
        fused_qkv: bool = False,
        with_saved_modules: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.settings = _read_settings(self.folder, with_saved_modules)
        if (self.folder / "adapter_model.bin").is_file() and not (self.folder / ADAPTER_WEIGHTS).is_file():
            raise UserError(
                f"{self.folder} holds adapter_model.bin, a pickle, which is never opened here: "
                f"save the adapter as {ADAPTER_WEIGHTS} first (PEFT: save_pretrained)."
            )
        self._file = SafetensorsReader(self.folder / ADAPTER_WEIGHTS)
        present = [fused for fused in FUSED if any(f".{_leaf(fused)}.lora_" in key for key in self._file.names())]
        names = replace(names, rows=part_rows(decoder)).fuse(present)
        self._places: dict[str, tuple[_Place, ...]] = {
            _logical_name(key, names, self._file.path, with_saved_modules): (_Place(key),) for key in self._file.names()
        }
        if decoder.tied_embeddings and "embed_tokens.weight" in self:
            raise UserError(
                f"{self.folder} saves an embedding that the base ties to its head, and does not say which of the two "
                "it means: train with ensure_weight_tying, or save the head."
            )
        self._decoder = decoder
        for module in self.modules():
            self._split(module, keep_qkv=fused_qkv)
        self._check_pairs()
        if fused_qkv:
            self._fuse()

    @property
    def label(self) -> str:
        return str(self.folder)

    def modules(self) -> list[str]:
        """Engine modules that have an adapter here."""
        return adapted_modules(self.tensor_names())

    def require_matching(self, *, rank: int, alpha: float, rslora: bool, modules: Collection[str]) -> None:
        """Raises UserError unless the adapter is what a run with these settings would train.

        Args:
            rank, alpha, rslora: the run's `lora` section.
            modules: engine modules that the run adapts.
        """
        found = self.settings
        for key, here, wanted in (
            ("rank", found.rank, rank),
            ("alpha", found.alpha, alpha),
            ("rslora", found.rslora, rslora),
        ):
            if here != wanted:
                raise UserError(
                    f"lora.{key} is {_show(wanted)}, but the adapter in {self.folder} has {_show(here)}: "
                    f"set lora.{key} to {_show(here)}."
                )
        if missing := sorted(set(modules) - set(self.modules())):
            raise UserError(
                f"lora.targets asks for {missing[0]}, which the adapter in {self.folder} does not have: "
                "set lora.targets to the adapter's own modules."
            )
        if extra := sorted(set(self.modules()) - set(modules)):
            raise UserError(
                f"the adapter in {self.folder} has {extra[0]}, which lora.targets does not ask for: "
                "set lora.targets to the adapter's own modules."
            )

    def tensor_names(self) -> list[str]:
        return sorted(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        first, *more = (self._view(place).shape for place in self._places[name])
        return (first[0] + sum(shape[0] for shape in more), *first[1:])

    def dtype(self, name: str) -> torch.dtype:
        return self._file.dtype(self._places[name][0].key)

    def boxes(self, name: str) -> Sequence[Box]:
        if len(self._places[name]) == 1:
            return (Box(),)
        rows = qkv_rows(self._decoder).values()
        return tuple(Box(0, start, stop - start) for start, stop in rows)

    def view(self, name: str, index: int, *, whole: bool) -> Tensor:
        return self._view(self._places[name][index])

    def _view(self, place: _Place) -> Tensor:
        return self._file.view(place.key)[place.rows, place.columns]

    def _split(self, module: str, *, keep_qkv: bool) -> None:
        """Puts the parts of a fused module in its place."""
        parts, rank = fused_parts(module), self.settings.rank
        (a,), (b,) = (self._places.get(f"{module}.{leaf}", (None,)) for leaf in (LORA_A, LORA_B))
        if parts == [module] or a is None or b is None:
            return
        blocks = self._view(a).shape[0] == len(parts) * rank
        if keep_qkv and module.endswith(QKV) and not blocks:
            return
        del self._places[f"{module}.{LORA_A}"], self._places[f"{module}.{LORA_B}"]
        first, inside = 0, 0
        for number, part in enumerate(parts):
            count = part_rows(self._decoder)[part.split(".", 2)[2]]
            rows, block = slice(first, first + count), slice(number * rank, (number + 1) * rank)
            own_a = a._replace(rows=block) if blocks else a
            own_b = b._replace(rows=rows, columns=block if blocks else slice(None))
            inside += int(self._view(own_b).count_nonzero()) if blocks else 0
            first += count
            if not blocks or self._view(own_a).any():  # a part without an adapter has zeros
                self._places[f"{part}.{LORA_A}"], self._places[f"{part}.{LORA_B}"] = (own_a,), (own_b,)
        if blocks and inside != int(self._view(b).count_nonzero()):
            raise UserError(
                f"{self._file.path} has rank {len(parts) * rank} at {module}, with a B that mixes its parts' blocks: "
                f"use an adapter of rank {rank} there."
            )

    def _check_pairs(self) -> None:
        for module in self.modules():
            for leaf in (LORA_A, LORA_B):
                if f"{module}.{leaf}" not in self:
                    raise UserError(f"{self._file.path} lacks {leaf} of {module}: use a whole adapter.")
            ranks = self.shape(f"{module}.{LORA_A}")[0], self.shape(f"{module}.{LORA_B}")[-1]
            if set(ranks) != {self.settings.rank}:
                raise UserError(
                    f"{self._file.path} has rank {ranks[0]} at {module}, but {ADAPTER_CONFIG} says r "
                    f"{self.settings.rank}: use an adapter whose ranks are all equal."
                )

    def _fuse(self) -> None:
        separate = [module for module in self.modules() if _leaf(module) in ("q_proj", "k_proj", "v_proj")]
        for parent in dict.fromkeys(module.rpartition(".")[0] for module in separate):
            parts = unfused_modules(f"{parent}.qkv_proj")
            factors = [f"{part}.{LORA_A}" for part in parts]
            if any(name not in self for name in factors) or not all(
                torch.equal(self.read_whole(name), self.read_whole(factors[0])) for name in factors[1:]
            ):
                raise UserError(
                    f"lora.fused_qkv is true, but the adapter in {self.folder} has no A factor that {', '.join(parts)} "
                    "share: set lora.fused_qkv to false."
                )
            self._places[f"{parent}.qkv_proj.{LORA_A}"] = self._places[factors[0]]
            self._places[f"{parent}.qkv_proj.{LORA_B}"] = tuple(self._places[f"{part}.{LORA_B}"][0] for part in parts)
            for part in parts:
                del self._places[f"{part}.{LORA_A}"], self._places[f"{part}.{LORA_B}"]


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def block_patterns(rank: int, alpha: float, *, rslora: bool, leaves: Collection[str]) -> dict[str, dict[str, float]]:
    """What adapter_config.json says of fused modules whose adapter is a block for each part, all with one scale.

    Args:
        leaves: last components of those modules.
    """
    counts = {_leaf(fused): len(parts) for fused, parts in FUSED.items() if _leaf(fused) in leaves}
    if not counts:
        return {}
    return {
        "rank_pattern": {leaf: count * rank for leaf, count in counts.items()},
        "alpha_pattern": {leaf: alpha * (math.sqrt(count) if rslora else count) for leaf, count in counts.items()},
    }


def _has_block_patterns(config: dict[str, Any]) -> bool:
    """Whether the patterns are those of `block_patterns`."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora", False))
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or ranks.keys() != alphas.keys():
        return False
    expected = block_patterns(rank, alpha, rslora=rslora, leaves=list(ranks))
    return expected.get("rank_pattern", {}) == ranks and all(
        math.isclose(alphas[leaf], value) for leaf, value in expected.get("alpha_pattern", {}).items()
    )


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _logical_name(key: str, names: NameMap, path: Path, with_saved_modules: bool) -> str:
    saved, _, leaf = key.removeprefix(KEY_PREFIX).rpartition(".")
    if with_saved_modules and leaf in ("weight", "bias") and ".lora_" not in key and names.module_from_hf(saved):
        return f"{names.module_from_hf(saved)}.{leaf}"
    match = _KEY.match(key)
    module = names.module_from_hf(match[1]) if match else None
    if match is None or module is None:
        raise UserError(
            f"{path} has {key}, which is not a LoRA factor of a module of this model: "
            "use a LoRA adapter that was trained on it."
        )
    return f"{module}.{match[2] or 'lora_' + match[3]}"


def _read_settings(folder: Path, with_saved_modules: bool) -> PeftSettings:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}: expected the folder of a PEFT LoRA adapter, mend the path.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise UserError(f"{path} is not valid JSON ({error}): copy it again.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError(f"{path} has peft_type {kind!r}: expected LORA, use a LoRA adapter.")
    _refuse_unsupported(path, config, {"modules_to_save"} if with_saved_modules else set())
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise UserError(f"{path} has r {rank!r} and lora_alpha {alpha!r}: expected a positive number each, mend them.")
    return PeftSettings(
        rank=rank,
        alpha=float(alpha),
        rslora=bool(config.get("use_rslora", False)),
        dropout=float(config.get("lora_dropout", 0.0)),
    )


def _refuse_unsupported(path: Path, config: dict[str, Any], also: set[str]) -> None:
    if (bias := config.get("bias", "none")) != "none":
        raise UserError(f"{path} has bias {bias!r}, which is not supported: use an adapter with bias none.")
    known = also | ({"rank_pattern", "alpha_pattern"} if _has_block_patterns(config) else set())
    for key, value in sorted(config.items()):
        if key not in _HARMLESS_KEYS and key not in known and value:
            raise UserError(f"{path} has {key} {value!r}, which is not supported: use a plain LoRA adapter.")
    if (init := config.get("init_lora_weights", True)) not in _HARMLESS_INITS:
        # These replace the base's weights by their remainder, so the factors mean nothing beside the plain base.
        raise UserError(
            f"{path} has init_lora_weights {init!r}, which alters the base: "
            "convert it to a plain adapter first (PEFT: path_initial_model_for_weight_conversion)."
        )
