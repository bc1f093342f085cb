"""What makes room: encodings of the base, host memory and fewer bits, in the planner's search, times and command."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import parse_config
from engine.config.lora import LoraOptions
from engine.config.objective import ObjectiveOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config, check_world
from engine.errors import UserError
from engine.layers.recompute import MemoryPlan
from engine.layers.rounding import FLOAT8
from engine.planning.ledger import ACTIVATIONS, WEIGHTS
from engine.planning.peak import predict_layout
from engine.planning.predict import workload_of
from engine.planning.rank_layout import Layout, Workload
from engine.planning.search import SearchResult
from engine.planning.step_time import predict_time
from rankfold.planning import memory
from rankfold.planning.memory_examples import LLAMA_2_70B
from rankfold.planning.memory_question import Allowed, Answer, answer_for
from rankfold.planning.memory_report import winning_yaml
from tests.unit import test_planning_search as searches
from tests.unit.test_planning_search import SMALL, _config, _workload

GIB = 2**30
FREE = replace(searches.FREE, products_fp8=2.0, host=1e15)
"""As in the search's tests, with FP8 products at twice the speed."""


def _one_gpu(base: str | None = "fp8", allowed: Allowed | None = None, **changes: Any) -> Answer:
    config = _config(8192, **changes)
    config = replace(config, model=replace(config.model, base_dtype=base))
    return answer_for(LLAMA_2_70B, config, devices=1, gpu_memory=139, reserve=6, allowed=allowed)


def _encoded(base: str | None, **changes: Any) -> Workload:
    config = _config(8192, **changes)
    return _workload(LLAMA_2_70B, replace(config, model=replace(config.model, base_dtype=base)))


@pytest.mark.parametrize("base, bits", [("int8", 8), ("fp8", 8), ("nf4", 4 + 8 / 64)])
def test_bytes_of_published_weights(base: str, bits: float) -> None:
    """Codes of the 80 x 855,638,016 numbers of the layers, and an 8-bit scale for 64 of nf4. Scales of rows are less
    than a thousandth of that; the 13 bytes that nf4 has beside for a row of 8192, which is 4224 bytes, 3 in a thousand.
    Embedding, head and norms have two bytes a number."""
    (found,) = predict_layout(_encoded(base), Layout(), MemoryPlan())
    rest = 2 * (2 * 32000 * 8192 + 161 * 8192)
    assert found.static[WEIGHTS] == pytest.approx(80 * 855_638_016 * bits / 8 + rest, rel=0.004)


def test_what_layers_keep_of_published_models() -> None:
    """About 113 GiB with norms and SwiGLU made again; at most three layers of it are left where it waits in host
    memory, which then has the rest; a byte a number and a scale a token in float8."""
    workload = _encoded("fp8")
    plain, away, small = (
        predict_layout(workload, Layout(), memory)[0]
        for memory in (
            MemoryPlan(), MemoryPlan(offload=True), MemoryPlan(stored_dtype=FLOAT8),
        )
    )  # fmt: skip
    kept = plain.parts[ACTIVATIONS]
    assert kept == pytest.approx(113 * GIB, rel=0.01)
    assert away.parts[ACTIVATIONS] < 3 / 80 * kept < 0.05 * away.host
    assert away.host == pytest.approx(79 / 80 * kept, rel=0.01)
    assert small.parts[ACTIVATIONS] == pytest.approx(kept / 2, rel=0.02)


def test_fp8_products_take_their_own_speed() -> None:
    """4 N operations a token by linears of the layers at twice the speed; not attention's 7 S w. The model is so wide
    that its adapters, which bases multiply in different ways, do not count."""
    wide = {**SMALL, "vocab_size": 8, "hidden_size": 8192, "intermediate_size": 16384}
    workload = _workload(wide, _config(512, lora=LoraOptions(rank=1)))
    tokens, linears = 8 * 512, 8192 * (2 * 8192 + 2 * 4096) + 3 * 8192 * 16384
    attention = 7 * 512 * 8192
    times = {
        base: predict_time(replace(workload, base_dtype=base), Layout(), MemoryPlan(), FREE).step * 1e12
        for base in (None, "fp8", "int8")
    }
    saved = 8 * tokens * 4 * linears / 2
    assert times[None] - times["fp8"] == pytest.approx(saved, rel=0.02)
    assert times["int8"] == pytest.approx(times[None], rel=1e-6)  # whose bytes cost nothing on this machine
    assert saved > 4 * 8 * tokens * attention / 7


