"""A base model with trained values in place: adapters added into the weights, fully trained tensors replaced.

To callers it is one more source of weights, so an export treats it as any other. Tensors are merged when they
are read or, for an export, a few rows at a time (`engine.conversion.add_adapter`): W + s * B A in fp32, rounded once to
the base's dtype.

Training one side of a tied matrix, in full or by an adapter, makes the two sides differ: the result has a head of its
own and a config that says so (`engine.checkpoint.untied`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content
from engine.checkpoint.leftover import refuse_leftover
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box
from engine.checkpoint.rows import ReadRows, Rows
from engine.checkpoint.untied import untied
from engine.checkpoint.weight_source import TIED_HEAD, WeightSource
from engine.config.lora import adapter_scale
from engine.conversion.add_adapter import LowRank, MergedRows, Shift, StackedLowRank, UpdatedRows, write_rounding
from engine.conversion.lora_scales import Scale, one_or_each, recorded_alpha, scale_of
from engine.errors import UserError
from engine.layers.context import LORA_LEAVES
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import module_names
from engine.models.names import NameMap, buffer_value, fused_parts, fused_rows

_QUANTIZATION = "quantization_config"
LORA_A, LORA_B, LORA_MAGNITUDE, LORA_BIAS = LORA_LEAVES


def adapted_modules(names: Sequence[str]) -> list[str]:
    """Returns the engine modules that have an adapter among `names`, in order, each once."""
    modules = (name.rpartition(".") for name in names)
    return list(dict.fromkeys(module for module, _, leaf in modules if leaf in (LORA_A, LORA_B)))


def fully_trained(names: Sequence[str]) -> list[str]:
    """Returns the names of tensors trained in full, in order."""
    return [name for name in names if name.rpartition(".")[2] not in LORA_LEAVES]


def require_known(trained: TensorReader, model: ModelFolder) -> None:
    """Raises UserError where a trained tensor belongs to nothing that the model has."""
    names, shapes = trained.tensor_names(), model.expected_shapes()
    because = f"the model in {model.path} does not have: give the base that it was trained on with --base."
    refuse_leftover(trained.label, fully_trained(names), shapes, because=because)
    parts = [part for module in adapted_modules(names) for part in fused_parts(module)]
    refuse_leftover(trained.label, parts, module_names(model.decoder), because=because)


def read_adapter(trained: TensorReader, module: str) -> dict[str, Tensor]:
    """Returns the tensors of the adapter at `module` by leaf, of `LORA_LEAVES`."""
    return {leaf: trained.read_whole(name) for leaf in LORA_LEAVES if (name := f"{module}.{leaf}") in trained}


def split_adapter(adapter: dict[str, Tensor], module: str, config: DecoderConfig) -> dict[str, dict[str, Tensor]]:
    """Returns module -> its adapter: one over several modules becomes one for each; these share A, the rest is cut
    by rows.
    """
    if fused_parts(module) == [module]:
        return {module: adapter}
    return {
        part: {leaf: tensor if leaf == LORA_A else tensor[rows] for leaf, tensor in adapter.items()}
        for part, rows in fused_rows(config, module).items()
    }


def recorded_scales(lora: Mapping[str, Any], trained: TensorReader, names: NameMap) -> dict[str, float]:
    """Returns adapted module -> factor on the B A of a run's adapter.

    Args:
        lora: the run's settings, as its checkpoints have them.
        trained: its trained values.
        names: of its base.
    """
    return {
        module: adapter_scale(
            trained.shape(f"{module}.{LORA_A}")[0], recorded_alpha(lora, module, names), rslora=bool(lora["rslora"])
        )
        for module in adapted_modules(trained.tensor_names())
    }


def recorded_scale(lora: Mapping[str, Any], trained: TensorReader, names: NameMap) -> Scale:
    """Returns the factor on B A of a run's adapters, 0 without any; arguments are those of `recorded_scales`."""
    return one_or_each(recorded_scales(lora, trained, names), 0.0) if lora else 0.0


