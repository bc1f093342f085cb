"""The planner on bases in vendors' formats: bytes, layers that are alike, and what decoding them moves, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.lora import LoraOptions
from engine.config.parallel import ParallelOptions
from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format
from engine.layers.recompute import MemoryPlan
from engine.models.families import family_of
from engine.models.layer_kinds import layer_kinds
from engine.planning.kernel_times import kernel_times
from engine.planning.ledger import DECODED, WEIGHTS
from engine.planning.machine import MACHINES
from engine.planning.peak import predict_layout, predict_static
from engine.planning.rank_layout import Layout, Workload
from engine.planning.shapes import ModelShape
from engine.planning.traces import rank_model
from engine.training.module_plan import training_plan
from rankfold.planning.memory_examples import LLAMA_2_70B
from tests.unit.test_planning_experts import MIXTURE
from tests.unit.test_planning_search import SMALL, _config, _workload

H200 = MACHINES["h200-141"]
LAYER, MLP = 855_638_016, 3 * 8192 * 28_672
"""Numbers of the linears of a layer of Llama-2-70B, and of its MLP."""
REST = 2 * (2 * 32_000 * 8192 + 161 * 8192)
"""Bytes of its embedding, head and norms."""
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "mxfp8": 8.25, "fp8_block": 8 + 32 / 128**2, "int4": 4 + 16 / 128}


def _in(base: str, hf: dict[str, object] = LLAMA_2_70B, **changes: object) -> Workload:
    return replace(_workload(hf, _config(**changes)), base_dtype=base)


def _stored(formats: dict[str, Format], hf: dict[str, object] = LLAMA_2_70B) -> Workload:
    """With the formats of weights whose names contain a key, the first that does."""

    def of(name: str) -> Format | None:
        return next((format for part, format in formats.items() if part in name), None)

    return replace(_workload(hf, _config()), base_dtype="stored", stored=of)


@pytest.mark.parametrize("base", BITS)
@pytest.mark.parametrize("tensor", [1, 8])
def test_bytes_of_formats(base: str, tensor: int) -> None:
    """Those of all numbers of the layers; 4 bytes a row of nvfp4 are a thousandth of its 4,608 or more, and not cut
    with columns, as they are of down_proj and o_proj."""
    layout = Layout(parallel=ParallelOptions(tensor=tensor))
    (found,) = predict_static(_in(base), layout)
    rest = 2 * (2 * 32_000 * 8192 // tensor + 161 * 8192)
    assert found.static[WEIGHTS] == pytest.approx(80 * LAYER * BITS[base] / 8 / tensor + rest, rel=0.004)


def test_each_weight_counts_in_the_format_that_it_is_stored_in() -> None:
    """MLPs in nvfp4, but for those of the first layer in fp8 blocks and of the last in 16 bits, as attention is."""
    last = FORMATS["nvfp4"]
    formats = {"layers.0.mlp": FORMATS["fp8_block"], **{f"layers.{one}.mlp": last for one in range(1, 79)}}
    (found,) = predict_static(_stored(formats), Layout())
    attention = 2 * 80 * (LAYER - MLP)
    expected = attention + REST + 2 * MLP + MLP * BITS["fp8_block"] / 8 + 78 * MLP * 4.5 / 8
    assert found.static[WEIGHTS] == pytest.approx(expected, rel=0.001)


def test_layers_in_other_formats_are_not_alike() -> None:
    family, text = family_of(SMALL)
    decoder = family.config_from_hf(text)
    plan = training_plan(_config(), decoder, family.names)
    formats = {"layers.2.mlp.down_proj.weight": "nvfp4", "layers.5.mlp.down_proj.weight": "nvfp4"}
    assert layer_kinds(decoder, plan, formats.get) == (0, 0, 2, 0, 0, 2, 0, 0)
    assert layer_kinds(decoder, plan, lambda name: "nvfp4") == layer_kinds(decoder, plan) == (0,) * 8


def test_a_linear_whose_sections_differ_stays_as_it_is_computed_with() -> None:
    small = {**SMALL, "hidden_size": 256, "num_hidden_layers": 1}
    one, none = (_shape(_stored(formats, small)) for formats in ({"gate_proj": FORMATS["mxfp4"]}, {}))
    assert one.layer_parameters == none.layer_parameters


def _shape(workload: Workload) -> ModelShape:
    return rank_model(workload, ParallelOptions()).shape


def test_decoding_reads_codes_and_scales_and_writes_numbers() -> None:
    """Of down_proj, once forward and once in backward; what it is decoded to has columns for adapters."""
    workload = _in("nvfp4", lora=LoraOptions(rank=16))
    found = [one for one in kernel_times(workload, Layout(), MemoryPlan(), H200) if one.launch.name == "decode"]
    rows, columns = 8192, 28_672
    parts = rows * columns // 2 + rows * columns // 16 + 4 * rows
    downs = [one for one in found if one.launch.nbytes == parts + 2 * rows * columns]
    assert [(one.part, one.count) for one in downs] == [
        (("layers", "forward"), 80 * 8),
        (("layers", "backward"), 80 * 8),
    ]
    assert sum(one.count for one in found) == 2 * 80 * 8 * 4  # q, k and v lie together, and so do gate and up
    (estimate,) = predict_layout(workload, Layout(), MemoryPlan())
    assert estimate.static[DECODED] == 2 * 57_344 * (8192 + 64)


def test_experts_are_decoded_together() -> None:
    """Where one launch serves all of them, see engine.experts.ops.encoded_experts."""
    workload = _in("mxfp4", MIXTURE)
    found = [one for one in kernel_times(workload, Layout(), MemoryPlan(), H200) if one.launch.name == "decode"]
    inner, hidden, experts = (MIXTURE[name] for name in ("moe_intermediate_size", "hidden_size", "num_experts"))
    numbers = experts * inner * hidden
    assert {round(one.launch.nbytes / numbers, 2) for one in found} >= {round(2 + 4.25 / 8, 2)}


def test_a_cut_through_a_block_is_refused() -> None:
    small = {**SMALL, "intermediate_size": 96}
    with pytest.raises(UserError, match="mxfp4 has one scale for 32 input features"):
        predict_static(_in("mxfp4", small), Layout(parallel=ParallelOptions(tensor=2)))
