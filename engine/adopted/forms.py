"""The factors at the two ends of a causal language model, found by running a small one of the same make.

Families of transformers multiply looked-up embeddings and logits by numbers of their configs, each under a name of its
own. A small model with random weights shows them whatever their names are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.adopted.small import divided_config, small_config
from engine.adopted.structure import (
    FAULTS,
    Structure,
    after_table,
    causal_model,
    find_structure,
    first_line,
    quiet,
    read_config,
    stem_of,
)
from engine.errors import UserError

_TOKENS = 12
_STD = 0.1
"""Standard deviation of a small model's random matrices: large enough for a soft cap to show."""


_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names under which configs have the soft cap of logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forms:
    """The factors at the ends of a model.

    Args:
        embedding: on looked-up embeddings.
        logits: on the head's products.
        softcap: logits become cap * tanh(logit / cap); None for none.
        has_stem: whether the head takes what the structure's stem makes of the last layer's output.
    """

    embedding: float
    logits: float
    softcap: float | None
    has_stem: bool


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws from a generator of this seed within, and leaves torch's own as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def written_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns a `config.json` with all of its keys, as transformers' own record of it writes them."""
    found: dict[str, Any] = json.loads(json.dumps(read_config(hf_config).to_dict(), default=str))
    return found


def small_record(hf_config: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """Returns the `config.json` of a small model of the same make.

    Args:
        ranks: tensor or expert ranks over which its sizes divide where those of the model do.
    """
    full = written_config(hf_config)
    sizes = small_config(full) if ranks == 1 else divided_config(small_config(full), full, ranks)
    small = {key: value for key, value in sizes.items() if key != "transformers_version"}
    return {**small, "model_type": hf_config["model_type"]}


def small_model(hf_config: dict[str, Any], attention: str = "eager", seed: int = 0, ranks: int = 1) -> nn.Module:
    """Returns transformers' model of `small_record` in float32 on the CPU, every parameter drawn at random."""
    with quiet(), seeded(seed):
        model: nn.Module = causal_model(small_record(hf_config, ranks), attention).eval().float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_STD)
            else:
                parameter.data.add_(torch.randn_like(parameter) * _STD)
    return model


@lru_cache(maxsize=8)
def forms_of(config_text: str) -> Forms:
    """Returns the factors of the model of a `config.json`, given as text.

    Raises:
        UserError: the ends are more than a factor and a soft cap.
    """
    hf_config = json.loads(config_text)
    refusal = f"a {hf_config['model_type']} model of transformers cannot be adopted: "
    try:
        return _found_forms(hf_config, refusal)
    except UserError:
        raise
    except ImportError as error:
        reason = f"{first_line(error).split('. ')[0]}; install it"
    except FAULTS as error:
        reason = f"a small one of its make stops with {type(error).__name__}: {first_line(error)}"
    raise UserError(f"{refusal}{reason}.")


@torch.no_grad()
def _found_forms(hf_config: dict[str, Any], refusal: str) -> Forms:
    model = small_model(hf_config)
    parts = find_structure(model, hf_config)
    ids = torch.arange(3, 3 + _TOKENS)[None]
    with quiet():
        table = model.get_submodule(parts.embedding_path)
        embedding = _ratio(table(ids), after_table(table, table.weight[ids]))
        stream, logits = _ends(model, parts, ids)
        head = model.get_submodule(parts.head)
        streams = [(False, stream)]
        if parts.stem is not None:
            streams.append((True, stem_of(model, parts)(stream)))
        earlier = _ends(model, parts, torch.cat([ids[:, :-1], ids[:, :1]], dim=1))[1][:, :-1]
    if not torch.allclose(earlier, logits[:, :-1], rtol=1e-3, atol=1e-4 * float(logits.abs().max())):
        raise UserError(
            f"{refusal}its tokens see later ones, so that the next one is no question: if the model is a decoder, set "
            "is_decoder to true in config.json."
        )
    if embedding is None:
        raise UserError(f"{refusal}its embedding is not a table of tokens times a number, nor a norm of that.")
    for has_stem, taken in streams:
        if taken.shape[-1] == head.in_features and (found := _of_head(model, taken, head, logits)) is not None:
            return Forms(embedding=embedding, logits=found[0], softcap=found[1], has_stem=has_stem)
    raise UserError(f"{refusal}its logits are not those of a linear head times a number.")


def _of_head(model: nn.Module, taken: Tensor, head: nn.Linear, logits: Tensor) -> tuple[float, float | None] | None:
    """Returns the factor and the soft cap with which the head makes logits of what it takes; None for neither."""
    products = linear(taken, head.weight, head.bias)
    factor = _ratio(logits, products)
    if factor is not None:
        return factor, None
    config = model.config.get_text_config()
    for name in _CAPS:
        cap = getattr(config, name, None)
        if cap:
            factor = _ratio(torch.atanh(logits.double() / cap) * cap, products.double())
            if factor is not None:
                return factor, float(cap)
    return None


def _ends(model: nn.Module, parts: Structure, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what the body makes, and the logits."""
    body: list[Tensor] = []
    hook = model.get_submodule(parts.body).register_forward_hook(lambda *found: body.append(_first(found[2])))
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return body[0], logits


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out.last_hidden_state
    return found


def _ratio(left: Tensor, right: Tensor) -> float | None:
    """Returns the number that `left` is of `right`; None where it is not one."""
    if left.shape != right.shape:
        return None
    factor = float((left * right).sum() / (right * right).sum())
    if not torch.allclose(left, right * factor, rtol=1e-4, atol=1e-5 * float(left.abs().max())):
        return None
    return 1.0 if abs(factor - 1.0) < 1e-5 else factor
