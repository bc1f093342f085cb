"""tools/benchmark.py: what it measures is what it says, and it refuses to time two different computations."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="the step section compares with PEFT")

from engine.errors import UserError
from engine.ops.kernels import REFERENCE
from rankfold.benchmarking import step
from rankfold.benchmarking.engine_side import EngineSide
from rankfold.benchmarking.floor import GemmFloor, WeightProduct
from rankfold.benchmarking.model import attention_kernel, document_lengths, draw, draw_batches, step_operations
from rankfold.benchmarking.options import ExpertsOptions, StepOptions, add_options, read_options
from rankfold.benchmarking.peak_memory import peak_above_now
from rankfold.benchmarking.peft_side import (
    BitsandbytesSide,
    ExpertLoopSide,
    ExpertsSide,
    FullSide,
    PaddedSide,
    PeftSide,
)
from rankfold.benchmarking.remote import RemoteSide
from rankfold.benchmarking.sides import Alone, find_sides
from rankfold.benchmarking.step import arrange
from rankfold.benchmarking.table import Table
from rankfold.benchmarking.timing import Sample, interleave, paired_ratio, summarise
from tests.support.spawning import fork_context
from tests.support.sweeps import sampled

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
KEPT = f"{step.PEER}, freed memory kept"
TINY = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "vocab": 131, "rank": 4}
SMALL = StepOptions(**TINY, rows=2, length=9, repeats=2, warmup=1, device="cpu")


@pytest.fixture(scope="module", params=sampled(["peft", "all"], ["peft"]))
def tables(request: pytest.FixtureRequest) -> Iterator[tuple[Table, dict, list[str]]]:
    """One whole run, child processes included, its JSON, and the sides it has; each takes seconds to import, which
    forks of a process that has torch are spared. The slow run's import what they need themselves.
    """
    context = fork_context()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "peft":
            patch.setattr("multiprocessing.get_context", lambda kind: context)
        table = step.run(replace(SMALL, peers=request.param))
    yield (
        table,
        json.loads(table.json("the command")),
        [step.ENGINE, step.PEER, *([KEPT] if request.param == "all" else [])],
    )


def test_a_run_reports_every_contestant(tables: tuple[Table, dict, list[str]]) -> None:
    table, record, sides = tables
    names = [*sides, step.FLOOR, "square product"]
    assert [row[0] for row in table.rows] == names
    assert {name: len(taken) for name, taken in record["seconds"].items()} == dict.fromkeys(names, 2)
    assert set(record["first_seconds"]) == {*sides}
    assert all(value > 0 for taken in record["seconds"].values() for value in taken)
    assert any(sentence.startswith("Same computation") for sentence in table.findings)


def test_a_run_says_where_and_with_what(tables: tuple[Table, dict, list[str]]) -> None:
    _, record, _ = tables
    assert record["machine"]["torch"] == torch.__version__
    assert {"date", "CPU", "threads", "transformers", "peft"} <= set(record["machine"])
    assert record["options"]["hidden"] == 32 and record["command"] == "the command"


def test_ratio_is_that_of_the_samples(tables: tuple[Table, dict, list[str]]) -> None:
    _, record, _ = tables
    ratios = sorted(p / e for p, e in zip(record["seconds"][step.PEER], record["seconds"][step.ENGINE], strict=True))
    assert record["speedup_over_peft"]["median"] == pytest.approx(sum(ratios) / 2)


@pytest.mark.parametrize("side", [ExpertsSide, ExpertLoopSide])
def test_the_sides_of_a_mixture_compute_the_same(side: type[PeftSide]) -> None:
    """Up drawn before gate, or B expert by expert, moves the losses by 1e-3. The floor has the arithmetic of a step
    without attention, whose first three products need no gradient."""
    options = ExpertsOptions(**TINY, experts=4, rows=2, length=10, device="cpu")
    sides = {step.ENGINE: EngineSide(options, CPU), step.PEER: side(options, CPU)}
    for one in sides.values():
        one.prepare()
    assert "Same computation" in step.check(options, sides, draw_batches(options, CPU, 3))[0]
    hidden, tokens, lengths = options.hidden, options.tokens, options.length**2 * options.rows
    without = step_operations(options) - 6 * options.layers * lengths * hidden
    routers = 4 * tokens * options.layers * hidden * options.experts
    below = 2 * tokens * hidden * (hidden + 2 * options.kv_width)
    assert sides[step.ENGINE].floor().operations() == without - routers - below


@pytest.mark.parametrize(("kind", "implementation"), [("helium", "auto"), ("qwen3", "adopted")])
def test_the_sides_of_an_adopted_model_compute_the_same(kind: str, implementation: str) -> None:
    options = StepOptions(
        **TINY, model_type=kind, implementation=implementation, rows=2, length=9, peers="peft", device="cpu"
    )
    assert "Same computation" in step.check(options, _sides(options), draw_batches(options, CPU, 3))[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_padded_documents_compute_the_same(kind: str) -> None:
    """A document's state, in a hybrid, ends with it, as if it had a row of its own."""
    options = StepOptions(**TINY, model_type=kind, rows=2, length=40, documents=3, device="cpu")
    assert list(find_sides(options, CPU)[0]) == [step.ENGINE, f"{step.PEER}, padded"]
    sides = {step.ENGINE: EngineSide(options, CPU), step.PEER: PaddedSide(options, CPU)}
    for one in sides.values():
        one.prepare()
    assert "Same computation" in step.check(options, sides, draw_batches(options, CPU, 3))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sides_that_train_all_parameters_compute_the_same(dtype: str) -> None:
    """Weight decay on the peer's norms as well would move the losses less than their limit, but all else counts."""
    options = StepOptions(**TINY, method="full", rows=2, length=9, dtype=dtype, device="cpu")
    assert list(find_sides(options, CPU)[0]) == [step.ENGINE, "transformers", "transformers, freed memory kept"]
    sides = {step.ENGINE: EngineSide(options, CPU), "transformers": FullSide(options, CPU)}
    for one in sides.values():
        one.prepare()
    assert "Same computation" in step.check(options, sides, draw_batches(options, CPU, 3))[0]
    gradients = {name for name, each in sides["transformers"].model.named_parameters() if each.requires_grad}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= gradients
    assert step_operations(options) - step_operations(SMALL) == 2 * options.tokens * _weights(options)


