"""The sections kernels, lora-tax and memory of tools/benchmark.py: whole commands at tiny sizes, arithmetic by hand,
and that a contestant which computes something else is refused."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="the lora-tax and memory sections compare with PEFT")
pytest.importorskip("triton", reason="the kernels section counts bytes with the Triton kernels' own functions")

from engine.errors import UserError
from engine.kernels.records import Documents
from engine.ops.kernels import REFERENCE
from rankfold.benchmarking import generate, loader, rollouts, tenants, tower
from rankfold.benchmarking.case import Case, Wrong
from rankfold.benchmarking.case import check as check_case
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.first_hour.targets import judge
from rankfold.benchmarking.kernels import attention
from rankfold.benchmarking.kernels.first_calls import measure_first_calls
from rankfold.benchmarking.kernels.groups import GROUPS, make_setting
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.lora_layers import engine, make_layer, peft, plain_torch
from rankfold.benchmarking.lora_tax import arithmetic_limit, layer_linears
from rankfold.benchmarking.memory import saved_bytes
from rankfold.benchmarking.options import (
    _TAX_ON_CPU,
    _TAX_ON_GPU,
    KernelOptions,
    StepOptions,
    TaxOptions,
    for_device,
    read_shapes,
)
from rankfold.benchmarking.sections import GenerateOptions, LoaderOptions, RolloutsOptions, TenantsOptions, TowerOptions
from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TINY = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "vocab": 131, "rank": 4}
TINY_KERNELS = {
    "tokens": 16, "length": 8, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 24, "vocab": 40,
    "trained": 600, "rank": 3, "copy_mib": 1, "ceiling": 16, "repeats": 2, "warmup": 0, "device": "cpu",
}  # fmt: skip
TINY_SHAPES = "column:8x16x12,row:8x16x12,norm-column:8x16x8+4,swiglu-row:8x12x16"


def _typed(options: dict) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _run_section(
    section: str, options: dict, folder: Path, environment: dict | None = None
) -> tuple[dict, list[list[str]]]:
    """The JSON record of a whole command, and the cells of all rows of its Markdown tables."""
    files = {"json": folder / "result.json", "markdown": folder / "result.md"}
    python = str(warm_python()) if environment is None else sys.executable
    done = subprocess.run(
        [python, "tools/benchmark.py", section, *_typed({**options, **files})],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}, timeout=100,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(files["json"].read_text())
    assert record["command"].startswith(f"rankfold benchmark {section} ")
    lines = [line for line in files["markdown"].read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(table["title"] in done.stdout for table in record["tables"])
    return record, rows


@pytest.mark.slow
def test_kernels_section(tmp_path: Path) -> None:
    record, rows = _run_section("kernels", TINY_KERNELS, tmp_path)
    assert [table["group"] for table in record["tables"]] == list(KernelOptions.GROUPS)
    cases = {name: case for table in record["tables"] for name, case in table["cases"].items()}
    for name, case in cases.items():
        assert case["seconds"]["copy"] and len(case["limit_seconds"]) == 2, name
        assert all(error <= 1e-4 for error in case["error"].values()), name
        assert all(len(taken) == 2 for taken in case["seconds"].values()), name
    contestants = {(row[0], row[2]) for row in rows}
    assert {("RMSNorm forward", who) for who in ("reference", "torch")} <= contestants
    assert all((name, who) in contestants for name, case in cases.items() for who in case["error"])
    absent = " ".join(record["findings"])
    assert all(
        f"Not measured: {name} (" in absent
        for name in ("triton", "compile", "liger", "quack", "flash-attn", "flash-attn-4")
    )
    winners = [sentence for sentence in record["tables"][-1]["findings"] if "winner" in sentence]
    # forward with x made and with x given, backward, and backward with dB by two backends, of four linears
    assert len(winners) == 5 * 4
    # by hand: x and y of 16 x 16 floats, 16 weights, 16 reciprocal norms
    assert cases["RMSNorm forward"]["moved_bytes"] == 4 * (2 * 16 * 16 + 16 + 16)
    # logits and input gradient of a head, 2 operations a product
    assert next(c for n, c in cases.items() if "head" in n)["operations"] == 2 * 2 * 16 * 16 * 40


@pytest.mark.slow
def test_triton_kernels_are_checked_by_the_interpreter(tmp_path: Path) -> None:
    """What a GPU will time computes the right thing."""
    options = {**TINY_KERNELS, "repeats": 0, "only": "norm,rope,low-rank,product,quantize", "peers": "none"}
    record, rows = _run_section("kernels", options, tmp_path, {"TRITON_INTERPRET": "1"})
    found = {(row[0], row[2]) for row in rows}
    expected = {
        ("RMSNorm backward, rank-r update, dropout", "triton, two kernels"),
        ("query and key norm, RoPE, backward", "triton"),
        ("LoRA dH and dB of q, k, v", "triton"),
        ("SwiGLU and FP8 codes", "triton"),
        ("fp8_block merged, rank 16", "triton"),
        ("LoRA H", "triton"),
    }
    assert expected <= found
    assert "nothing was timed" in record["findings"][0] and "median ms" not in rows[0]


def test_torchs_function_for_documents_takes_the_call() -> None:
    """On tensors that have shapes alone; it runs on a GPU only."""
    q, k, v = (torch.empty(12, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (6, 2, 2))
    documents = Documents(lengths=(5, 7), offsets=torch.empty(3, dtype=torch.int32, device="meta"), max_length=7)
    assert attention._varlen_attn(documents, q, k, v).shape == q.shape


@pytest.mark.slow
def test_first_calls_of_two_processes() -> None:
    """What a GPU's table takes its first calls from, on a CPU: the same contestants twice, each in a new process."""
    options = KernelOptions(**{**TINY_KERNELS, "only": "swiglu,dropout", "peers": "none"})
    found = measure_first_calls(for_device(options, "cpu"))
    for seconds in (found.cold, found.warm):
        assert set(seconds) == {*GROUPS["swiglu"][1], *GROUPS["dropout"][1]}
        assert all(taken > 0 for each in seconds.values() for taken in each.values())
        assert all("reference" in each for each in seconds.values())
    assert found.files == (0, 0), "nothing is compiled by Triton on a CPU"
    said = replace(found, cold={"a": {"x": 9.0, "y": 1.0}}, warm={"a": {"x": 0.5}}, files=(7, 7)).sentences()
    assert said == (
        "First calls of all contestants together: 10.0 s in a process with empty caches, 0.5 s in a second process "
        "that finds them (7 files in Triton's cache, then 7: nothing new was compiled).",
    )
    assert (
        "(7 files in Triton's cache, then 9: 2 files are new)"
        in replace(found, cold={"a": {"x": 9.0}}, files=(7, 9)).sentences()[0]
    )


