"""Merge-aware runs on a checkpoint in few bits: what is trained, evaluated and sampled is one model, whose weights are
merged here and read as any other's."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.api import Session, export, load_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.config.load import load_config
from engine.distributed.sharding import replicated_spec
from engine.inference.options import ModelChoice
from engine.kernels.reference_formats import merged_decode
from engine.layers.encoded_storage import encoded_entries
from engine.ops import merged_weight
from engine.rollouts.batch_parts import Completions
from engine.rollouts.trained_sampler import TrainedSampler
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import OpenedModel, open_for_generation
from engine.training.trainer import train
from tests.support.commands import losses, options, run_tool
from tests.support.few_bits import NVFP4, compressed, draw_in_few_bits, group, in_few_bits
from tests.support.format_parts import same_parts
from tests.support.rollout_runs import prepared, rollout_settings, stepped
from tests.support.shared_data import write_plays
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

STEPS = 6
MIXED = compressed(
    "mixed-precision",
    {**NVFP4, "targets": ["re:.*self_attn.*"], "format": "nvfp4-pack-quantized"},
    group(["re:.*mlp.*"], "float", 8, "channel", format="float-quantized"),
)
"""Blocks of 16 in attention alone: MLPs are 172 wide."""
SCALE = 8.0
PROMPTS = ["Once upon a time", "The king"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    """The small trained Llama in two formats, in `hf`, and their numbers in `decoded`."""
    folder = tmp_path_factory.mktemp("models")
    in_few_bits(stories_dir, folder, MIXED)
    for file in stories_dir.glob("tokenizer*"):
        shutil.copy(file, folder / "hf")
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, models: Path, data_dir: Path) -> dict[str, Any]:
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 20000)
    return {
        "model.path": models / "hf", "model.base_dtype": "stored", "data.train": text, "data.seq_length": 64,
        "data.packing": "true", "data.validation_split": 0.05, "train.steps": STEPS, "train.micro_batch_size": 2,
        "train.global_batch_size": 4, "train.eval_every": STEPS, "optim.lr": 1e-2, "lora.rank": 4,
        "lora.alpha": 4 * SCALE, "lora.merge_aware": "true", "log.every": 1, "checkpoint.every": 3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(load_config(options({**settings, "checkpoint.dir": folder})))
    return folder


@pytest.fixture(scope="module")
def merged(run: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model of the merged numbers."""
    folder = tmp_path_factory.mktemp("merged")
    shutil.copytree(models / "hf", folder, dirs_exist_ok=True)
    shutil.copy(models / "decoded" / "config.json", folder)
    source, trained = open_source(models / "hf"), open_run(run).trained()
    weights, changed = load_file(models / "decoded" / "model.safetensors"), 0
    for stored, numbers in weights.items():
        name = stored.removeprefix("model.").replace("self_attn", "attention")
        of = source.format(name) if name in source.tensor_names() else None
        if of is None:
            continue
        parts = source.read_parts(name, replicated_spec(tuple(numbers.shape), rank=0, size=1, grad_reduce=()), of)
        a, b = (trained.read_whole(f"{name.removesuffix('.weight')}.lora_{leaf}") for leaf in "AB")
        before = numbers.clone()
        merged_decode(of, parts, b, a, SCALE, numbers)
        changed += bool((before != numbers).any())
    assert changed == 35
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _evaluation(run: Path) -> float:
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return next(record["eval_loss"] for record in records if record.get("eval_loss") and record["step"] == STEPS)