def _weights(options: StepOptions) -> int:
    layer = options.hidden * (2 * options.hidden + 2 * options.kv_width + 3 * options.intermediate)
    return options.layers * layer + options.hidden * options.vocab


def test_the_floor_of_all_parameters_has_three_products_of_each_weight() -> None:
    options = StepOptions(**TINY, method="full", rows=2, length=9, device="cpu")
    floor = EngineSide(options, CPU).floor()
    assert floor.operations() == 6 * options.tokens * _weights(options)
    floor.run()


def test_the_floor_takes_the_faster_product() -> None:
    """Products that sleep are chosen nowhere, those that do nothing everywhere."""
    one = WeightProduct(torch.randn(8, 6), True, True, 5)

    def slow(*arguments: torch.Tensor, **out: torch.Tensor) -> None:
        time.sleep(0.01)

    def nothing(*arguments: torch.Tensor, **out: torch.Tensor) -> None:
        pass

    for found, kernel in ((0, slow), (3, nothing)):
        floor = GemmFloor([one], replace(REFERENCE, product=kernel, add_product=kernel))
        assert f"Of its 3 kinds of products, {found} run faster" in floor.sentence()


def test_sides_with_trained_lengths_compute_the_same() -> None:
    options = StepOptions(**TINY, method="dora", rows=2, length=9, device="cpu")
    sides = _sides(options)
    assert "Same computation" in step.check(options, sides, draw_batches(options, CPU, 3))[0]
    _shift(next(p for key, p in sides[step.PEER].model.named_parameters() if "v_proj.lora_magnitude" in key))
    with pytest.raises(RuntimeError, match="compute different things"):
        step.check(options, sides, draw_batches(options, CPU, 3))