@pytest.mark.parametrize("base, gathered", [(None, 2 * 256), ("fp8", 2 * 256), ("fp8_row", 256 + 4)])
def test_a_base_with_scales_by_row_gathers_codes(base: str | None, gathered: int) -> None:
    """Bytes a token that cross two tensor ranks, of which half are at home: inputs of q, k, v and of gate and up;
    outputs of the other two linears; in backward dX of the former and dY of the latter."""
    layout = Layout(parallel=ParallelOptions(tensor=2, sequence=True))
    workload = replace(_workload({**SMALL, "vocab_size": 8}, _config(512)), base_dtype=base)
    found = predict_time(workload, layout, MemoryPlan(), replace(FREE, link=1e-3))
    layer = 2 * gathered + (2 + 4) * 2 * 256
    assert found.links == pytest.approx(8 * 512 * 8 * layer / 2 / 1e6, rel=1e-9)


def test_what_comes_from_host_memory_is_waited_for_where_arithmetic_does_not_hide_it() -> None:
    """80 layers, there and back, of 855,638,016 bytes and a little over a link, less the time of the layer itself."""
    workload = replace(_encoded("fp8", rows=1), global_batch=1)
    plain = predict_time(workload, Layout(), MemoryPlan(), FREE).step
    slow = replace(FREE, host=1e-3)
    waiting = predict_time(replace(workload, offload_weights=True), Layout(), MemoryPlan(), slow).step
    assert waiting == pytest.approx(2 * 80 * 855_638_016 / 1e6, rel=0.01)
    hidden = predict_time(replace(workload, offload_weights=True), Layout(), MemoryPlan(), FREE).step
    assert hidden == pytest.approx(plain, rel=1e-6)
    moved = predict_time(workload, Layout(), MemoryPlan(offload=True), slow).step
    assert moved == pytest.approx(2 * 113 * GIB / 1e6, rel=0.02)  # sent and fetched


def test_a_reference_takes_one_forward_more() -> None:
    """The forward of the model without adapters is 2 of its 4 N operations."""
    rows = {"rows": 8, "length": 512}
    plain, compared = (
        predict_time(replace(_workload({**SMALL, "vocab_size": 8}, _config(**rows)), refers_to_base=refers), Layout(),
                     MemoryPlan(), FREE).step
        for refers in (False, True)
    )  # fmt: skip
    assert 1.3 * plain < compared < 1.6 * plain


def test_rows_of_pairs_are_twice_as_long() -> None:
    config = _config(512, objective=ObjectiveOptions(name="dpo"))
    workload = _workload(SMALL, config)
    assert (workload.seq_length, workload.document_length, workload.answers) == (1024, 512, 2)
    assert workload.refers_to_base
    assert not workload_of(
        replace(config, objective=ObjectiveOptions(name="simpo")), workload.decoder, workload.plan, device_type="cuda"
    ).refers_to_base


def _labels(found: SearchResult) -> list[str]:
    return [one.label().partition("; ")[2] for one in found.fitting]


def test_the_mix_that_fits_and_is_fastest() -> None:
    """In bf16 nothing does; in FP8 some layers made again do, and what else is allowed is faster than that."""
    assert not _one_gpu(None).found.fitting
    plain = _one_gpu().found.fitting
    assert plain[0].memory.recompute == "full" and 30 < (plain[0].memory.recompute_layers or 80) < 50
    answer = _one_gpu(allowed=Allowed(offload=("weights", "optimizer", "activations"), stored=("float8",)))
    found = answer.found
    assert found.fitting[0].time is not None and plain[0].time is not None
    assert found.fitting[0].time.step < 0.97 * plain[0].time.step
    labels = _labels(found)
    assert "recompute selective; weights in host memory" in labels
    assert "recompute selective; activations kept in float8" in labels
    for one in found.fitting:
        assert one.estimate.peak <= answer.capacity


def test_host_memory_has_a_limit() -> None:
    """The layers' weights are 80 x 855,638,016 bytes in FP8: 63.75 GiB, of which 94 percent of 67 GiB hold no copy."""
    config = replace(_config(8192), model=replace(_config(8192).model, base_dtype="fp8"))
    allowed = Allowed(offload=("weights",))
    for host_memory, there in ((67.0, False), (72.0, True), (None, True)):
        answer = answer_for(
            LLAMA_2_70B, config, devices=1, gpu_memory=139, reserve=6, host_memory=host_memory, allowed=allowed
        )
        assert any(one.workload.offload_weights for one in answer.found.fitting) == there, host_memory


