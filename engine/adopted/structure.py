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
from engine.adopted.recognised import computes_linear
from engine.adopted.small import LAYER_COUNTS
from engine.errors import UserError
from engine.layers.plain_module import build_plain, is_linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The names of a model's parts, each inside the one above it.

    Args:
        body: the module that runs the layers.
        layers: its list of layers.
        embedding: its table of tokens.
        norm: what the last layer's output goes through; None where nothing is known to.
        head: the linear that makes logits, inside the whole.
        stem: the module outside the body whose output the head may take; None where there is none.
        images: the module that takes images and puts their features among the tokens, which is the body or around it;
            empty for the whole, None where the model sees none.
        count: of layers.
    """

    body: str
    layers: str
    embedding: str
    norm: str | None
    head: str
    stem: str | None
    images: str | None
    count: int

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


def image_types() -> dict[str, str]:
    """Returns the types of models of images and text that the installed transformers has, and their classes' names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def sees_images(hf_config: dict[str, Any]) -> bool:
    """Returns whether a `config.json` is of a model of images and text that transformers has."""
    model_type = hf_config.get("model_type")
    has_tower = isinstance(hf_config.get("vision_config"), dict) or model_type not in known_types()
    return has_tower and model_type in image_types()


def read_config(hf_config: dict[str, Any]) -> Any:
    """Returns transformers' record of a `config.json`; raises UserError where transformers refuses it."""
    from transformers import CONFIG_MAPPING

    model_type = hf_config["model_type"]
    try:
        with quiet():
            return CONFIG_MAPPING[model_type].from_dict(_with_floats(copy.deepcopy(hf_config)))
    except Exception as error:  # each family's class checks in its own way
        raise UserError(
            f"transformers cannot read config.json of a {model_type} model: {first_line(error)}; copy the model again."
        ) from None


def _with_floats(value: Any) -> Any:
    """Returns a config with the numbers that JSON has no word for, which transformers writes as objects of one key."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(one) for key, one in value.items()}
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


def first_line(error: Exception) -> str:
    """Returns an error's message in one line, or its type."""
    return " ".join(str(error).split())[:_MOST_WORDS].rstrip(".") or type(error).__name__


_MOST_WORDS = 200
"""Most characters of an error's message in a refusal."""


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


FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers' modules raise where a config or a call is none that they were written for."""


def causal_model(hf_config: dict[str, Any], attention: str) -> Any:
    """Makes transformers' causal language model of a `config.json`.

    Args:
        attention: the implementation that its layers call.
    """
    import transformers

    config = read_config(hf_config)
    if sees_images(hf_config):
        model_class = getattr(transformers, image_types()[hf_config["model_type"]])
        text = config.get_text_config()
        others = "eager" if attention == "eager" else "sdpa"  # a tower's attention looks at all of an image
        by_part = {name: attention if getattr(config, name, None) is text else others for name in config.sub_configs}
        return model_class._from_config(config, attn_implementation={"": attention, **by_part})
    model_class = getattr(transformers, known_types()[hf_config["model_type"]])
    inside = [name for name, made in config.sub_configs.items() if made is model_class.config_class]
    for name in inside[:1]:  # the decoder's own, of a model of several
        config = getattr(config, name)
    return model_class._from_config(config, attn_implementation=attention)


def build_module(hf_config: dict[str, Any], attention: str = IMPLEMENTATION) -> nn.Module:
    """Builds transformers' module of a causal language model: parameters on the meta device, buffers on the CPU.

    Args:
        attention: the implementation that its layers call; where the model has no choice, its own is left to it.
    """
    from transformers.initialization import no_init_weights

    def make() -> nn.Module:
        with no_init_weights():
            return causal_model(hf_config, attention)

    try:
        with quiet():
            return with_linears(build_plain(make))
    except UserError:
        raise
    except FAULTS as error:
        if isinstance(error, (ValueError, KeyError)) and attention != "eager":
            return build_module(hf_config, "eager" if attention == "sdpa" else "sdpa")
        reason = f"{type(error).__name__}: {first_line(error)}"
    raise UserError(
        f"transformers cannot build a {hf_config['model_type']} model of this config.json ({reason}): copy the model "
        "again."
    )


class TransposedLinear(nn.Linear):
    """A linear whose weight transformers' module, and a checkpoint, has as [in, out]."""


def with_linears(model: nn.Module) -> nn.Module:
    """Puts torch's linears without memory in place of transformers' transposed ones, and of those that compute the same
    in a forward of their own, and returns the model."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                setattr(parent, name, TransposedLinear(*child.weight.shape, device="meta"))
            elif isinstance(child, nn.Linear) and not is_linear(child) and computes_linear(child):
                rows, columns = child.weight.shape
                setattr(parent, name, nn.Linear(columns, rows, bias=child.bias is not None, device="meta"))
    return model


def transposed_weights(model: nn.Module) -> set[str]:
    """Returns the names of weights that lie [in, out] in a checkpoint; `model` is of `build_module`."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, TransposedLinear)}


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
    refusal = f"a {hf_config['model_type']} model of transformers cannot be adopted: "
    if sees_images(hf_config) and (why := _no_decoder(model)) is not None:
        raise UserError(f"{refusal}{why}.")
    embedding, head = model.get_input_embeddings(), _head(model)
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UserError(f"{refusal}its tokens' embedding or its head is not a plain table or linear.")
    if head.out_features > embedding.num_embeddings:
        raise UserError(
            f"{refusal}its head has {head.out_features} tokens and its tokens' embedding {embedding.num_embeddings}."
        )
    counts = layer_counts(model.config)
    body, _, leaf = names[id(embedding)].rpartition(".")
    while True:
        inside = model.get_submodule(body)
        lists = [(name, len(found)) for name, found in _outer_lists(inside) if len(found) in counts]
        depth = min((name.count(".") for name, _ in lists), default=0)  # a tower's layers are further inside
        lists = [(name, count) for name, count in lists if name.count(".") == depth]
        if len(lists) == 1 and "inputs_embeds" in inspect.signature(inside.forward).parameters:
            break
        if not body:
            raise UserError(f"{refusal}no module takes embeddings of tokens and runs one list of its layers.")
        body, _, above = body.rpartition(".")
        leaf = f"{above}.{leaf}"
    layers, count = lists[0]
    images = _images(model, body) if sees_images(hf_config) else None
    if images is None and sees_images(hf_config):
        raise UserError(f"{refusal}no module of it takes pixels.")
    return Structure(
        body=body,
        layers=layers,
        embedding=leaf,
        norm=_last_norm(inside, layers),
        head=names[id(head)],
        stem=_stem(model, body, names[id(head)]),
        images=images,
        count=count,
    )


