"""Experts whose frozen weights are stored encoded, against the same layer with the decoded numbers stored plain."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from engine.checkpoint.safetensors_file import num_bytes
from engine.config.load import parse_config
from engine.distributed.mesh import Axis, ExpertAxes
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.routing import RoutingRule
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.inputs import GivenInput
from engine.quantization.encoding import ENCODING_NAMES, encoding
from engine.training.base_encoding import base_sentence
from tests.distributed.cases import small_config, whole_tensor
from tests.support.shared_scales import encoded_whole
from tests.unit.test_ops_routing import _context

RULE = RoutingRule(num_experts=4, per_token=2, renormalises=True, rounds=True)
TOKENS, HIDDEN, INNER = 12, 64, 128
SIZES = RoutedSizes(rule=RULE, intermediate=INNER, has_biases=True)


def _computed(
    base: str | None, rounded: str, *, loops: bool, adapters: bool, dtype: torch.dtype
) -> tuple[dict[str, Tensor], int]:
    """The output, the input's gradient and those of all that trains; and the bytes of experts' weights."""
    settings = AdapterSettings(rank=5, scale=1.5, dropout=0.2)
    plan = TrainingPlan(
        trains=lambda name: name.endswith("router"),
        adapter=lambda name: settings if adapters and name.endswith("_proj") else None,
        seed=5,
    )
    layout = TensorLayout(base=None if base is None else BaseEncoding.named(base))
    build = LayerContext(layout=layout, plan=plan, device=torch.device("cpu"), dtype=dtype)
    mlp = RoutedMLP("layers.0.mlp", SIZES, hidden=HIDDEN, layer=0, first_site=2, shared_site=9, build=build)
    mlp._loops = loops
    for linear in (mlp.gate_up, mlp.down):
        if linear.operands.encoded is not None:
            linear.operands.encoded.announce(together=not loops)  # as on a GPU, where nothing loops
    shapes = {entry.name: entry.spec.global_shape for entry in shard_entries(mlp)}
    for entry in shard_entries(mlp):
        value = whole_tensor(entry.name, entry.spec.global_shape)
        if entry.name.endswith("_proj.weight"):
            codec = encoding(rounded)
            codec.decode(encoded_whole(codec, entry.name, shapes, whole_tensor), value)
        entry.parameter.data.copy_(value)
    fill_encoded(encoded_entries(mlp), lambda entry: whole_tensor(entry.name, entry.spec.global_shape))
    entries = list(encoded_entries(mlp))
    held = sum(entry.num_bytes for entry in entries)
    if base is not None:
        assert len(entries) == 3 * RULE.num_experts and not any(
            "_proj.weight" in one.name for one in shard_entries(mlp)
        )
    x = whole_tensor("x", (TOKENS, HIDDEN)).to(dtype).requires_grad_()
    y = mlp(x, GivenInput(), _context(TOKENS))
    y.backward(whole_tensor("dy", (TOKENS, HIDDEN)).to(dtype))
    assert x.grad is not None
    found = {entry.name: entry.sink.buffer for entry in shard_entries(mlp) if entry.sink is not None}
    return {"y": y.detach(), "dx": x.grad, **found}, held


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("base", ENCODING_NAMES)
def test_the_bits_are_those_of_decoded_weights(base: str, loops: bool, adapters: bool) -> None:
    """An expert's codes in another's place are other bits."""
    for compute in (torch.float32, torch.bfloat16) if loops else (torch.float32,):
        found, held = _computed(base, base, loops=loops, adapters=adapters, dtype=compute)
        expected, _ = _computed(None, base, loops=loops, adapters=adapters, dtype=compute)
        assert found.keys() == expected.keys() and len(found) > (20 if adapters else 2)
        assert all(value.any() and torch.equal(found[key], value) for key, value in expected.items()), compute
        dense = [encoding(base).parts(*shape).values() for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))]
        assert held == RULE.num_experts * sum(num_bytes(dtype, shape) for parts in dense for shape, dtype in parts)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("trained", [0, 3])
def test_what_is_encoded_does_not_depend_on_where_experts_are(rank: int, trained: int) -> None:
    """One process stores all gates and ups of a layer in one tensor, which has to be plain for one that trains."""
    axes = ExpertAxes(ep=Axis("ep", 2, rank), tp=Axis("tp"), data="edp")
    layout = TensorLayout(experts=axes, base=BaseEncoding.named("nf4"))
    plan = TrainingPlan(trains=lambda module: module.endswith(f"experts.{trained}.up_proj"))
    build = LayerContext(layout=layout, plan=plan, device=torch.device("cpu"), dtype=torch.float32)
    mlp = RoutedMLP("layers.0.mlp", SIZES, hidden=HIDDEN, layer=0, first_site=2, shared_site=9, build=build)
    assert [entry.name for entry in encoded_entries(mlp)] == [
        f"layers.0.mlp.experts.{expert}.down_proj.weight" for expert in (2 * rank, 2 * rank + 1)
    ]


@pytest.mark.parametrize(
    ("data", "rest", "experts", "said"),
    [
        ("edp", 4, 2, ", experts over 2 ranks and the rest over 4 ranks"),
        ("edp", 4, 1, ", experts over 1 rank and the rest over 4 ranks"),
        ("edp", 2, 2, ", over 2 ranks"),
        ("dp_cp", 4, 1, ", over 4 ranks"),
        ("dp_cp", 1, 1, ""),
    ],
)
def test_the_log_says_over_which_ranks_weights_are(data: str, rest: int, experts: int, said: str) -> None:
    config = small_config(num_layers=1, hidden=64, head_dim=16, intermediate=64, variants=(SIZES,))
    axes = ExpertAxes(ep=Axis("ep"), tp=Axis("tp"), data=data)  # type: ignore[arg-type]
    layout = TensorLayout(experts=axes, base=BaseEncoding.named("int8"))
    model = Decoder(
        config, layout=layout, plan=TrainingPlan(), device=torch.device("meta"), dtype=torch.float32
    )  # fmt: skip
    weights = WeightPlacement(Axis("dp_cp", rest), expert_axis=Axis("edp", experts))
    run = parse_config(["--model.path", "m", "--data.train", "d", "--model.base_dtype", "int8"])
    sentence = base_sentence(run, list(encoded_entries(model)), weights)
    numbers = re.fullmatch(r"frozen base: (\d+) weights of the layers are int8, [\d.]+ KiB(.*) \(8.*", sentence)
    assert numbers is not None and (int(numbers[1]), numbers[2]) == (4 + 3 * RULE.num_experts, said), sentence