def test_a_base_of_bitsandbytes_computes_the_same() -> None:
    """Codes are of the weights that the engine draws: those of plain PEFT's weights move the losses by 1e-3."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = StepOptions(
        **{**TINY, "hidden": 64, "intermediate": 128}, base_dtype="nf4", rows=2, length=9, device="cpu"
    )
    assert list(find_sides(options, CPU)[0]) == [step.ENGINE, f"{step.PEER} + bitsandbytes"]
    sides = {step.ENGINE: EngineSide(options, CPU), step.PEER: BitsandbytesSide(options, CPU)}
    for one in sides.values():
        one.prepare()
    assert "Same computation" in step.check(options, sides, draw_batches(options, CPU, 3))[0]


def test_types_whose_adapters_would_differ_are_refused() -> None:
    options = StepOptions(**TINY, model_type="phi3", device="cpu")
    with pytest.raises(UserError, match="--model-type phi3 stores several linears as one, .* another type"):
        find_sides(options, CPU)
    assert find_sides(replace(options, implementation="adopted"), CPU)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_is_measured(tables: tuple[Table, dict, list[str]]) -> None:
    _, record, sides = tables
    assert set(record["peak_bytes"]) == {*sides}
    assert all(peak > 0 for peak in record["peak_bytes"].values())


def test_both_sides_start_equal() -> None:
    ids = draw_batches(SMALL, CPU, 1)[0]
    engine, peer = EngineSide(SMALL, CPU), PeftSide(SMALL, CPU)
    engine.prepare()
    assert engine.loss(ids).item() == pytest.approx(peer.loss(ids).item(), rel=1e-6)


def _sides(options: StepOptions = SMALL) -> dict[str, EngineSide | PeftSide]:
    sides = {step.ENGINE: EngineSide(options, CPU), step.PEER: PeftSide(options, CPU)}
    for side in sides.values():
        side.prepare()
    return sides


def _shift(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(0.1)


@pytest.mark.parametrize("name", ["o_proj.lora_B", "down_proj.lora_A", "v_proj.base_layer", "input_layernorm"])
def test_different_computations_are_not_timed(name: str) -> None:
    sides = _sides()
    peer = sides[step.PEER]
    _shift(next(p for key, p in peer.model.named_parameters() if name in key))
    with pytest.raises(RuntimeError, match="compute different things"):
        step.check(SMALL, sides, draw_batches(SMALL, CPU, 4))


def test_a_wrong_gradient_is_noticed() -> None:
    """The first loss says nothing about backward; the gradient norms and later losses do."""
    sides = _sides()
    peer = sides[step.PEER]
    next(p for key, p in peer.model.named_parameters() if "gate_proj.lora_B" in key).register_hook(lambda g: 2 * g)
    with pytest.raises(RuntimeError, match="compute different things"):
        step.check(SMALL, sides, draw_batches(SMALL, CPU, 4))


def test_with_dropout_the_losses_without_it_are_compared() -> None:
    options = StepOptions(**TINY, rows=1, length=8, dropout=0.1, device="cpu")
    sides, batches = _sides(options), draw_batches(options, CPU, 4)
    assert "Same model" in step.check(options, sides, batches)[0]
    _shift(next(p for key, p in sides[step.PEER].model.named_parameters() if "o_proj.lora_B" in key))
    with pytest.raises(RuntimeError, match="compute different things"):
        step.check(options, sides, batches)


def test_bfloat16_agrees_within_its_rounding() -> None:
    options = StepOptions(**TINY, rows=1, length=8, dtype="bfloat16", device="cpu")
    sentences = step.check(options, _sides(options), draw_batches(options, CPU, 4))
    assert "Same computation" in sentences[0]


def _held_alone(shares: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of which each side holds this share, without a step taken."""
    monkeypatch.setattr(step, "steps_alone", lambda name, options: Alone(1, 1.0, shares.get(name, 0.0)))