def test_a_no_is_followed_by_what_would_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each proposal, added to the command, gives a yes."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA_2_70B))
    command = ["--model", str(model), "--gpus", "1", "--gpu-memory", "139GB", "--seq-length", "8k", "--top", "1"]
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    memory.run(parser.parse_args(command))
    printed = capsys.readouterr().out
    assert "No layout fits" in printed
    _, _, proposals = printed.partition("It fits with one of these added to the command:\n")
    rows = [re.findall(r"--\S+ \S+", line) for line in proposals.strip().splitlines()]
    assert [row[0] for row in rows] == ["--base-dtype fp8", "--base-dtype int8", "--base-dtype nf4"]
    for flags in rows:
        memory.run(parser.parse_args([*command, *(word for flag in flags for word in flag.split())]))
        assert "Yes. Fastest that fits" in capsys.readouterr().out


def test_weights_that_are_gathered_keep_links_busy() -> None:
    """Two ranks gather the other's half of each layer's weights, 2 bytes a number, in forward and in backward, but for
    the first backward: at 100 GB/s. All of it is hidden or waited for."""
    layout = Layout(parallel=ParallelOptions(shard="parameters"), data=2)
    slow = replace(FREE, link=100.0, products=1e-3)  # arithmetic takes longer than any gather
    time = predict_time(_encoded(None), layout, MemoryPlan(), slow)
    shared = predict_time(_encoded(None), replace(layout, parallel=ParallelOptions()), MemoryPlan(), slow)
    assert shared.hidden_links == 0 and time.links == shared.links == 0
    once = 80 * 855_638_016 * 2 / 2 / 100e9
    assert time.hidden_links == pytest.approx(2 * once * 4, rel=0.01)  # 8 rows on 2 ranks


def test_every_mix_is_a_configuration_that_runs(tmp_path: Path) -> None:
    allowed = Allowed(offload=("weights", "optimizer", "activations"), stored=("float8",))
    answer = _one_gpu("fp8_row", allowed)
    for number, one in enumerate(answer.found.fitting[:4]):
        path = tmp_path / f"{number}.yaml"
        path.write_text(winning_yaml(answer, one))
        config = parse_config(["--config", str(path), "--model.path", "model"])
        check_config(config)
        check_world(config, 1)
        assert config.model.base_dtype == "fp8_row"
        assert config.memory.offload_weights == one.workload.offload_weights
        assert config.memory.offload_optimizer == one.workload.offload_optimizer
        assert config.memory.offload_activations == one.memory.offload
        assert (config.memory.activation_dtype == "float8") == (one.memory.stored_dtype is not None)


def test_what_stands_beside_is_divided_like_layers() -> None:
    workload = _workload(SMALL, _config())
    beside = replace(workload, beside=10**9)
    for parallel, parts in ((_config().parallel, 1), (replace(_config().parallel, tensor=2, pipeline=2), 4)):
        plain, more = (predict_layout(one, Layout(parallel=parallel), MemoryPlan())[0] for one in (workload, beside))
        assert more.static[WEIGHTS] - plain.static[WEIGHTS] == 2 * 10**9 // parts


@pytest.mark.parametrize("machine, base", [("a100-80", "fp8"), ("rtx4090-24", "fp8_row")])
def test_machines_without_such_products(machine: str, base: str) -> None:
    config = replace(_config(), model=replace(_config().model, base_dtype=base))
    with pytest.raises(UserError, match=f"{base}, for which {machine} has no products"):
        answer_for(SMALL, config, devices=1, gpu_memory=80, reserve=0, machine=machine)


def test_sizes_that_fp8_products_of_a_gpu_do_not_take() -> None:
    odd = {**SMALL, "intermediate_size": 712}
    config = replace(_config(), model=replace(_config().model, base_dtype="fp8"))
    found = answer_for(odd, config, devices=1, gpu_memory=80, reserve=0).found
    assert not found.fitting and "need multiples of 16" in found.refused[0].reason


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--offload", "everything"), "--offload has 'everything', which is not known"),
        (("--activation-dtype", "int8"), "--activation-dtype has 'int8', which is not known"),
        (("--base-dtype", "fp4"), "model.base_dtype is 'fp4'"),
        (("--measure",), "--measure is given without --config"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_refusals_say_what_to_change(arguments: tuple[str, ...], sentence: str) -> None:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    model = str(Path(__file__).resolve().parents[2] / "examples/memory/models/llama-2-70b.json")
    with pytest.raises(UserError, match=re.escape(sentence)):
        memory.run(parser.parse_args(["--model", model, *arguments]))
