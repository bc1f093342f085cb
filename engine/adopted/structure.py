"""The parts of a causal language model of transformers, found in its own module without memory."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from engine.adopted.attention import IMPLEMENTATION
from engine.errors import UserError
from engine.layers.plain_module import build_plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The names of a model's parts, each inside the one above it.

    Args:
        body: the module that runs the layers.
        layers: its list of layers.
        embedding: its table of tokens.
        norm: what the last layer's output goes through; None where nothing is known to.
        head: the linear that makes logits, inside the whole.
    """

    body: str
    layers: str
    embedding: str
    norm: str | None
    head: str

    @property
    def layers_path(self) -> str:
        """The name of the list of layers inside the whole."""
        return f"{self.body}.{self.layers}"

    @property
    def embedding_path(self) -> str:
        """The name of the table of tokens inside the whole."""
        return f"{self.body}.{self.embedding}"


def known_types() -> dict[str, str]:
    """Returns the types of causal language models that the installed transformers has, and their classes' names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_config(hf_config: dict[str, Any]) -> Any:
    """Returns transformers' record of a `config.json`; raises UserError where transformers refuses it."""
    from transformers import CONFIG_MAPPING

    model_type = hf_config["model_type"]
    try:
        with quiet():
            return CONFIG_MAPPING[model_type].from_dict(_with_floats(copy.deepcopy(hf_config)))
    except Exception as error:  # each family's class checks in its own way
        raise UserError(
            f"transformers cannot read config.json of a {model_type} model: {_reason(error)}; copy the model again."
        ) from None


def _with_floats(value: Any) -> Any:
    """Returns a config with the numbers that JSON has no word for, which transformers writes as objects of one key."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(one) for key, one in value.items()}
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


def _reason(error: Exception) -> str:
    """Returns the first two lines, where the second one has the reason."""
    lines = [line.strip().rstrip(".:") for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[:2]) or type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' notes back within."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def build_module(hf_config: dict[str, Any], attention: str = IMPLEMENTATION) -> nn.Module:
    """Builds transformers' module of a causal language model: parameters on the meta device, buffers on the CPU.

    Args:
        attention: the implementation that its layers call; where the model has no choice, its own is left to it.
    """
    import transformers
    from transformers.initialization import no_init_weights

    config = read_config(hf_config)
    name = known_types()[hf_config["model_type"]]
    model_class = getattr(transformers, name)

    def make() -> nn.Module:
        with no_init_weights():
            return model_class._from_config(config, attn_implementation=attention)

    with quiet():
        try:
            return build_plain(make)
        except (ValueError, KeyError):  # a table of its own has no such name, once it is registered
            if attention == "eager":
                raise
            return build_module(hf_config, "eager" if attention == "sdpa" else "sdpa")


@lru_cache(maxsize=4)
def whole_module(text: str, attention: str = IMPLEMENTATION) -> nn.Module:
    """Returns transformers' module of a `config.json`, given as text, without memory. Not to be changed."""
    return build_module(json.loads(text), attention)


@lru_cache(maxsize=8)
def structure_of(config_text: str) -> Structure:
    """Returns the parts of the model of a `config.json`, given as text.

    Raises:
        UserError: the model is not a table of tokens, a list of layers and a linear head.
    """
    hf_config = json.loads(config_text)
    return find_structure(whole_module(config_text), hf_config)


def find_structure(model: nn.Module, hf_config: dict[str, Any]) -> Structure:
    """Returns the parts of a model; see `structure_of`."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    count = layer_count(model.config)
    refusal = f"a {hf_config['model_type']} model of transformers cannot be adopted: "
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UserError(f"{refusal}its tokens' embedding or its head is not a plain table or linear.")
    body, _, leaf = names[id(embedding)].rpartition(".")
    while True:
        inside = model.get_submodule(body)
        lists = [
            name for name, child in inside.named_children() if isinstance(child, nn.ModuleList) and len(child) == count
        ]
        if len(lists) == 1 and "inputs_embeds" in inspect.signature(inside.forward).parameters:
            break
        if not body:
            raise UserError(f"{refusal}no module takes embeddings of tokens and runs a list of {count} layers.")
        body, _, above = body.rpartition(".")
        leaf = f"{above}.{leaf}"
    return Structure(
        body=body, layers=lists[0], embedding=leaf, norm=_last_norm(inside, lists[0]), head=names[id(head)]
    )


_LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "layer_norm")


def _last_norm(body: nn.Module, layers: str) -> str | None:
    """Returns the name of the norm behind the layers, by the body's pipeline plan or by its usual names."""
    plan = getattr(body.config, "base_model_pp_plan", None) or {}
    planned = [
        name
        for name in plan
        if name not in (layers, "embed_tokens") and isinstance(getattr(body, name, None), nn.Module)
    ]
    if planned:
        return str(planned[-1])
    return next((name for name in _LAST_NORMS if isinstance(getattr(body, name, None), nn.Module)), None)


def skeleton(model: nn.Module, structure: Structure, layers: Iterable[int]) -> tuple[nn.Module, list[nn.Module]]:
    """Returns copies of the body without layers and without a table of tokens, and of these layers.

    Args:
        model: of `build_module`; stays as it is.
        layers: their indices.
    """
    body = model.get_submodule(structure.body)
    held, table = model.get_submodule(structure.layers_path), model.get_submodule(structure.embedding_path)
    assert isinstance(held, nn.ModuleList)
    memo: dict[int, Any] = {id(held): nn.ModuleList(), id(table): nn.Identity()}
    copied = copy.deepcopy(body, memo)
    return copied, [copy.deepcopy(held[index], memo) for index in layers]


def layer_shapes(layer: nn.Module) -> tuple[Any, ...]:
    """Returns what tells kinds of layers apart: the shapes of their parameters, and plain attributes but the index."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    plain = [
        (name, key, value)
        for name, child in layer.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, (bool, float, int, str)) and "layer_id" not in key and not key.startswith("_")
    ]
    return shapes, tuple(entry for entry in plain if entry[1] not in ("layer_idx", "layer_number", "index"))


def layer_count(config: Any) -> int:
    """Returns the number of layers that transformers' record of a config has."""
    text = config.get_text_config()
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"):
        if isinstance(getattr(text, name, None), int):
            return int(getattr(text, name))
    raise UserError(f"config.json of a {text.model_type} model does not say how many layers it has.")
