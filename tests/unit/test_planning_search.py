"""The planner's layouts, times and command: against arithmetic by hand, published sizes, and the rules of a run."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.model_folder import open_model
from engine.config.data import DataOptions
from engine.config.load import parse_config
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config, check_world
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.errors import UserError
from engine.layers.module import shard_entries
from engine.layers.recompute import MemoryPlan
from engine.models.describe import meta_model
from engine.models.families import family_of
from engine.models.flops import head_in_layers
from engine.planning.ledger import ADAPTERS, GRADIENTS, MASTERS, OPTIMIZER, WEIGHTS
from engine.planning.machine import Machine
from engine.planning.peak import predict_layout
from engine.planning.pipeline_parts import pipeline_plan
from engine.planning.predict import workload_of
from engine.planning.rank_layout import Layout, Workload
from engine.planning.step_time import StepTime, predict_time
from engine.planning.traces import rank_model
from engine.training.module_plan import training_plan
from engine.training.stage_layout import plan_partition
from rankfold.planning import memory, memory_examples
from rankfold.planning.memory_examples import LLAMA_2_70B, LLAMA_3_8B
from rankfold.planning.memory_question import GIB, Answer, answer_for
from rankfold.planning.memory_report import winning_yaml
from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2000,
}  # fmt: skip
FREE = Machine(name="free", memory=80, products=1.0, copies=1e15, link=1e15, network=1e15)
"""Nothing but arithmetic takes time, a tera-operation a second."""


def _config(length: int = 512, rows: int = 8, **changes: Any) -> RunConfig:
    config = RunConfig(
        model=ModelOptions(path="model", dtype="bfloat16"),
        lora=LoraOptions(rank=16),
        data=DataOptions(seq_length=length),
        train=TrainOptions(global_batch_size=rows),
    )
    return replace(config, **changes)


def _workload(hf: dict[str, Any], config: RunConfig) -> Workload:
    family, text = family_of(hf)
    decoder = family.config_from_hf(text)
    return workload_of(config, decoder, training_plan(config, decoder, family.names), device_type="cuda")


@pytest.mark.parametrize(
    "hf, parameters, adapters",
    [(LLAMA_3_8B, 8_030_261_248, 41_943_040), (LLAMA_2_70B, 68_976_648_192, 207_093_760)],
    ids=["Llama-3-8B", "Llama-2-70B"],
)
def test_what_is_always_there_of_published_models(hf: dict[str, Any], parameters: int, adapters: int) -> None:
    """Parameter counts as published; adapters: 16 (inputs + outputs) of every linear, as PEFT counts them."""
    (found,) = predict_layout(_workload(hf, _config()), Layout(), MemoryPlan())
    assert found.static[WEIGHTS] == 2 * parameters
    assert found.static[MASTERS] == found.static[GRADIENTS] == 4 * adapters
    assert found.static[OPTIMIZER] == 8 * adapters
    # two bytes of A, and of 64 columns for B beside each of the four weights of a layer, on which rows end on a GPU
    hidden, inner, layers = hf["hidden_size"], hf["intermediate_size"], hf["num_hidden_layers"]
    keys = hidden // hf["num_attention_heads"] * hf["num_key_value_heads"]
    a, b = 16 * (6 * hidden + inner), 64 * ((hidden + 2 * keys) + hidden + 2 * inner + hidden)
    assert found.static[ADAPTERS] == 2 * layers * (a + b)


def _step(layers: int = 8, parallel: ParallelOptions | None = None, length: int = 512, **changes: Any) -> StepTime:
    hf = {**SMALL, "num_hidden_layers": layers, "vocab_size": 8}
    workload = _workload(hf, _config(length, **changes))
    layout = Layout(parallel=parallel or ParallelOptions())
    return predict_time(workload, layout, MemoryPlan(), FREE)


def test_a_step_under_a_frozen_base_takes_four_operations_a_weight() -> None:
    """Forward and the input's gradient, 2 N each, and causal attention's two and five products of T S h operations. N
    counts 64 columns for adapters beside each weight."""
    tokens, length, width = 8 * 512, 512, 256
    linears = 256 * (2 * 256 + 2 * 128) + 3 * 256 * 704
    columns = 64 * (512 + 256 + 2 * 704 + 256)
    plain = _step(lora=LoraOptions(rank=1))
    assert plain.step * 1e12 == pytest.approx(8 * tokens * (4 * (linears + columns) + 7 * length * width), rel=0.03)
    whole = _step(lora=LoraOptions(rank=0), trainable=("*",))
    assert whole.step * 1e12 == pytest.approx(8 * tokens * (6 * linears + 7 * length * width), rel=0.01)


def test_a_layer_made_again_takes_its_forward_once_more() -> None:
    workload = _workload({**SMALL, "vocab_size": 8}, _config(lora=LoraOptions(rank=1)))
    selective, full = (
        predict_time(workload, Layout(), MemoryPlan(recompute=level), FREE).step for level in ("selective", "full")
    )
    # [x | H] [W | B] with 64 columns for B, and H itself; the last product is not recomputed, attention's two are
    products = 320 * (512 + 256 + 1408) + 256 * (3 + 1 + 2) + 704
    assert (full - selective) * 1e12 == pytest.approx(8 * 8 * 512 * (2 * products + 2 * 512 * 256), rel=0.001)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bubble_is_that_of_one_forward_one_backward(ranks: int) -> None:
    """(p - 1) / (m + p - 1) of the time is idle where stages are equal."""
    found = _step(parallel=ParallelOptions(pipeline=ranks, virtual=1))
    assert found.bubble == pytest.approx((ranks - 1) / (8 + ranks - 1), abs=0.005)


LAYOUTS = {
    "even": (ParallelOptions(pipeline=4), {}),
    "interleaved": (ParallelOptions(pipeline=2, virtual=4), {}),
    "upper layers": (
        ParallelOptions(pipeline=2), {"lora": LoraOptions(targets=("layers[.][4567][.].*_proj",))}
    ),
    "everything": (ParallelOptions(pipeline=2, virtual=2), {"lora": LoraOptions(rank=0), "trainable": ("*",)}),
    "head alone": (ParallelOptions(pipeline=2), {"lora": LoraOptions(rank=0), "trainable": ("lm_head",)}),
    "written": (ParallelOptions(pipeline=2, virtual=1, layers_per_stage=(5, 3)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    parallel, changes = LAYOUTS[name]
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "vocab_size": 9000}))
    config = _config(parallel=parallel, **changes)
    model = open_model(tmp_path)
    plan = training_plan(config, model.decoder, model.names)
    entries = shard_entries(meta_model(model.decoder, plan=plan))
    trained = [entry.name for entry in entries if entry.sink is not None]
    expected = plan_partition(config, model.decoder, trained, parallel.pipeline)
    workload = workload_of(config, model.decoder, plan, device_type="cuda")
    found = pipeline_plan(model.decoder, rank_model(workload, parallel).shape, parallel, 8)
    assert found.layers == expected.layers
    assert found.schedule == expected.choice.schedule(8)


@pytest.mark.parametrize("longest", [3, 48, 64, 100])
def test_documents_that_do_not_fill_a_row(longest: int) -> None:
    """Every row has as many tokens, whatever documents it is filled with, and kernels of a GPU keep no scores."""
    workload = _workload(SMALL, _config(length=64))
    (whole,), (found,) = (
        predict_layout(one, Layout(), MemoryPlan()) for one in (workload, replace(workload, longest_document=longest))
    )
    assert found.step == whole.step


def test_the_heads_time_is_that_of_its_weights(tmp_path: Path) -> None:
    """In layers: a product takes as long as it has weights, whatever the heads' sizes."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "vocab_size": 9000, "head_dim": 24}))
    model = open_model(tmp_path)
    shapes = model.expected_shapes()
    layer = sum(prod(shape) for name, shape in shapes.items() if name.startswith("layers.0.") and len(shape) == 2)
    assert head_in_layers(model.decoder) == prod(shapes["embed_tokens.weight"]) / layer