@pytest.mark.slow
def test_sides_that_do_not_fit_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two processes at once; each side comes back after the others, and all have the same number of steps."""
    alive: list[str] = []
    events: list[str] = []

    class Watched(RemoteSide):
        def __init__(self, name: str, options: StepOptions) -> None:
            super().__init__(name, options)
            self._name = name
            alive.append(name)
            events.append(name)
            assert len(alive) == 1

        def close(self) -> None:
            super().close()
            alive.remove(self._name)

    _held_alone({step.ENGINE: 0.3, step.PEER: 0.8}, monkeypatch)
    monkeypatch.setattr(step, "RemoteSide", Watched)
    options = replace(SMALL, peers="peft", repeats=2, warmup=0)
    record = json.loads((table := step.run(options)).json("the command"))
    assert events == [step.ENGINE, step.PEER, step.PEER, step.ENGINE] and not alive
    assert {name: len(taken) for name, taken in record["seconds"].items()} == dict.fromkeys(
        [step.ENGINE, step.PEER, step.FLOOR, "square product"], 2
    )
    said = "Together the sides would hold 110% of the GPU's memory, so each ran alone, in 2 rounds of 1, 1 timed"
    assert any(sentence.startswith(said) for sentence in table.findings)
    assert any(sentence.startswith("Same computation") for sentence in table.findings)


@pytest.mark.parametrize(("repeats", "turns"), [(10, [4, 3, 3]), (2, [1, 1]), (1, [1])])
def test_turns_are_spread_over_the_rounds(repeats: int, turns: list[int]) -> None:
    blocks = arrange({"a": 0.5, "b": 0.5}, repeats).blocks
    assert [block.repeats for block in blocks if block.names == ("a",)] == turns
    assert [block.repeats for block in blocks if block.names == ("b",)] == turns


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.3}, {"a": None, "b": None}, {"a": 0.95}])
def test_sides_that_fit_are_alive_at_once(shares: dict[str, float | None]) -> None:
    arrangement = arrange(shares, 5)
    assert arrangement.blocks == ((tuple(shares), 5),) and "alive at once" in arrangement.sentence


def test_packed_rows_of_the_engines_side() -> None:
    """Documents see themselves alone: each token's loss is that of its document in a row of its own."""
    options = replace(SMALL, documents=3, dropout=0.0, peers="none")
    side = EngineSide(options, CPU)
    (ids,) = draw_batches(options, CPU, 1)
    lengths = document_lengths(options)
    assert len(lengths) == 3 * options.rows and len(set(lengths[:3])) > 1
    assert sum(lengths[:3]) == sum(lengths[3:6]) == options.length
    total, targets, start = 0.0, 0, 0
    for length in lengths:
        if length > 1:
            alone = EngineSide(replace(SMALL, rows=1, length=length, dropout=0.0), CPU)
            document = ids.flatten()[start : start + length][None]
            total += alone.loss(document).item() * (length - 1)
        targets += length - 1
        start += length
    assert side.loss(ids).item() == pytest.approx(total / targets, rel=1e-5)
    side.prepare()
    assert float(side.step(ids).loss) == pytest.approx(total / targets, rel=1e-5)
    attention = [6 * SMALL.layers * SMALL.hidden * squares for squares in (
        sum(length**2 for length in lengths), SMALL.rows * SMALL.length**2
    )]  # fmt: skip
    assert step_operations(SMALL) - step_operations(options) == attention[1] - attention[0]
    with pytest.raises(UserError, match="--documents 2 packs rows, .* add --peers none or peft-padded"):
        StepOptions(documents=2, peers="peft")
    with pytest.raises(UserError, match="--peers peft-padded pads .* add --documents 2"):
        StepOptions(peers="peft-padded")
    with pytest.raises(UserError, match="--length 4 leaves documents of less than 2 tokens with --documents 3"):
        StepOptions(documents=3, length=4, peers="none")


def test_floor_counts_what_a_lora_step_multiplies() -> None:
    """Twice the weights' elements forward, the same backward except below the first layer's queries, keys, values."""
    per_layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48
    first_qkv = 32 * (32 + 2 * 16)
    products = 2 * (2 * per_layer + 32 * 131) - first_qkv
    floor = EngineSide(SMALL, CPU).floor()
    assert floor.operations() == 2 * SMALL.tokens * products
    floor.run()