def test_lora_tax_section(tmp_path: Path) -> None:
    options = {"shapes": TINY_SHAPES, "rank": 2, "ceiling": 16, "repeats": 2, "warmup": 0, "device": "cpu"}
    record, rows = _run_section("lora-tax", options, tmp_path)
    cases = record["tables"][0]["cases"]
    assert [(case["linear"], case["dropout"]) for case in cases] == [
        (shape, dropout) for shape in TINY_SHAPES.split(",") for dropout in (0.0, 0.1)
    ]
    for case in cases:
        assert {"frozen", "engine (reference)", "torch LoRA", "PEFT"} <= set(case["seconds"])
        assert all(error <= 1e-4 for error in case["error"].values())
        frozen = [seconds for who, seconds in case["seconds"].items() if who.startswith("frozen")]
        faster = min(frozen, key=statistics.median)
        assert case["over_frozen"] == {
            who: statistics.median(map(truediv, case["seconds"][who], faster)) for who in case["error"]
        }
        case["over_frozen"] = {"engine (triton)": case["over_frozen"]["engine (reference)"]}  # as on a GPU
    judged = [one.value for one in judge({"section": "lora-tax", "tables": [{"cases": cases}]}, "")]
    column = rows[0].index("over frozen")
    assert [f"{one:.3f}" for one in judged] == [row[column] for row in rows[2:] if row[2] == "engine (reference)"]
    targets = {row[2]: row[rows[0].index("target")] for row in rows[2:]}
    assert targets["engine (reference)"] == "1.10" and targets["PEFT"] == ""
    assert sum("the target of 1.10" in sentence for sentence in record["tables"][0]["findings"]) == 8


