"""The decoders of CogVLM, CogVLM2 and CogAgent against what the models' original code computed."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.batch import Batch, Embeddings
from engine.errors import UserError
from engine.layers.context import AdapterSettings
from engine.layers.module import shard_entries
from engine.layers.recompute import MemoryPlan
from engine.models.decoder import Decoder
from engine.models.families import family_of
from engine.models.names import FUSED
from engine.ops.attention.token_context import TokenContext
from engine.spans import Span
from engine.vision.batch_parts import ExpertTokens
from engine.vision.layers.token_experts import TokenExperts
from engine.vision.ops.cross_attention import Encoded, EncodedRows, cross_attention, pair_spans
from tests.distributed.cases import relative_error
from tests.support.cogvlm_cases import batch_of, encoded_of, family_of_fixture, model_of, plan_of
from tests.unit.test_vision_cogvlm import CLOSE, NAMES, fixture

STEP = torch.zeros((), dtype=torch.int64)
EVERYTHING = plan_of(".*")


def _hidden(model: Decoder, batch: Batch, encoded: Encoded | None = None) -> tuple[Tensor, TokenContext]:
    x, context = model.embed(batch), model.context(batch, STEP, training=False)
    if encoded is not None:
        context = replace(context, parts=(*(one for one in context.parts if type(one) is not Encoded), encoded))
    return model.run_layers(x, context), context


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_originals(name: str) -> None:
    data, model = fixture(name), model_of(fixture(name), plan_of(""))
    for case in data.cases:
        expected = data.expected.get(f"{case}.logits")
        if expected is None:
            continue
        with torch.no_grad():
            batch = batch_of(data, case, merged=True)
            x, context = _hidden(model, batch, encoded_of(data, case))
            logits = model.logits(x, context).view_as(expected)
        real = data.inputs[f"{case}.attention_mask"].bool()
        torch.testing.assert_close(logits[real], expected[real], **CLOSE)


@cache
def _gradients(name: str, recompute: str, case: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of every tensor by its name in the checkpoint."""
    data = fixture(name)
    model = model_of(data, EVERYTHING, memory=MemoryPlan(recompute=recompute))
    batch = batch_of(data, case)
    x, context = _hidden(model, batch)
    losses = model.token_losses(x, batch, context)
    weights = batch.loss_weights_BS.flatten()
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    names, found = family_of_fixture(data).names, {}
    for entry in shard_entries(model):
        place = names.to_hf(entry.name)
        whole = found.setdefault(place.name, torch.full(data.weights[place.name].shape, torch.nan))
        part = whole if place.num_rows is None else whole.narrow(0, place.row_offset, place.num_rows)
        part.copy_(entry.sink.buffer)
    return loss.detach(), found


def _expected_gradients(data: Any, case: str, name: str) -> list[tuple[str, Tensor, Any]]:
    """What the fixture has of the gradients: (kind, expected, how it is read from the whole gradient)."""
    rows = []
    for key, value in data.expected.items():
        kind, _, tensor = key.removeprefix(f"{case}.").partition(".")
        if not key.startswith(f"{case}.grad") or kind in ("grad_row_index", "grad_norm_all") or tensor != name:
            continue
        if kind == "grad":
            rows.append((kind, value, lambda g: g))
        elif kind == "grad_norm":
            rows.append((kind, value, lambda g: g.norm()))
        elif kind == "grad_rows":
            index = data.expected[f"{case}.grad_row_index.{name}"]
            rows.append((kind, value, lambda g, index=index: g[index]))
        elif stride := re.fullmatch(r"grad_stride(\d+)", kind):
            step = int(stride[1])
            # of a table whose first dimension is 1 the fixture has all
            rows.append((kind, value, lambda g, step=step: g[::step]))
    return rows


@pytest.mark.parametrize(
    ("name", "recompute", "case"),
    [(name, "selective", "two_samples_padded") for name in NAMES]
    + [("cogvlm2", "none", "one_image"), ("cogvlm2", "full", "one_image"), ("cogvlm2", "attention", "one_image")]
    + [("cogagent", level, "one_image") for level in ("none", "attention", "full")]
    + [("cogvlm-v1", "selective", "text_only")],
)
def test_loss_and_gradients_are_the_originals(name: str, recompute: str, case: str) -> None:
    data = fixture(name)
    loss, found = _gradients(name, recompute, case)
    torch.testing.assert_close(loss, data.expected[f"{case}.loss"], **CLOSE)
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    assert relative_error(norm, data.expected[f"{case}.grad_norm_all"]) < 2e-4
    compared = 0
    for tensor, gradient in found.items():
        for kind, expected, part in _expected_gradients(data, case, tensor):
            compared += 1
            if not expected.any():  # of weights that no token met
                assert not part(gradient).any(), f"{kind} of {tensor}"
                continue
            error = relative_error(part(gradient), expected)
            assert error < 2e-4, f"{kind} of {tensor}: {error}"
    assert compared > 5


def test_a_micro_batch_of_text_reports_to_all_sinks() -> None:
    """Reductions wait for the reports of all trained weights, whichever expert a micro-batch meets."""
    for name in ("cogvlm2", "cogagent"):
        data = fixture(name)
        model = model_of(data, EVERYTHING)
        batch = batch_of(data, data.cases[0], merged=True)
        batch = batch.without(ExpertTokens, Embeddings)
        reports: Counter[str] = Counter()
        for entry in shard_entries(model):
            entry.sink.bind(torch.zeros(entry.parameter.shape), partial(reports.update, [entry.name]))
        x, context = _hidden(model, batch)
        model.token_losses(x, batch, context).sum().backward()
        assert reports == {entry.name: entry.sink.uses for entry in shard_entries(model)}
        for entry in shard_entries(model):
            if ".vision." in entry.name or ".cross_attention." in entry.name:
                assert not entry.sink.buffer.any(), entry.name


