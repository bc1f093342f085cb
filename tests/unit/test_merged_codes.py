"""Codes of merged weights in the place of the base's: the numbers of merging in each product, bit for bit, and the base
back where it was."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.reference_formats import merge
from engine.layers.context import TensorLayout
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.merged_codes import kept_bytes, merge_codes, merged_codes, merging_storages
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder, build_decoder
from engine.ops.encoded_weight import BaseEncoding
from tests.distributed.cases import Case, make_batch, whole_tensor
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.distributed.run_cases import BLOCKS, EXPERTS_AND_ROUTER, FUSED_EXPERTS, ROUTED_BLOCKS
from tests.support.format_parts import same_parts
from tests.support.sweeps import sampled

CASES = {
    "dense": Case(config=BLOCKS, adapters=EVERY_LINEAR),
    "some of a stack": Case(config=BLOCKS, adapters=r".*(q_proj|up_proj)"),
    "experts": Case(config=ROUTED_BLOCKS, adapters=rf"{EXPERTS_AND_ROUTER}|{EVERY_LINEAR}"),
    "one A for gate and up": Case(config=ROUTED_BLOCKS, adapters=FUSED_EXPERTS, fused=FUSED_EXPERTS),
    "shared outer": Case(config=ROUTED_BLOCKS, adapters=EXPERTS_AND_ROUTER, experts="shared_outer"),
}
CHOICES = [
    (case, base) for case in CASES for base in ("nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4", "int8", "fp8_channel")
]
QUICK = [("dense", "nvfp4"), ("some of a stack", "int4"), ("experts", "fp8_block"), ("shared outer", "mxfp8")]


def _never(*_: Any) -> None:
    raise AssertionError("merged for a product")


def _model(case: str, base: str, arithmetic: Arithmetic = PLAIN) -> Decoder:
    own = replace(CASES[case], dropout=0.0, merge_aware=True)
    layout = TensorLayout(base=BaseEncoding.named(base, arithmetic))
    model = build_decoder(own.config, layout=layout, plan=own.plan(), device=torch.device("cpu"), dtype=torch.float32)
    for entry in shard_entries(model):
        entry.parameter.data.copy_(whole_tensor(entry.name, entry.spec.global_shape))
    fill_encoded(encoded_entries(model), lambda entry: whole_tensor(entry.name, entry.spec.global_shape))
    return model


def _losses(model: Decoder) -> Tensor:
    batch = make_batch([(0, (9, 4)), (1, (13,))], row_length=16, seq_length=16, vocab_size=BLOCKS.vocab_size, seed=1)
    with torch.no_grad():
        return model(batch, torch.tensor(0), training=False)


def _parts(model: Decoder) -> dict[str, dict[str, Tensor]]:
    return {one.name: {name: part.clone() for name, part in one.parts.items()} for one in encoded_entries(model)}


@pytest.mark.parametrize(("case", "base"), sampled(CHOICES, QUICK))
def test_passes_have_the_bits_of_merging_each_time(case: str, base: str) -> None:
    model = _model(case, base)
    expected, before = _losses(model), _parts(model)
    of_sections = {
        id(parts): merge(storage.weight.encoding.format, parts, own.b_OR, own.a_RI, own.scale)
        for storage in merging_storages((model,))
        for _, parts, own in storage._merging
    }
    count = merge_codes((model,))
    assert count == len(of_sections) and count == sum(len(one.merged) for one in merging_storages((model,)))
    changed = 0
    for entry in encoded_entries(model):
        theirs = of_sections.get(id(entry.parts), before[entry.name])
        assert same_parts(dict(entry.parts), theirs), entry.name
        changed += not same_parts(dict(entry.parts), before[entry.name])
    assert changed == count
    for storage in merging_storages((model,)):
        object.__setattr__(
            storage.weight.encoding, "arithmetic", replace(storage.weight.encoding.arithmetic, merged_decode=_never)
        )
    assert torch.equal(_losses(model), expected)


@pytest.mark.parametrize("case", ["dense", "experts"])
def test_the_base_comes_back_and_new_adapters_are_seen(case: str) -> None:
    """Codes that are made again after an update are the new adapters'; stale codes would give the losses from before
    it."""
    model, weights = _model(case, "nvfp4"), WeightPlacement(Axis("dp_cp"))
    before, first = _parts(model), _losses(model)
    assert kept_bytes((model,), weights) == sum(one.memory.nbytes for one in merging_storages((model,)))
    with merged_codes((model,), weights):
        assert torch.equal(_losses(model), first)
        merged = _parts(model)
    assert all(same_parts(_parts(model)[name], parts) for name, parts in before.items())
    assert torch.equal(_losses(model), first)
    for entry in shard_entries(model):
        if entry.name.endswith("lora_B"):
            entry.parameter.data.mul_(-2)
    second = _losses(model)
    with pytest.raises(ZeroDivisionError), merged_codes((model,), weights):
        assert torch.equal(_losses(model), second) and not torch.equal(second, first)
        assert not all(same_parts(_parts(model)[name], parts) for name, parts in merged.items())
        raise ZeroDivisionError
    assert all(same_parts(_parts(model)[name], parts) for name, parts in before.items())
    assert torch.equal(_losses(model), second)


@pytest.mark.parametrize("case", ["dense", "experts"])
def test_there_is_no_model_without_adapters_meanwhile(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(case, "int4")
    merge_codes((model,))
    monkeypatch.setattr(model, "context", partial(model.context, adapters=False))
    with pytest.raises(AssertionError, match="without adapters"):
        _losses(model)
    before = _parts(model)
    assert merge_codes((model,)) == 0
    assert all(same_parts(_parts(model)[name], parts) for name, parts in before.items())
