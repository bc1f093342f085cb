"""A PEFT LoRA adapter folder as a source of tensors by logical name.

An adapter on a fused module (`qkv_proj`, `gate_up_proj`) can be read as it is, or as adapters of the parts. These share
A; or, where it has the sum of their ranks, each has its own rows of A and columns of B, and B is zero elsewhere.

Over a base that ties its head to its embedding, a folder that saves one of them has a copy of it, and leaves the base's
matrix to the other. With ensure_weight_tying it saves both, equal, which are one matrix here too.

Only adapters that the engine computes the same way are accepted (`engine.conversion.peft_config`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.folder import ADAPTER_CONFIG
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import SafetensorsReader
from engine.checkpoint.untied import untied
from engine.checkpoint.weight_source import SHARED, TIED_HEAD, WeightSource
from engine.choices import VISION
from engine.conversion.expert_stacks import (
    GATE_UP,
    StoredStack,
    expert_module,
    expert_sizes,
    in_turns,
    is_stack,
    router_key,
    stored_stacks,
)
from engine.conversion.lora_scales import Scale, one_or_each
from engine.conversion.merged_model import LORA_A, LORA_B, LORA_BIAS, LORA_MAGNITUDE, adapted_modules
from engine.conversion.peft_config import read_settings
from engine.errors import UserError
from engine.layers.context import LORA_LEAVES
from engine.models.decoder_config import DecoderConfig
from engine.models.names import FUSED, NameMap, fused_parts, fused_rows

ADAPTER_WEIGHTS = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."

_COPY = ".base_layer.weight"
_KEY = re.compile(
    r"^base_model\.model\.(.+)\.(?:(lora_[AB])\.weight|lora_embedding_([AB])|(lora_magnitude)_vector|lora_B\.(bias))$"
)


class _Place(NamedTuple):
    """The place of a tensor inside a stored one: rows and columns, of one of the experts where all are in it.

    Args:
        turns: rows of two halves take turns there, and are one half after the other here.
        experts: of a factor on a stack of transformers' model, which is [rank, experts, in] or [out, experts, rank]
            here; 0 for another tensor.
    """

    key: str
    rows: slice = slice(None)
    columns: slice = slice(None)
    expert: int | None = None
    turns: bool = False
    experts: int = 0


class _Adapter(NamedTuple):
    """An adapter on one module.

    Args:
        rank, scale: of it.
        leaves: its tensors by leaf, of `LORA_LEAVES`; several places lie one below the other.
    """

    rank: int
    scale: float
    leaves: dict[str, tuple[_Place, ...]]


class AdapterSource(TensorReader):
    """The tensors of a PEFT folder: `<module>.lora_A` [r, in], `<module>.lora_B` [out, r] and, where
    it is DoRA, `<module>.lora_magnitude` [out].

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        names: of the base, whose modules the adapter sits on.
        decoder: of the base.
        fused: the modules such as `layers.3.attention.qkv_proj` that are presented with one adapter over their parts;
            where these have an adapter each, their A factors must be equal. None for those that the folder stores so,
            unless B has a block for each part.
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
        fused: Collection[str] | None = (),
        with_saved_modules: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.settings = read_settings(self.folder, with_saved_modules=with_saved_modules)
        self._file = adapter_file(self.folder)
        # PEFT's all-linear finds modules, too, that nothing is computed with
        read = [key for key in self._file.names() if not names.is_unused(key.removeprefix(KEY_PREFIX))]
        keys = [key for key in read if not key.endswith(_COPY)]
        self._copies = [key for key in self._file.names() if key.endswith(_COPY)]
        present = [fused for fused in FUSED if any(f".{fused.rpartition('.')[2]}.lora_" in key for key in keys)]
        names = names.spelled_as([key.removeprefix(KEY_PREFIX) for key in keys]).fuse(present)
        stacks = stored_stacks(keys, self._file.shape, names, decoder, KEY_PREFIX)
        on_parameters = self._on_parameters(keys, names)
        if self.settings.has_stacks and not stacks and not on_parameters:
            raise UserError(
                f"{self.folder} says target_parameters in its adapter_config.json, but has no adapter on a stack of "
                "this model's experts: remove it there, or give the model that the adapter is for."
            )
        stacked = {key for one in stacks for key in one.keys.values()} | {one.key for one in on_parameters.values()}
        places: dict[str, tuple[_Place, ...]] = {name: (place,) for name, place in on_parameters.items()}
        for key in (key for key in keys if key not in stacked):
            name = _logical_name(key, names, self._file.path, with_saved_modules)
            if other := places.get(name):
                raise UserError(
                    f"{self._file.path} has {other[0].key} and {key}, which are the same tensor of the model: remove "
                    "one."
                )
            places[name] = (_Place(key),)
        self._names, self._decoder = names, decoder
        if decoder.tied_embeddings and self.settings.ensures_tying:
            self._tie(places)
        self._adapters: dict[str, _Adapter] = {}
        for module in adapted_modules(sorted(places)):
            leaves = {leaf: places.pop(name) for leaf in LORA_LEAVES if (name := f"{module}.{leaf}") in places}
            rank, scale = self._stated(names.module_to_hf(module))
            self._adapters |= self._split(module, _Adapter(rank, scale, leaves), fused)
        for one in stacks:
            self._adapters |= self._take_apart(one, fused)
        for module in self.modules():
            self._check(module, self._adapters[module])
        for module in fused or ():
            self._fuse(module)
        own = {
            f"{module}.{leaf}": found for module, one in self._adapters.items() for leaf, found in one.leaves.items()
        }
        self._places = places | own

    def _on_parameters(self, keys: Sequence[str], names: NameMap) -> dict[str, _Place]:
        """Returns the factors on stacks that are parameters of transformers' model, by name.

        Of two adapted parameters of a module PEFT wraps the first one inside the other's wrapper.
        """
        found: dict[str, _Place] = {}
        of_module: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in names.stack_shapes().items():
            module, _, leaf = name.rpartition(".")
            of_module.setdefault(module, {})[leaf] = shape
        for module, leaves in of_module.items():
            for inside in ("", ".base_layer"):
                a, b = (f"{KEY_PREFIX}{module}{inside}.{leaf}.weight" for leaf in (LORA_A, LORA_B))
                if a not in keys or b not in keys:
                    continue
                sizes = self._file.shape(b)[0], self._file.shape(a)[1]
                fitting = [leaf for leaf, shape in leaves.items() if shape[1:] == sizes]
                if not fitting or self._file.shape(a)[0] % leaves[fitting[0]][0]:
                    raise UserError(
                        f"{self._file.path} has {a} {list(self._file.shape(a))} and {b} {list(self._file.shape(b))}, "
                        f"which fit no parameter of {module}: use an adapter that was trained on this model."
                    )
                leaf = fitting[0] if inside else fitting[-1]
                for factor, key in ((LORA_A, a), (LORA_B, b)):
                    engine_module = names.module_from_hf(f"{module}.{leaf}")
                    found[f"{engine_module}.{factor}"] = _Place(key, experts=leaves[leaf][0])
        return found

    @property
    def label(self) -> str:
        return str(self.folder)

    def modules(self) -> list[str]:
        """Returns the engine modules that have an adapter here."""
        return sorted(self._adapters)

    @property
    def scale(self) -> Scale:
        """The factor on the adapters' B A."""
        return one_or_each({module: one.scale for module, one in sorted(self._adapters.items())}, self.settings.scale)

    def on(self, base: WeightSource) -> WeightSource:
        """Returns the base that the adapter belongs to: with a head of its own where the folder saves a copy of one
        side of a tied matrix.

        Raises:
            UserError: as `require_base`.
        """
        apart = not self.settings.ensures_tying and {SHARED, TIED_HEAD} & set(self._places)
        base = untied(base) if apart else base
        self.require_base(base)
        return base

    def require_base(self, base: TensorReader) -> None:
        """Raises UserError where the folder has a copy of a base weight that differs from the base's.

        PEFT keeps such copies of an embedding and a head that have adapters, because a user may have enlarged them.
        """
        for key in self._copies:
            module = self._names.module_from_hf(key.removeprefix(KEY_PREFIX).removesuffix(_COPY))
            name = f"{module}.weight"
            name = SHARED if name == TIED_HEAD and name not in base else name
            copy = self._file.view(key)
            if module is None or name not in base or not torch.equal(base.read_whole(name).to(copy.dtype), copy):
                raise UserError(
                    f"{self._file.path} has {key}, which differs from the base's: use the base that the adapter was "
                    "trained on, or save it with PEFT's save_embedding_layers=False if it is a copy."
                )

    def require_matching(self, adapters: Mapping[str, tuple[int, float]]) -> None:
        """Raises UserError unless a run would train this adapter.

        Args:
            adapters: engine modules that the run adapts -> rank and scale of their adapters.
        """
        if missing := sorted(set(adapters) - set(self.modules())):
            raise UserError(
                f"lora.targets asks for {missing[0]}, which the adapter in {self.folder} does not have: "
                "set lora.targets to the adapter's own modules."
            )
        if extra := sorted(set(self.modules()) - set(adapters)):
            raise UserError(
                f"the adapter in {self.folder} has {extra[0]}, which lora.targets does not ask for: "
                "set lora.targets to the adapter's own modules."
            )
        for module, (rank, scale) in adapters.items():
            own = self._adapters[module]
            if own.rank != rank:
                raise UserError(
                    f"lora.rank or lora.rank_pattern gives {module} rank {rank}, but the adapter in {self.folder} has "
                    f"{own.rank} there: set it to {own.rank}."
                )
            if not math.isclose(own.scale, scale):
                raise UserError(
                    f"lora.alpha, lora.alpha_pattern and lora.rslora multiply the adapter of {module} by {scale:g}, "
                    f"but that in {self.folder} is multiplied by {own.scale:g}: set lora.alpha to "
                    f"{self.settings.alpha:g}, lora.rslora to {str(self.settings.rslora).lower()}, and "
                    f"lora.alpha_pattern to {json.dumps(self.settings.alpha_pattern)}."
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
        rows = fused_rows(self._decoder, name.rpartition(".")[0]).values()
        return tuple(Box(0, part.start, part.stop - part.start) for part in rows)

    def view(self, name: str, index: int) -> Tensor:
        return self._view(self._places[name][index])

    def _view(self, place: _Place) -> Tensor:
        tensor = self._file.view(place.key)
        if place.expert is not None:  # factors that all share exist once
            tensor = tensor[place.expert if tensor.shape[0] > 1 else 0]
        if place.experts:
            is_a = place.key.endswith(f"{LORA_A}.weight")
            shape = (place.experts, -1) if is_a else (-1, place.experts)
            return tensor.unflatten(0, shape).transpose(0, 1) if is_a else tensor.unflatten(1, shape).transpose(1, 2)
        if place.turns:
            tensor = torch.cat([tensor[::2], tensor[1::2]])
        return tensor[place.rows, place.columns] if tensor.ndim > 1 else tensor[place.rows]

    def _stated(self, hf_module: str) -> tuple[int, float]:
        """Returns the rank and the scale that the settings give a module of the checkpoint."""
        return self.settings.rank_of(hf_module), self.settings.scale_of(hf_module)

    def _tie(self, places: dict[str, tuple[_Place, ...]]) -> None:
        """Presents embedding and head, which are saved both, as the one matrix that they are.

        Raises:
            UserError: they differ.
        """
        head = places.pop(TIED_HEAD, None)
        if head is None:
            return
        embedding = places.setdefault(SHARED, head)
        if not torch.equal(self._view(embedding[0]), self._view(head[0])):
            raise UserError(
                f"{self._file.path} has {embedding[0].key} and {head[0].key}, which differ, but {ADAPTER_CONFIG} says "
                "ensure_weight_tying: set that to false if each is meant to be its own."
            )

    def _split(self, module: str, adapter: _Adapter, fused: Collection[str] | None) -> dict[str, _Adapter]:
        """Returns the adapters of a fused module's parts by module, or the module's own where it is to stay fused."""
        parts = fused_parts(module)
        if parts == [module] or not {LORA_A, LORA_B} <= adapter.leaves.keys():
            return {module: adapter}
        rows_of, b = fused_rows(self._decoder, module), self._view(adapter.leaves[LORA_B][0])
        rank = adapter.rank // len(parts)
        blocks = self._has_blocks(b, adapter.rank, rank, list(rows_of.values()))
        if module in fused if fused is not None else not (blocks and b.any()):
            return {module: adapter}
        found, rank = {}, rank if blocks else adapter.rank
        for number, (part, rows) in enumerate(rows_of.items()):
            block = slice(number * rank, (number + 1) * rank) if blocks else slice(None)
            own = {leaf: place._replace(rows=rows) for leaf, (place,) in adapter.leaves.items()}
            own[LORA_A] = own[LORA_A]._replace(rows=block)
            own[LORA_B] = own[LORA_B]._replace(columns=block)
            if not blocks or len(own) > 2 or self._view(own[LORA_A]).any():  # a part without an adapter has zeros
                found[part] = _Adapter(rank, adapter.scale, {leaf: (place,) for leaf, place in own.items()})
        return found

    def _has_blocks(self, b: Tensor, rank: int, width: int, parts: Sequence[slice]) -> bool:
        """Returns whether an adapter's rank is the sum of one block per part, B being zero outside of these.

        Args:
            b: B [out, columns].
            width: columns of a block.
            parts: rows of each part.
        """
        if rank == self.settings.rank or rank % len(parts):
            return False
        blocks = [b[rows, number * width : (number + 1) * width] for number, rows in enumerate(parts)]
        return sum(int(block.count_nonzero()) for block in blocks) == int(b.count_nonzero())

    def _take_apart(self, stack: StoredStack, fused: Collection[str] | None) -> dict[str, _Adapter]:
        """Returns the adapters of each expert in a stack by module: of gate and up together, or of each of them."""
        count, height = expert_sizes(self._decoder)
        rank, scale = self._stated(f"{self._names.body}layers.{stack.layer}.{self._names.live_experts}.{stack.leaf}")
        keys, parts = stack.keys, [(stack.leaf, slice(None), 0, rank)]
        turns = stack.linears == GATE_UP and in_turns(self._names)
        stored = self._file.shape(keys[LORA_A])[-2] // (count if stack.flat else 1)
        if stack.linears == GATE_UP and stored == rank:
            halves = [slice(0, height), slice(height, 2 * height)]
            b = self._view(_Place(keys[LORA_B], turns=turns))  # columns of one rank of all experts lie together
            blocks = self._has_blocks(b, rank, b.shape[1] // 2, halves) and bool(b.any())
            whole = expert_module(stack.layer, 0, stack.leaf)
            if whole not in fused if fused is not None else blocks:
                width = rank // 2 if blocks else rank
                starts = (0, width) if blocks else (0, 0)
                parts = [(leaf, *one, width) for leaf, *one in zip(GATE_UP, halves, starts, strict=True)]
        found = {}
        for expert, (leaf, rows, first, width) in product(range(count), parts):
            module = expert_module(stack.layer, expert, leaf)
            if stack.flat:
                start = expert * stored + first
                a = _Place(keys[LORA_A], rows=slice(start, start + (width if len(parts) > 1 else stored)))
                columns = slice(first * count + expert, (first + width) * count if len(parts) > 1 else None, count)
                b = _Place(keys[LORA_B], rows=rows, columns=columns, turns=turns)
            else:
                a, b = (_Place(keys[leaf], expert=expert) for leaf in (LORA_A, LORA_B))
            found[module] = _Adapter(width, scale, {LORA_A: (a,), LORA_B: (b,)})
        return found

    def _check(self, module: str, adapter: _Adapter) -> None:
        """Raises UserError where an adapter lacks a tensor, or has one that the settings do not tell of."""
        leaves = adapter.leaves
        for leaf in (LORA_A, LORA_B):
            if leaf not in leaves:
                raise UserError(f"{self._file.path} lacks {leaf} of {module}: use a whole adapter.")
        if self.settings.dora != (LORA_MAGNITUDE in leaves) or (self.settings.dora and module == "embed_tokens"):
            raise UserError(
                f"{ADAPTER_CONFIG} in {self.folder} has use_dora {self.settings.dora}, which does not go with "
                f"{module}: DoRA is supported on linears alone, with a lora_magnitude_vector for each."
            )
        if self.settings.bias != (LORA_BIAS in leaves):
            raise UserError(
                f"{ADAPTER_CONFIG} in {self.folder} has lora_bias {self.settings.bias}, which does not go with "
                f"{module}: expected a lora_B.bias for each module or for none."
            )
        ranks = self._view(leaves[LORA_A][0]).shape[0], self._view(leaves[LORA_B][0]).shape[-1]
        if set(ranks) != {adapter.rank}:
            raise UserError(
                f"{self._file.path} has rank {ranks[0]} at {module}, but {ADAPTER_CONFIG} says r "
                f"{adapter.rank}: use an adapter whose r and rank_pattern are those of its tensors."
            )

    def _fuse(self, module: str) -> None:
        """Replaces the adapters of the parts of `module`, if any, by one."""
        parts = fused_parts(module)
        adapters = [self._adapters.pop(part) for part in parts if part in self._adapters]
        if not adapters:
            return
        factors = [self._view(one.leaves[LORA_A][0]) for one in adapters]
        if (
            len(adapters) < len(parts)
            or len({one.scale for one in adapters}) > 1
            or not all(torch.equal(a, factors[0]) for a in factors[1:])
        ):
            raise UserError(
                f"lora.fused asks for one adapter over {', '.join(parts)}, but that in {self.folder} has no A factor "
                "that they share: set lora.fused to none."
            )
        first = adapters[0]
        joined = {leaf: tuple(one.leaves[leaf][0] for one in adapters) for leaf in first.leaves if leaf != LORA_A}
        self._adapters[module] = first._replace(leaves={LORA_A: first.leaves[LORA_A], **joined})


def fused_modules(folder: str | Path, names: NameMap, decoder: DecoderConfig) -> list[str]:
    """Returns the modules, such as `layers.3.attention.qkv_proj`, that have one adapter over their parts in a folder;
    arguments and errors are those of `AdapterSource`."""
    found = AdapterSource(folder, names=names, decoder=decoder, fused=None, with_saved_modules=True)
    return [module for module in found.modules() if fused_parts(module) != [module]]


def adapter_file(folder: Path) -> SafetensorsReader:
    """Opens the weights of a PEFT adapter.

    Raises:
        UserError: they are absent, a pickle, or damaged.
    """
    if (folder / "adapter_model.bin").is_file() and not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"{folder} holds adapter_model.bin, a pickle, which is never opened here: "
            f"save the adapter as {ADAPTER_WEIGHTS} first (PEFT: save_pretrained)."
        )
    return SafetensorsReader(folder / ADAPTER_WEIGHTS)


class StoredAdapter(NamedTuple):
    """The tensors of an adapter's file, by PEFT's names; copies of the base's weights are left out.

    Args:
        ranks: module of the base -> rank of the adapter on it; without those of all experts together.
        tensors: all of the adapter's.
        in_full: those of modules that were trained in full.
    """

    ranks: dict[str, int]
    tensors: list[str]
    in_full: list[str]


def stored_adapter(file: SafetensorsReader) -> StoredAdapter:
    """Returns the tensors of an adapter's file; nothing is compared with a base."""
    tensors = [key for key in file.names() if not key.endswith(_COPY)]
    matches = {key: _KEY.match(key) for key in tensors}
    ranks = {
        one[1]: file.shape(key)[0]
        for key, one in matches.items()
        if one and (one[2] == "lora_A" or one[3] == "A") and not is_stack(key)
    }
    return StoredAdapter(ranks, tensors, [key for key, one in matches.items() if one is None])


def _logical_name(key: str, names: NameMap, path: Path, with_saved_modules: bool) -> str:
    saved, _, leaf = key.removeprefix(KEY_PREFIX).rpartition(".")
    with_saved_modules = with_saved_modules and key.startswith(KEY_PREFIX)
    full = names.module_from_hf(saved) if with_saved_modules and ".lora_" not in key else None
    # a module of a vision model may have parameters of other names
    if full is not None and (leaf in ("weight", "bias") or full.startswith(VISION)):
        return f"{full}.{leaf}"
    match = _KEY.match(router_key(key, names))
    module = names.module_from_hf(match[1]) if match else None
    if match is None or module is None:
        raise UserError(
            f"{path} has {key}, which is neither a LoRA factor nor a weight of a module of this model: "
            "use a LoRA adapter that was trained on it."
        )
    return f"{module}.{match[2] or match[4] or 'lora_' + (match[3] or match[5])}"