def test_released_configs_are_known_by_their_architecture() -> None:
    for name in NAMES:
        hf = {key: value for key, value in fixture(name).hf.items() if key != "model_type"}
        family, text = family_of(hf)
        config = family.config_from_hf(text)
        assert config.family == {"cogvlm-v1": "cogvlm"}.get(name, name)
        experts = config.variant(TokenExperts)
        assert experts is not None
        assert (config.ropes[0].theta, experts.qkv_bias) == ((5e5, True) if name == "cogvlm2" else (1e4, False))


@pytest.mark.parametrize("name", NAMES)
def test_names_and_patterns_cover_the_checkpoint(name: str) -> None:
    data = fixture(name)
    family = family_of_fixture(data)
    model = model_of(data, plan_of(""))
    places = [family.names.to_hf(entry.name) for entry in shard_entries(model)]
    mine = {place.name for place in places}
    rest = set(data.weights) - mine
    assert mine <= set(data.weights)
    assert all(family.names.is_unused(key) for key in rest)
    assert not any(family.names.is_unused(key) for key in mine)
    rows: dict[str, int] = {}
    for place in places:
        if place.num_rows is not None:
            rows[place.name] = rows.get(place.name, 0) + place.num_rows
    assert rows == {key: data.weights[key].shape[0] for key in rows}
    for entry in shard_entries(model):
        module = entry.name.rpartition(".")[0]
        found = family.names.module_from_hf(family.names.module_to_hf(module))
        assert found in (module, _fused(module))


def _fused(module: str) -> str:
    """The module of which this one is a part."""
    inside = module.split(".", 2)[-1]
    return module.replace(inside, next((fused for fused, parts in FUSED.items() if inside in parts), inside))


@pytest.mark.parametrize("name", ["cogvlm-v1", "cogvlm2"])
def test_adapters_on_the_vision_expert_follow_peft(name: str) -> None:
    """The factors after five steps, from the original's start."""
    data = fixture(name)
    recipe = json.loads((data.folder / "lora.json").read_text(encoding="utf-8"))
    tensors = load_file(data.folder / "lora.safetensors")
    settings = AdapterSettings(rank=recipe["r"], scale=recipe["scaling"], dropout=0.0)
    fused = r"layers\.\d+\.attention\.vision\.qkv_proj"
    model = model_of(data, plan_of("", fused, fused, settings))
    trained = [entry for entry in shard_entries(model) if entry.sink is not None]
    names = family_of_fixture(data).names

    def key(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        return f"base_model.model.{names.module_to_hf(module)}.{leaf}.weight"

    for entry in trained:
        entry.parameter.data.copy_(tensors[f"init.{key(entry.name)}"])
    masters = [torch.nn.Parameter(entry.parameter.data.clone()) for entry in trained]
    options = recipe["optimizer"]
    optimizer = torch.optim.AdamW(
        masters, lr=options["lr"], betas=options["betas"], eps=options["eps"], weight_decay=options["weight_decay"]
    )
    batch, losses = batch_of(data, recipe["case"]), []
    weights = batch.loss_weights_BS.flatten()
    for _ in range(5):
        for entry in trained:
            entry.sink.buffer.zero_()
        x, context = _hidden(model, batch)
        loss = (model.token_losses(x, batch, context) * weights).sum() / weights.sum()
        losses.append(loss.item())
        loss.backward()
        for master, entry in zip(masters, trained, strict=True):
            master.grad = entry.sink.buffer.clone()
        optimizer.step()
        for master, entry in zip(masters, trained, strict=True):
            entry.parameter.data.copy_(master.data)
    assert losses == pytest.approx(recipe["losses_before_each_of_5_steps_then_after"][:5], abs=1e-4)
    for master, entry in zip(masters, trained, strict=True):
        torch.testing.assert_close(master.data, tensors[f"final.{key(entry.name)}"], atol=1e-4, rtol=0.0)


def test_heads_that_do_not_share_are_refused() -> None:
    hf = {**fixture("cogvlm2").hf, "num_multi_query_heads": 4}
    with pytest.raises(UserError, match="6 num_attention_heads and 4 num_multi_query_heads"):
        family_of(hf)
    hf = {**fixture("cogagent").hf, "cross_compute_hidden_size": 50}
    with pytest.raises(UserError, match="cross_compute_hidden_size 50, which does not divide"):
        family_of(hf)


def test_a_rank_without_tokens_of_any_image_gives_gradients() -> None:
    """The gradients are zeros, so that its collectives are those of other context ranks: without any, backward would
    not come by."""
    q, k, v = (torch.ones(rows, 2, 4, requires_grad=True) for rows in (3, 5, 5))
    attended = cross_attention(q, EncodedRows(k, v, pair_spans((Span(0, 0), Span(0, 3)), (0,), (5,))))
    assert not attended.any() and attended.shape == q.shape
    gradients = torch.autograd.grad(attended.sum(), (q, k, v))
    assert not any(gradient.any() for gradient in gradients)
