"""The planner on bases in vendors' formats: bytes, layers that are alike, and what decoding them moves, by hand."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.parallel import ParallelOptions
from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format
from engine.kernels.native.loader import native_status
from engine.layers.recompute import MemoryPlan
from engine.models.families import family_of
from engine.models.layer_kinds import layer_kinds
from engine.planning.kernel_times import kernel_times
from engine.planning.ledger import DECODED, WEIGHTS
from engine.planning.machine import MACHINES
from engine.planning.peak import predict_layout, predict_static
from engine.planning.rank_layout import Companion, Layout, Workload
from engine.planning.shapes import ModelShape
from engine.planning.step_time import predict_time
from engine.planning.stored_formats import stored_formats
from engine.planning.traces import rank_model
from engine.training.module_plan import training_plan
from rankfold.planning import memory
from rankfold.planning.memory_examples import LLAMA_2_70B
from rankfold.planning.memory_question import answer_for, ask
from rankfold.planning.memory_report import report
from tests.unit.test_planning_experts import MIXTURE
from tests.unit.test_planning_search import SMALL, _config, _workload

ROOT = Path(__file__).resolve().parents[2]
H200 = MACHINES["h200-141"]
LAYER, MLP = 855_638_016, 3 * 8192 * 28_672
"""Numbers of the linears of a layer of Llama-2-70B, and of its MLP."""
REST = 2 * (2 * 32_000 * 8192 + 161 * 8192)
"""Bytes of its embedding, head and norms."""
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "mxfp8": 8.25, "fp8_block": 8 + 32 / 128**2, "int4": 4 + 16 / 128}

GPT_OSS = json.loads((ROOT / "examples/memory/models/gpt-oss-120b.json").read_text(encoding="utf-8"))
CONFIGS: dict[str, tuple[dict[str, object], dict[str, str | None]]] = {
    "gpt-oss": (
        GPT_OSS,
        {"layers.0.attention.q_proj": None, "layers.35.mlp.experts.127.up_proj": "mxfp4", "layers.1.mlp.router": None},
    ),
    "compressed-tensors": (
        {
            **SMALL,
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                "ignore": ["lm_head", "re:.*layers[.]0[.]mlp.*"],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                    }
                },
            },
        },
        {"layers.0.attention.q_proj": "nvfp4", "layers.0.mlp.up_proj": None, "layers.1.mlp.up_proj": "nvfp4"},
    ),
    "fp8": (
        {**SMALL, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"layers.0.attention.o_proj": "fp8_block", "lm_head": None},
    ),
}  # fmt: skip


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
    """For down_proj, once forward and once in backward; what it is decoded to has columns for adapters."""
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


@pytest.mark.parametrize("name", CONFIGS)
def test_formats_of_a_config(name: str) -> None:
    """By the names that the checkpoint has for the engine's."""
    hf, expected = CONFIGS[name]
    family, _ = family_of(hf)
    formats = stored_formats("stored", hf, family.names)
    assert formats is not None and stored_formats("nf4", hf, family.names) is None
    found = {module: formats(f"{module}.weight") for module in expected}
    assert {module: None if one is None else one.name for module, one in found.items()} == expected


def test_weights_as_large_as_the_published_checkpoint() -> None:
    """60.8 GiB, as its model card says (arXiv 2508.10925, table 1)."""
    family, _ = family_of(GPT_OSS)
    formats = stored_formats("stored", GPT_OSS, family.names)
    (found,) = predict_static(replace(_workload(GPT_OSS, _config()), base_dtype="stored", stored=formats), Layout())
    assert f"{found.static[WEIGHTS] / 2**30:.1f}" == "60.8"


def test_a_config_without_formats_is_refused() -> None:
    config = _config(model=ModelOptions(path="m", dtype="bfloat16", base_dtype="stored"))
    with pytest.raises(UserError, match="model.base_dtype is stored, but config.json has no quantization_config"):
        answer_for(SMALL, config, devices=1, gpu_memory=141, reserve=10)


NVFP4 = CONFIGS["compressed-tensors"][0]["quantization_config"]
ZEROS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


@pytest.mark.parametrize(("encoding", "option"), [(NVFP4, "--measure"), (ZEROS, "--measure"), (NVFP4, "--probe")])
def test_drawn_weights_are_measured_in_the_formats_of_the_checkpoint(
    encoding: dict[str, object], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "quantization_config": encoding}), encoding="utf-8")
    given = ["--gpu-memory", "8", "--machine", "cpu", option]
    if option == "--measure":
        lines = [
            f"model: {{path: {tmp_path}, base_dtype: stored, dtype: float32}}",
            "data: {train: t.jsonl, seq_length: 64}",
            "train: {steps: 1, micro_batch_size: 1, global_batch_size: 1}",
        ]
        (tmp_path / "run.yaml").write_text("\n".join(lines), encoding="utf-8")
        given += ["--config", str(tmp_path / "run.yaml")]
    else:
        given += ["--model", str(tmp_path), "--base-dtype", "stored", "--seq-length", "64", "--dtype", "float32"]
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    memory.run(parser.parse_args(given))
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith(("GiB in a step", "4 "))]
    assert len(rows) == 1, printed
    # plain torch decodes in steps whose results are memory too
    most = 1.01 if native_status().available else 1.15
    assert 0.95 < float(rows[0][6 if option == "--measure" else 5]) < most, printed