def test_a_layer_is_recognised_among_linears() -> None:
    layer = "norm-column:8x4x4+2+2,row:8x4x4,norm-column:8x4x6+6,swiglu-row:8x6x4"
    assert layer_linears(read_shapes(f"column:8x4x4,{layer},row:8x6x4")) == read_shapes(layer)
    for missing in layer.split(","):
        assert layer_linears(read_shapes(layer.replace(missing, "column:8x4x6"))) == ()
    assert len(layer_linears(read_shapes(_TAX_ON_CPU))) == len(layer_linears(read_shapes(_TAX_ON_GPU))) == 4


@pytest.mark.slow
def test_memory_section(tmp_path: Path) -> None:
    sizes = {**TINY, "layers": 1, "rows": 2, "length": 9, "device": "cpu", "kernels": "reference"}
    record, _ = _run_section("memory", sizes, tmp_path)
    peaks, kept = record["tables"]
    assert set(peaks["peak_bytes"]) == {"engine", "transformers + PEFT", "transformers + PEFT, checkpointing"}
    # by hand, in float32: 6h + 2 h_kv + 3f; and 4h + 2 h_kv + 2f + 7r, two reciprocal norms, a statistic of each head
    assert kept["plain_bytes"] == 18 * 4 * (6 * 32 + 2 * 16 + 3 * 48)
    assert kept["designed_bytes"] == 18 * 4 * (4 * 32 + 2 * 16 + 2 * 48 + 7 * 4 + 2 + 4)
    # torch's own attention keeps its statistics as it likes
    assert kept["layer_bytes"]["engine"] == pytest.approx(kept["designed_bytes"], abs=18 * 4 * 4 + 64)
    assert kept["layer_bytes"]["transformers + PEFT"] > kept["plain_bytes"]


def test_saved_bytes_count_each_storage_once() -> None:
    """By hand: the square keeps x, the product keeps both factors, one of them x again and one a parameter."""
    x, weight = torch.randn(5, 5, requires_grad=True), torch.nn.Parameter(torch.randn(5, 5))

    class Side:
        def loss(self, ids_BS: torch.Tensor) -> torch.Tensor:
            return (x.square() @ weight).sum() + (x * 1.5).exp().sum()

    # x [5, 5], its square (for the weight's gradient) and the exponential
    assert saved_bytes(Side(), torch.empty(0), [weight]) == 3 * 25 * 4


def test_arithmetic_of_adapters() -> None:
    """A square linear of 4096 at rank 16: 1.5 (r / O + r / I) on top, 1.2 percent."""
    assert arithmetic_limit(read_shapes("column:8192x4096x4096")[0], 16) == pytest.approx(1 + 1.5 * 2 * 16 / 4096)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return make_setting(KernelOptions(**TINY_KERNELS, dtype="float32"), CPU)[0]


def _one_bit_flipped(mask: torch.Tensor) -> torch.Tensor:
    """The mask is bytes of bits or booleans; in either the first number's lowest bit is one element's."""
    flipped = mask.clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    return flipped