def _no_decoder(model: Any) -> str | None:
    """Returns why a model of images and text does not decode a row of text and images; None where nothing says so."""
    if model.config.is_encoder_decoder:
        return "it encodes one row of tokens and decodes another, and here a row is both"
    taken = inspect.signature(model.forward).parameters.values()
    needed = [one.name for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    needed = [name for name in needed if name != "input_ids"]
    return f"its forward takes no text without {needed[0]}" if needed else None


def _head(model: Any) -> nn.Module | None:
    """Returns the linear that makes logits, of the model or of the language model inside it."""
    found: nn.Module | None = model.get_output_embeddings()
    inside: Any = getattr(model, "language_model", None)
    if found is None and hasattr(inside, "get_output_embeddings"):
        found = inside.get_output_embeddings()
    return found


def _outer_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yields the lists of modules inside that are in no other list, with their names."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield f"{prefix}{name}", child
        else:
            yield from _outer_lists(child, f"{prefix}{name}.")


def _stem(model: nn.Module, body: str, head: str) -> str | None:
    """Returns the module that holds the head, or the one beside head and body."""
    above = body.partition(".")[0]
    first, inside, _ = head.partition(".")
    if inside:
        return first if first != above else None
    others = [
        name
        for name, child in model.named_children()
        if name not in (above, head) and next(child.parameters(), None) is not None
    ]
    return others[0] if len(others) == 1 else None


_PIXELS = ("pixel_values", "image_patches")
"""Arguments that pixels are, in transformers' modules."""


def _images(model: nn.Module, body: str) -> str | None:
    """Returns the innermost module, the body or around it, whose forward takes pixels; None where none does."""
    while True:
        taken = inspect.signature(model.get_submodule(body).forward).parameters
        if any(name in taken for name in _PIXELS):
            return body
        if not body:
            return None
        body = body.rpartition(".")[0]


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
    found = next((name for name in _LAST_NORMS if isinstance(getattr(body, name, None), nn.Module)), None)
    if found is not None and inspect.getsource(type(body).forward).count(f"self.{found}(") > 1:
        return None  # it is in front of the layers too
    return found


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


def around_body(model: nn.Module, structure: Structure, body: nn.Module) -> nn.Module:
    """Returns a copy of the module that takes images, without the head and with `body` in the body's place.

    Args:
        model: of `build_module`; stays as it is.
    """
    assert structure.images is not None
    memo: dict[int, Any] = {
        id(model.get_submodule(structure.body)): body,
        id(model.get_submodule(structure.head)): nn.Identity(),
    }
    return copy.deepcopy(model.get_submodule(structure.images), memo)


def after_table(table: nn.Module, x: Any) -> Any:
    """Returns what the modules inside a table of tokens, a norm in some, make of looked-up embeddings."""
    for module in table.children():
        x = module(x)
    return x


def stem_of(model: nn.Module, structure: Structure) -> nn.Module:
    """Returns a copy of the stem, which returns what the head takes."""
    assert structure.stem is not None
    head = model.get_submodule(structure.head)
    memo: dict[int, Any] = {id(head): nn.Identity()}
    held = [*head.parameters(), *map(model.get_parameter, tied_to_head(model, structure).values())]
    for parameter in held:  # the stem may hold them a second time
        memo[id(parameter)] = None
    return copy.deepcopy(model.get_submodule(structure.stem), memo)


def tied_to_head(model: nn.Module, structure: Structure) -> dict[str, str]:
    """Returns the head's parameters that transformers ties to others, but the table of tokens, and those others: a
    checkpoint has them by the others' names."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    own = {f"{structure.head}.{leaf}" for leaf, _ in model.get_submodule(structure.head).named_parameters()}
    table = f"{structure.embedding_path}."
    return {name: other for name, other in tied.items() if name in own and not other.startswith(table)}


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


def hidden_size(config: Any, embedded: int) -> int:
    """Returns the features of a token in the residual stream.

    Args:
        config: transformers' record.
        embedded: features of a token in the table, for a config that says no more.
    """
    return int(getattr(config.get_text_config(), "hidden_size", None) or embedded)


def layer_counts(config: Any) -> set[int]:
    """Returns the numbers of layers that transformers' record of a config has."""
    text = config.get_text_config()
    return {value for name in LAYER_COUNTS if isinstance(value := getattr(text, name, None), int)}