def test_the_evaluation_is_that_of_the_merged_model(
    run: Path, merged: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    given = {**settings, "model.path": merged, "model.base_dtype": "null", "lora.merge_aware": "false"}
    with Session(load_config(options({**given, "checkpoint.dir": tmp_path / "run"}))) as session:
        assert session.evaluate().loss == pytest.approx(_evaluation(run), rel=1e-6)


def test_texts_and_scores_are_those_of_the_merged_model(run: Path, merged: Path) -> None:
    found = []
    pairs = [(PROMPTS[0], " there was a king."), (PROMPTS[1], " is dead, my lord.")]
    for choice in ({"adapter": run, "base_dtype": "stored"}, {"model": merged}, {"adapter": run}):
        with load_model(**choice) as model:
            texts = model.generate(PROMPTS, max_new_tokens=12, temperature=0)
            found.append((texts, [score.logp for score in model.score(pairs)]))
    (texts, scores), (expected, theirs), (_, unrounded) = found
    assert texts == expected and scores == pytest.approx(theirs, rel=1e-5)
    assert unrounded != pytest.approx(theirs, rel=1e-3), "rounding changes nothing"


def _codes(opened: OpenedModel, folder: Path) -> int:
    """Checks that a model's codes are those of a checkpoint; returns how many linears have any."""
    source, entries = open_source(folder), list(encoded_entries(opened.decoder))
    for entry in entries:
        stored = source.read_parts(entry.name, entry.spec, source.format(entry.name))
        assert same_parts(dict(entry.parts), stored), entry.name
    return len(entries)


def test_generation_has_the_codes_of_the_export_and_the_bases_again(run: Path, models: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "exported", format="hf")
    choice = ModelChoice(path=None, adapter=run, base_dtype="stored")
    opened = open_for_generation(choice, Launch(rank=0, world_size=1, device=torch.device("cpu")), Log(1))
    assert _codes(opened, tmp_path / "exported") == 35
    assert opened.use_adapters(True) == 0
    for _ in range(2):
        assert opened.use_adapters(False) == 0
        assert _codes(opened, models / "hf") == 35
    assert opened.use_adapters(True) == 35
    assert _codes(opened, tmp_path / "exported") == 35


def test_generation_has_a_runs_codes_in_another_dtype_too(settings: dict[str, Any], tmp_path: Path) -> None:
    """Factors are merged as the run had them, in 16 bits, and not as the fp32 of its checkpoint."""
    asked = {**settings, "model.dtype": "bfloat16", "train.steps": 2, "train.eval_every": 100}
    train(load_config(options({**asked, "checkpoint.dir": tmp_path / "run"})))
    export(tmp_path / "run", tmp_path / "exported", format="hf")
    choice = ModelChoice(path=None, adapter=tmp_path / "run", base_dtype="stored", dtype="float32")
    opened = open_for_generation(choice, Launch(rank=0, world_size=1, device=torch.device("cpu")), Log(1))
    assert _codes(opened, tmp_path / "exported") == 35


def test_a_dtype_that_rounds_a_runs_factors_is_named(run: Path) -> None:
    for dtype, is_said in (("bfloat16", True), ("float32", False)):
        said = StringIO()
        choice = ModelChoice(path=None, adapter=run, base_dtype="stored", dtype=dtype)
        open_for_generation(choice, Launch(rank=0, world_size=1, device=torch.device("cpu")), Log(stream=said))
        assert ("--dtype float32 gives the model that was trained" in said.getvalue()) is is_said


def test_answers_beside_the_bases(run: Path, models: Path) -> None:
    asked = ("--base-dtype", "stored", "--max-new-tokens", 8, "--temperature", 0, "--prompt", PROMPTS[0])
    shown = run_tool("generate", "--adapter", run, "--compare-base", *asked).stdout
    texts = []
    for choice in ({"model": models / "hf"}, {"adapter": run}):
        with load_model(**choice, base_dtype="stored") as model:
            texts += model.generate(PROMPTS[:1], max_new_tokens=8, temperature=0)
    assert texts[0] != texts[1]
    base, tuned = (text if text[:1].isspace() else f" {text}" for text in texts)
    assert shown == f"[1 base]{base}\n[1 adapter]{tuned}\n"


@pytest.mark.parametrize("layout", sampled(["one", "pp2", "dp2, parameters"], ["one"]))
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    layout: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    more = {"one": {}, "pp2": {"parallel.pipeline": 2}, "dp2, parameters": {"parallel.shard": "parameters"}}[layout]
    for name, again in (("whole", {}), ("rest", {"checkpoint.resume": tmp_path / "whole/checkpoints/step_00000003"})):
        asked = options({**settings, **more, **again, "checkpoint.dir": tmp_path / name})
        if layout == "one":
            train(load_config(asked))
        else:
            run_tool("pretrain_lora", *asked, ranks=2)
    whole, rest = (open_run(tmp_path / name).trained() for name in ("whole", "rest"))
    assert all(torch.equal(whole.read_whole(name), rest.read_whole(name)) for name in whole.tensor_names())
    before = losses(tmp_path / "whole")
    assert losses(tmp_path / "rest") == {step: loss for step, loss in before.items() if step > 3}


def _gaps(settings: dict[str, object], steps: int) -> Iterator[float]:
    """Yields how far each step's log-probabilities of sampled tokens are from those by the model that trains."""
    with ExitStack() as opened:
        run = prepared(settings, opened)
        for number, rows in enumerate(run.source.stream(0, 0, steps)):
            gap, count = 0.0, 0
            for batch in rows.batches:
                completions = batch.part(Completions)
                assert completions is not None
                with torch.no_grad():
                    computed = -run.training.parts[0](batch, torch.tensor(number), training=False).flatten()
                sampled_logps = completions.sampled_logps_BS.flatten()
                is_target = sampled_logps != 0
                count += int(is_target.sum())
                gap = max(gap, float((computed - sampled_logps)[is_target].abs().max()))
            assert count > 100
            yield gap
            run.training.step(rows.batches, rows.targets, run.step_plan.rate(number))


def test_rollouts_sample_from_the_merged_model(tmp_path: Path) -> None:
    given = rollout_settings(tmp_path, model__init="checkpoint", lora__merge_aware="true", model__base_dtype="stored")
    draw_in_few_bits(tmp_path / "model", "nvfp4")
    gaps = list(_gaps(given, 3))
    assert len(gaps) == 3 and max(gaps) < 1e-5


def _counted(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Two steps of a run, and its merges for products while it samples and trains."""
    merge, sample = merged_weight.decode_merged, TrainedSampler.sample
    calls, phase = Counter[str](), ["trains"]

    def counted(*arguments: Any) -> Tensor:
        calls[phase[-1]] += 1
        return merge(*arguments)

    def marked(*arguments: Any, **named: Any) -> Any:
        phase.append("samples")
        found = sample(*arguments, **named)
        phase.pop()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(merged_weight, "decode_merged", counted)
        patch.setattr(TrainedSampler, "sample", marked)
        return stepped(settings, 2), calls


def test_codes_that_are_merged_once_sample_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on completions of the weights as they are before each, as with a merge in every pass. Products
    of few rows with codes are summed in another order than with decoded numbers."""
    given = rollout_settings(tmp_path, model__init="checkpoint", lora__merge_aware="true", model__base_dtype="stored")
    draw_in_few_bits(tmp_path / "model", "int4")
    found, calls = _counted(given, monkeypatch)
    expected, merges = _counted({**given, "rollout.merge_once": "false"}, monkeypatch)
    for step, other in zip(found, expected, strict=True):
        assert step["completions"] == other["completions"]
        figures = ({name: value for name, value in one.items() if name != "completions"} for one in (step, other))
        ours, theirs = figures
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    tokens = [step["completions"] for step in found]
    assert tokens[0] != tokens[1]
    assert calls["samples"] == 0 and calls["trains"] > 100 and merges["samples"] > 100