@pytest.mark.parametrize(
    ("case", "spoil"),
    [
        ("RMSNorm forward", lambda results: [results[0] * 1.001]),
        ("LoRA dA, dropout", lambda results: [results[0], results[0]]),
        ("RoPE split", lambda results: [results[0], results[1], results[2] * float("nan")]),
        ("dropout mask", lambda results: [torch.full_like(results[0], 255)]),
        ("dropout mask", lambda results: [_one_bit_flipped(results[0])]),
        ("AdamW update", lambda results: [results[0], results[1], results[2] + 1.0]),
    ],
)
def test_a_wrong_contestant_is_refused(setting: Setting, case: str, spoil: Callable) -> None:
    built = {name: build for _, members in GROUPS.values() for name, build in members.items()}[case](setting)
    name, right = next((name, each) for name, each in built.contestants.items() if name != "torch")
    check_case(case, built, CPU, 1e-4)
    wrong = replace(right, run=lambda: spoil(right.run()))
    with pytest.raises(Wrong, match=f"{case}: {name} computes something else"):
        check_case(case, replace(built, contestants={**built.contestants, name: wrong}), CPU, 1e-4)


def test_a_linear_without_its_mask_is_refused() -> None:
    shape = read_shapes("column:8x16x12")[0]
    layer = make_layer(shape, 2, 0.3, CPU, torch.float32)
    for build in (plain_torch, peft, partial(engine, kernels=REFERENCE)):
        right = build(layer)
        case = Case(size="", demand=Demand(), contestants={"it": right}, answer=list)
        check_case("dropout", case, CPU, 1e-4)
        # the same linear that drops nothing
        undropped = replace(right, run=build(replace(layer, dropout=0.0)).run)
        with pytest.raises(Wrong, match="it computes something else"):
            check_case("dropout", replace(case, contestants={"it": undropped}), CPU, 1e-4)


TINY_TOWER = {"images": 2, "side": 56, "layers": 2, "width": 32, "heads": 4, "mlp": 48, "repeats": 2, "warmup": 0}


@pytest.mark.slow
def test_tower_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every work of both sides is timed; a tower that computes something else is not."""
    monkeypatch.setattr(tower, "in_new_process", lambda function, *arguments: function(*arguments))
    table = tower.run(TowerOptions(**TINY_TOWER, device="cpu"))
    assert [row[0] for row in table.rows] == [tower.FORWARD, tower.TRAINING]
    assert all(len(times) == 2 and min(times) > 0 for times in table.data["seconds"].values())
    assert len(table.data["seconds"]) == len(table.data["peaks"]) == 4
    monkeypatch.setattr(tower, "_names", _mixed_up(tower._names))
    with pytest.raises(AssertionError, match="the towers compute different features"):
        tower.build_pair(TowerOptions(**TINY_TOWER, device="cpu"), CPU)


TINY_MODEL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "vocab": 97}


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_generate_section(kind: str, tmp_path: Path) -> None:
    """Both sides read one model and make the same tokens, also of prompts of mixed lengths."""
    options = GenerateOptions(**TINY_MODEL | {"layers": 4}, model_type=kind, prompt=12, new=5, device="cpu")
    generate.write_model(options, tmp_path)
    for mixed in (False, True):
        prompts = generate._prompts(options, 3, mixed=mixed)
        tokens = [generate.offer(side, tmp_path, options)["tokens"](prompts, 5) for side in generate._SIDES]
        assert tokens[0] == tokens[1] and [len(row) for row in tokens[0]] == [5, 5, 5]


TINY_ROLLOUTS = {**TINY_MODEL, "rank": 2, "prompts": 3, "prompt": 20, "group": 4, "new": 3, "repeats": 1,
                 "device": "cpu"}  # fmt: skip


def test_rollouts_section(tmp_path: Path) -> None:
    """Both sides read one model and one adapter, make the same greedy tokens, and the engine keeps a prompt once."""
    options = RolloutsOptions(**TINY_ROLLOUTS)
    rollouts.write_model(options, tmp_path / rollouts.MODEL)
    rollouts.write_adapter(options, tmp_path)
    prompts = rollouts._prompts(options)
    assert [len(prompt) for prompt in prompts] == [5, 12, 20]
    sides = {side: rollouts.offer(side, tmp_path, options) for side in (rollouts.ENGINE, rollouts.PEER)}
    tokens = {side: asked["greedy"](prompts, 4) for side, asked in sides.items()}
    assert tokens[rollouts.ENGINE] == tokens[rollouts.PEER]
    assert all(len(row) == 4 for row in tokens[rollouts.PEER])
    for asked in sides.values():
        assert asked["seconds"](prompts, options.new) > 0
    # of twelve rows, 22 tokens each; the last one that is made is not kept
    width = 2 * 2 * 2 * 8 * 4
    assert sides[rollouts.PEER]["cache_bytes"]() == 12 * (20 + 3 - 1) * width
    assert sides[rollouts.ENGINE]["cache_bytes"]() > 0


@pytest.mark.slow
def test_tenants_section(tmp_path: Path) -> None:
    """All sides start from the same adapters, of which each has a batch of its own; one that differs is refused."""
    options = TenantsOptions(**{**TINY_MODEL, "rows": 1, "length": 8, "rank": 2, "adapters": 3, "device": "cpu"})
    tenants.write_folder(options, tmp_path)
    sides = {side: tenants.offer(side, tmp_path, options) for side in (tenants.TOGETHER, tenants.ALONE, tenants.PEER)}
    figures = {side: asked["figures"]() for side, asked in sides.items()}
    assert len(set(figures[tenants.PEER])) == 3 and "agree within" in tenants._agreement(options, figures)
    figures[tenants.PEER][1] = figures[tenants.PEER][0]
    with pytest.raises(RuntimeError, match="compute different things"):
        tenants._agreement(options, figures)
    assert all(asked["seconds"]() > 0 for asked in sides.values())


def _mixed_up(names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Queries, keys and values in another order."""
    return lambda name: names(name)[::-1]