class MergedSource(WeightSource):
    """The weights of a base after training.

    Args:
        model: the description of the base.
        base: its weights; None where every tensor was trained in full from random values. Where training changed one
            side of a matrix that they tie, `self.base` has a head of its own.
        trained: trained values by logical name: full tensors, and lora_A / lora_B (and lora_magnitude) of
            adapted modules.
        scale: factor on B A.

    Raises:
        UserError: a trained tensor does not belong to the model, or values are neither trained nor in a base.
    """

    def __init__(self, model: ModelFolder, base: WeightSource | None, trained: TensorReader, *, scale: Scale) -> None:
        names = trained.tensor_names()
        self._full = set(fully_trained(names))
        # Module whose weight changes -> module whose adapter changes it.
        self._adapter_of = {part: module for module in adapted_modules(names) for part in fused_parts(module)}
        one_side = {"embed_tokens", "lm_head"} & set(self._adapter_of) or TIED_HEAD in self._full
        if model.decoder.tied_embeddings and one_side:
            model, base = model.untied(), None if base is None else untied(base)
        super().__init__(model, has_tied_head=base is not None and base.has_tied_head)
        self.base, self.trained, self.scale = base, trained, scale
        # which never train, and without a base have a fresh model's values
        self._fresh = {
            name: value for name in (self._shapes if base is None else ()) if (value := buffer_value(name)) is not None
        }
        self._check(model.path)

    @property
    def changed_config(self) -> dict[str, Any] | None:
        if self.base is not None:
            return self.base.changed_config
        # of released weights, which these are not
        kept = {key: value for key, value in self.model.hf_config.items() if key != _QUANTIZATION}
        return None if len(kept) == len(self.model.hf_config) and not self.model.decoder.scores else kept

    @property
    def notes(self) -> list[str]:
        return [] if self.base is None else self.base.notes

    def changed_names(self) -> list[str]:
        before = set() if self.base is None else set(self.base.changed_names())
        return [
            name for name in self._shapes if name in self._full or name in before or self._adapter_at(name) is not None
        ]

    def dtype(self, name: str) -> torch.dtype:
        if name in self._fresh:
            return torch.float32
        return self.model.config_dtype() if self.base is None else self.base.dtype(name)

    def boxes(self, name: str) -> Sequence[Box]:
        return (Box(),)

    def view(self, name: str, index: int) -> Tensor:
        if name in self._fresh:
            value = torch.full(self._shapes[name], self._fresh[name])
        elif name in self._full:
            value = self.trained.read_whole(name)
        else:
            assert self.base is not None, name
            value = self.base.read_whole(name)
        if (update := self._update(name)) is not None:
            value = update.added_to(value.float(), 0)
        return value.to(self.dtype(name))

    def contents(self, name: str, wanted: Sequence[Box]) -> list[Content]:
        if self.base is not None and name not in self._full.union(self._fresh) and self._adapter_at(name) is None:
            return self.base.contents(name, wanted)
        assert list(wanted) == [Box()], wanted
        assert self.base is not None or name in self._full.union(self._fresh), name
        source: TensorReader = self if name in self._fresh else self.trained if name in self._full else self.base
        is_stack = len(self._shapes[name]) == 3  # whose experts may be stored by themselves
        rows: Rows = self.base.rows(name) if source is self.base and not is_stack else ReadRows(source, name)
        return [MergedRows(name, rows, source.dtype(name), self.dtype(name), self._update(name))]

    def exact_rows(self, name: str) -> Rows:
        if self.base is not None and name not in self._full.union(self._fresh) and self._adapter_at(name) is None:
            return self.base.exact_rows(name)
        source: TensorReader = self if name in self._fresh else self.trained if name in self._full else self.base
        rows: Rows = self.base.rows(name) if source is self.base else ReadRows(source, name)
        return UpdatedRows(rows, self._update(name))

    def update(self, name: str) -> LowRank | StackedLowRank | Shift | None:
        """Returns the change that an adapter makes to a tensor; None for one without, or that was trained in full."""
        return self._update(name) if name not in self._full else None

    def update_norm(self, name: str) -> float | None:
        update = self.update(name)
        return None if update is None else update.norm()

    @property
    def trained_in_full(self) -> frozenset[str]:
        """Names of the tensors that were trained in full."""
        return frozenset(self._full)

    def _adapter_at(self, name: str) -> str | None:
        """Returns the module whose adapter changes the tensor `name`, a weight or a bias."""
        module, _, leaf = name.rpartition(".")
        adapter = self._adapter_of.get(module)
        changes = leaf == "weight" or (leaf == "bias" and f"{adapter}.{LORA_BIAS}" in self.trained)
        return adapter if changes else None

    def _update(self, name: str) -> LowRank | StackedLowRank | Shift | None:
        """Returns the change that an adapter makes to the tensor `name`.

        Raises:
            UserError: the adapter has a bias, and the base has none there.
        """
        if (adapter := self._adapter_at(name)) is None:
            return None
        module, _, leaf = name.rpartition(".")
        own = split_adapter(read_adapter(self.trained, adapter), adapter, self.model.decoder)[module]
        scale = scale_of(self.scale, adapter)
        if leaf == "bias":
            return Shift(own[LORA_BIAS].float() * scale)
        if LORA_BIAS in own and f"{module}.bias" not in self._shapes:
            raise UserError(
                f"the adapter of {module} has a bias and the base has none there, so that no weight can hold it: "
                "export the adapter with --format peft."
            )
        magnitude = own[LORA_MAGNITUDE].float() if LORA_MAGNITUDE in own else None
        a, b = own[LORA_A].float(), own[LORA_B].float()
        if a.dim() == 3:
            return StackedLowRank(a, b, scale)
        return LowRank(a, b, scale, transposed=module == "embed_tokens", magnitude=magnitude)

    def identity(self) -> dict[str, Any]:
        return {"scale": self.scale, **({} if self.base is None else self.base.identity())}

    def write_report(self, folder: Path, facts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
        return write_rounding(folder, facts, self.scale)

    def outside_content(self, name: str) -> Content:
        assert self.base is not None
        return self.base.outside_content(name)

    def outside_names(self) -> list[str]:
        return [] if self.base is None else self.base.outside_names()

    def outside_shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        assert self.base is not None
        return self.base.outside_shape(name)

    def _check_factors(self, module: str) -> None:
        """Raises UserError unless an adapter's factors are numbers whose product has its weights' shape."""
        shapes = [self._shapes[f"{part}.weight"] for part in fused_parts(module)]
        size = (sum(shape[0] for shape in shapes), shapes[0][1])
        rows, columns = size[::-1] if module == "embed_tokens" else size
        a, b = (f"{module}.{leaf}" for leaf in (LORA_A, LORA_B))
        rank = self.trained.shape(a)[0]
        if len(shapes[0]) == 3:  # a stack of experts' weights, [experts, out, in]
            count, rows, columns = shapes[0]
            self.trained.require(a, (rank, count, columns))
            self.trained.require(b, (rows, count, rank))
            return
        self.trained.require(a, (rank, columns))
        self.trained.require(b, (rows, rank))
        vectors = [name for leaf in (LORA_MAGNITUDE, LORA_BIAS) if (name := f"{module}.{leaf}") in self.trained]
        for name in vectors:
            self.trained.require(name, (rows,))

    def _check(self, folder: Path) -> None:
        """Raises UserError unless the trained tensors fit the model in `folder`."""
        require_known(self.trained, self.model)
        for name in self._full:
            self.trained.require(name, self._shapes[name])
        for name in self.trained.tensor_names():
            self.trained.require_numbers(name)
        for module in adapted_modules(self.trained.tensor_names()):
            self._check_factors(module)
        if self.base is None and (untrained := sorted(set(self._shapes) - self._full - set(self._fresh))):
            raise UserError(
                f"{folder} was opened without weights, and {untrained[0]} was not trained: give the base with --base."
            )