def _answer(devices: int, gib: float, **changes: Any) -> Answer:
    return answer_for(SMALL, _config(**changes), devices=devices, gpu_memory=gib, reserve=0, machine="h100-80")


def test_a_search_tries_every_layout() -> None:
    """8 devices: 20 ways to write 8 as an ordered product of four; tensor above 1 counts twice for sequence
    parallelism, pipeline above 1 twice for stages. Of eight layers, 8 x 2 stages cannot be."""
    found = _answer(8, 80).found
    layouts = [one.layout for one in (*found.fitting, *found.too_large, *found.refused)]
    ways = {
        (layout.parallel.tensor, layout.parallel.context, layout.parallel.pipeline, layout.data) for layout in layouts
    }
    assert len(ways) == 20
    reasons = {(one.layout.parallel.pipeline, one.layout.parallel.virtual): one.reason for one in found.refused}
    assert "8 layers cannot be split into 16 stages" in reasons[8, 2]
    assert any("key/value heads" in one.reason for one in found.refused) is False  # 4 heads on 8 ranks are shared
    times = [one.time.step for one in found.fitting if one.time is not None]
    assert times == sorted(times, key=lambda step: round(step, 6)) and len(times) == len(found.fitting)


def test_less_memory_takes_more_work() -> None:
    """Between what fits without work and what does not fit at all, layers are recomputed one by one. Keeping more than
    "selective" keeps is no faster: on a GPU, backward of an adapter makes its input in the kernel that reads it."""
    whole = _answer(1, 80, train=TrainOptions(micro_batch_size=8)).found.fitting[0]
    assert whole.memory.recompute == "selective"
    selective = predict_layout(
        _workload(SMALL, _config(train=TrainOptions(micro_batch_size=8))), Layout(), MemoryPlan()
    )[0]
    tight = _answer(1, selective.peak * 0.8 / GIB, train=TrainOptions(micro_batch_size=8)).found.fitting
    assert {one.memory.recompute for one in tight} == {"attention", "full"}
    for one in tight:
        layers = one.memory.recompute_layers
        assert layers is not None and 1 <= layers < 8 and one.estimate.peak <= selective.peak * 0.8
    none = _answer(1, 0.001)
    assert not none.found.fitting and none.found.too_large[0].memory.recompute == "full"