def test_loader_section() -> None:
    """Without threads a step waits for its images, with one it does where the step is long enough for them."""
    options = LoaderOptions(images=4, side=448, rows=2, step_ms=60, steps=4, workers="0,1")
    table = loader.run(options)
    alone, ahead = table.data["seconds stalled"].values()
    assert alone > 0.2 * options.steps * options.rows * table.data["seconds for an image"] > 0
    assert ahead < alone


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (LoaderOptions, {"workers": "1,x"}, ["1,x", "whole numbers"]),
        (LoaderOptions, {"side": 450}, ["450", "multiple of 14"]),
        (TowerOptions, {"width": 100}, ["--width 100", "--heads 16"]),
        (KernelOptions, {"tokens": 10, "length": 4}, ["10", "4", "multiple"]),
        (KernelOptions, {"only": "norm,nrom"}, ["nrom", "--only"]),
        (KernelOptions, {"peers": "ligre"}, ["ligre", "liger"]),
        (TaxOptions, {"shapes": "column:8x16"}, ["column:8x16", "TOKENSxINPUTSxOUTPUTS"]),
        (TaxOptions, {"shapes": "row:8x16x4+4"}, ["row:8x16x4+4"]),
        (StepOptions, {"peers": "peft-checkpointing"}, ["peft-checkpointing", "--peers"]),
    ],
)
def test_impossible_options_of_sections(kind: type, wrong: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        kind(**wrong)
    assert all(word in str(caught.value) for word in words)


def test_open_options_follow_the_device() -> None:
    on_cpu, on_gpu = (for_device(KernelOptions(hidden=64), device) for device in ("cpu", "cuda"))
    assert (on_cpu.hidden, on_cpu.tokens, on_cpu.dtype) == (64, 1024, "float32")
    assert (on_gpu.hidden, on_gpu.tokens, on_gpu.dtype) == (64, 8192, "bfloat16")