def test_a_preset_is_the_published_shape() -> None:
    """Llama-3-8B has 7.505e9 weights in linears and head, so a LoRA step costs 33.2 GFLOP a token at 4096 tokens."""
    parser = ArgumentParser()
    add_options(parser, StepOptions)
    options = read_options(parser.parse_args(["--preset", "llama3-8b", "--rows", "1"]), StepOptions)
    assert (options.rows, options.length, options.dtype, options.dropout) == (1, 4096, "bfloat16", 0.1)
    assert step_operations(options) / options.tokens == pytest.approx(4 * 7.505e9 + 6 * 32 * 4096 * 4096, rel=1e-4)


def test_attention_kernel_is_read_from_the_graph() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v).sum()
    assert "ScaledDotProduct" in attention_kernel(fused * 2)
    assert attention_kernel(((q @ k.mT).softmax(-1) @ v).sum()) == "unfused"


def test_draws_depend_on_the_name_only() -> None:
    one, same, other = (torch.empty(3, 4) for _ in range(3))
    draw("a.weight", one)
    torch.rand(1)
    draw("a.weight", same)
    draw("b.weight", other)
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    work = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = interleave(work, repeats=3, warmup=1, device=CPU, turn=lambda done: None)
    assert [sorted(calls[start : start + 3]) for start in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    orders = {tuple(calls[start : start + 3]) for start in range(0, 12, 3)}
    assert len(orders) > 1 and {order[0] for order in orders} != {"a"}, "nobody always follows the same neighbour"
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert isinstance(samples["a"][0], Sample)


def test_ratios_are_paired() -> None:
    assert paired_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == (3.0, 2.0, 4.0)
    assert summarise([5.0, 1.0, 9.0]) == (5.0, 1.0, 9.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_peak_counts_what_was_freed_again() -> None:
    megabytes = 48

    def work() -> None:
        torch.ones(megabytes * 2**18).sum()

    peak = peak_above_now(work, CPU)
    assert peak is not None and megabytes * 0.9 < peak / 2**20 < megabytes + 16


def test_table_forms() -> None:
    table = Table(
        title="A title",
        columns=("", "ms"),
        rows=(("one", "1.0"), ("longer", "10.0")),
        findings=("It is so.",),
        machine={"CPU": "some"},
        data={"raw": [1]},
    )
    assert "one      1.0" in table.text() and "longer  10.0" in table.text()
    assert "| one | 1.0 |" in table.markdown("run me") and "| --- | ---: |" in table.markdown("run me")
    assert json.loads(table.json("run me"))["raw"] == [1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hidden": 30}, ["30", "4", "head size"]),
        ({"kv_heads": 3}, ["4", "3", "multiple"]),
        ({"dropout": 1.0}, ["1.0", "below 1"]),
        ({"length": 1}, ["1", "2 tokens"]),
        ({"repeats": 0}, ["--repeats", "0"]),
        ({"dtype": "float8"}, ["float8", "bfloat16"]),
        ({"method": "qlora"}, ["qlora", "lora, dora, full"]),
        ({"method": "dora", "base_dtype": "nf4"}, ["--method dora", "--base-dtype nf4", "leave one"]),
        ({"method": "full", "dropout": 0.1}, ["--method full", "--dropout"]),
        ({"method": "full", "documents": 2, "peers": "none"}, ["--method full", "--documents"]),
        ({"base_dtype": "nf4", "peers": "peft"}, ["nf4", "--peers none or peft-bitsandbytes"]),
        ({"base_dtype": "int8"}, ["int8", "add --peers none"]),
    ],
)
def test_impossible_options(wrong: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        StepOptions(**{**TINY, **wrong})
    assert all(word in str(caught.value) for word in words)


def test_experts_have_lora_alone() -> None:
    with pytest.raises(UserError, match="--method is 'dora', but experts"):
        ExpertsOptions(**TINY, method="dora")


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/benchmark.py", *arguments],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_help_names_every_option() -> None:
    done = _command("step", "--help")
    assert done.returncode == 0
    assert all(f"--{name}" in done.stdout for name in ("kv-heads", "intermediate", "repeats", "json", "markdown"))


def test_a_wrong_option_is_one_sentence() -> None:
    done = _command("step", "--heads", "3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --hidden 512") and done.stderr.count("\n") == 1