def test_the_winner_is_a_configuration_that_runs(tmp_path: Path) -> None:
    answer = _answer(8, 80)
    for number, one in enumerate(answer.found.fitting[:4]):
        path = tmp_path / f"{number}.yaml"
        path.write_text(winning_yaml(answer, one))
        config = parse_config(["--config", str(path), "--model.path", "model"])
        check_config(config)
        check_world(config, 8)
        assert config.parallel == one.layout.parallel
        assert (config.memory.recompute, config.memory.recompute_layers) == (
            one.memory.recompute, one.memory.recompute_layers,
        )  # fmt: skip
        assert config.lora == answer.config.lora and config.data.seq_length == 512


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), "tools/plan.py", "memory", *map(str, arguments)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip


def test_the_command_with_a_probe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    done = command(
        "--model", tmp_path, "--gpu-memory", 1, "--seq-length", 128, "--dtype", "float32", "--kernels", "reference",
        "--machine", "cpu", "--probe",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Yes. Fastest that fits: tensor 1, data 1; recompute" in done.stdout
    assert f"path: {tmp_path}" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("2  ", "4  ", "a layer"))]
    assert [row[0] for row in rows] == ["2", "4", "a"]
    for row in rows[:2]:  # predicted MiB, measured MiB, factor
        assert float(row[5]) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ((), "--model is not given"),
        (("--model", "nowhere"), "neither a folder nor a file"),
        (("--model", str(ROOT / "README.md")), "is not valid JSON"),
        (("--model", "CONFIG", "--gpus", 0), "--gpus is 0: give at least 1."),
        (("--model", "CONFIG", "--recompute", "some"), "'some', which is not a policy"),
        (("--model", "CONFIG", "--machine", "abacus"), "--machine is abacus"),
        (("--model", "CONFIG", "--trainable", "*", "--rank", 8), "is in lora.targets and in trainable"),
    ],
)
def test_refusals_say_what_to_change(arguments: tuple[object, ...], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    given = [str(tmp_path / "config.json" if one == "CONFIG" else one) for one in arguments]
    with pytest.raises(UserError, match=re.escape(sentence)):
        memory.run(parser.parse_args(given))


def test_a_refusal_is_one_line() -> None:
    done = command("--model", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --model is nowhere") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_examples_answer() -> None:
    """Llama-2-70B's weights alone are 128.5 GiB in bf16: two bytes of 68,976,648,192 parameters."""
    rows = {
        tuple(line.split()[:5]): line
        for line in memory_examples.report(memory.RESERVE).splitlines()
        if line.startswith("Llama")
    }
    assert len(rows) == len(memory_examples.EXAMPLES)
    one = rows["Llama-2-70B", "8192", "1", "x", "141"]
    assert "does not fit" in one and "weights alone 128.5" in one
    assert "does not fit" not in rows["Llama-2-70B", "8192", "8", "x", "80"]