def test_merging_adds_the_adapters_to_what_decoding_reads() -> None:
    """For down_proj: A and B beside the codes, and the sum of 16 products for each number, a product and an addition
    each as long as both fused."""
    workload = _in("nvfp4", lora=LoraOptions(rank=16, merge_aware=True))
    found = kernel_times(workload, Layout(), MemoryPlan(), H200)
    assert not any(one.launch.name == "decode" for one in found)
    rows, columns = 8192, 28_672
    numbers = rows * columns
    nbytes = numbers // 2 + numbers // 16 + 4 * rows + 2 * 16 * (rows + columns) + 2 * numbers
    downs = [one for one in found if one.launch.name == "merge and decode" and one.launch.nbytes == nbytes]
    assert [(*one.part, one.count) for one in downs] == [("layers", "forward", 640), ("layers", "backward", 640)]
    assert {one.launch.flops for one in downs} == {4.0 * 16 * numbers}
    (each,) = {one.seconds / one.count for one in downs}
    assert each == pytest.approx(4 * 16 * numbers / (0.6 * 67e12), rel=0.01)  # of the data sheet's 67 TFLOP/s
    (estimate,) = predict_static(workload, Layout())
    assert estimate.static[DECODED] == 2 * 57_344 * 8192  # no columns of folded adapters


def _asked(folder: Path, *given: str) -> argparse.Namespace:
    """On a model whose linears are stored in FP8 blocks."""
    model = folder / "config.json"
    model.write_text(json.dumps(CONFIGS["fp8"][0]), encoding="utf-8")
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    return parser.parse_args(["--model", str(model), "--seq-length", "512", "--recompute", "selective", *given])


def test_an_answer_names_the_formats_and_merging(tmp_path: Path) -> None:
    stored = _asked(tmp_path, "--base-dtype", "stored")
    plain, merged = ask(stored), ask(argparse.Namespace(**{**vars(stored), "merge_aware": True}))
    assert ", LoRA rank 16, bfloat16, base stored (fp8_block)\n" in report(plain, top=1)
    told = report(merged, top=1)
    assert ", LoRA rank 16, merge-aware, bfloat16, base stored (fp8_block)\n" in told
    assert "\n  base_dtype: stored\n" in told and "\n  merge_aware: true\n" in told


@pytest.mark.parametrize("base", [[], ["--base-dtype", "nf4"]])
def test_merging_needs_a_format(base: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only weights in few bits are merged while they train: give --base-dtype as"):
        ask(_asked(tmp_path, "--merge-aware", *base))


@pytest.mark.parametrize("base", [[], ["--base-dtype", "int8"], ["--base-dtype", "nvfp4", "--merge-aware"]])
def test_products_of_codes_need_a_format(base: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--base-products is codes, which needs --base-dtype as one of stored, nvfp4"):
        ask(_asked(tmp_path, "--base-products", "codes", *base))


def test_an_answer_names_products_of_codes(tmp_path: Path) -> None:
    """NVFP4's; FP8 blocks of 704 columns no GPU multiplies."""
    codes = "--base-dtype", "nvfp4", "--base-products", "codes"
    told = report(ask(_asked(tmp_path, *codes, "--machine", "b200-180")), top=1)
    assert ", bfloat16, base nvfp4, products of codes\n" in told
    with pytest.raises(UserError, match="is 256 x 704 in fp8_block on each rank, but its products on a GPU need"):
        report(ask(_asked(tmp_path, "--base-dtype", "stored", "--base-products", "codes")), top=1)
    assert "\n  base_products: codes\n" in told
    with pytest.raises(UserError, match=r"base is in nvfp4, .* capability 10.0 or newer, but h100-80 has 9.x: set"):
        ask(_asked(tmp_path, *codes, "--machine", "h100-80"))


def test_products_of_codes_that_no_linear_has() -> None:
    with pytest.raises(UserError, match="base_dtype is mxfp4, but no frozen linear is in fp8_block, mxfp8 or nvfp4"):
        predict_time(replace(_in("mxfp4", SMALL), rounds_inputs=True), Layout(), MemoryPlan(), H200)


def test_a_teacher_has_decoded_products() -> None:
    """As `engine.distillation.teacher_model` opens it."""
    student = replace(_in("nvfp4"), rounds_inputs=True)
    assert not student.of_companion(Companion(student.decoder, student.plan)).rounds_inputs


def test_products_of_codes_are_counted() -> None:
    """FP8 blocks have all products of layers so, NVFP4 those of forward: its gradient decodes into the scratch."""
    for base, parts in (("fp8_block", {"forward", "backward"}), ("nvfp4", {"forward"})):
        workload = replace(_in(base), rounds_inputs=True)
        found = kernel_times(workload, Layout(), MemoryPlan(), H200)
        products = [one for one in found if one.launch.name.startswith("scaled_mm_v2")]
        assert {one.part[1] for one in products} == parts and {one.launch.kind for one in products} == {"fp8 product"}
        forward = [one for one in products if one.part == ("layers", "forward")]
        decoded = [one for one in kernel_times(_in(base), Layout(), MemoryPlan(), H200) if one.part == forward[0].part]
        theirs = sum(one.launch.flops * one.count for one in decoded if one.launch.kind == "product")
        ours = [one for one in found if one.part == forward[0].part and one.launch.kind.endswith("product")]
        assert sum(one.launch.flops * one.count for one in ours) == pytest.approx(theirs, rel=0.02)
        assert any(one.launch.name == "decode" for one in found) == (base == "nvfp4")
        (estimate,) = predict_static(workload, Layout())
        assert estimate.static.get(DECODED, 0) == (0 if base == "fp8_block" else 2 * 57_344 * 8192)
