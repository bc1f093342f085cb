"""The rules, the data and the log of the MLPerf example, each against something that is not the engine's."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config.load import parse_config
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.errors import UserError
from engine.layers.module import shard_entries
from engine.telemetry.listener import EvaluationEvent, StepEvent
from engine.training.evaluate import is_due
from examples.mlperf_llama2_70b_lora.mlperf_log import Disclosed, MlperfLog, Submission
from tests.support.commands import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "mlperf_llama2_70b_lora"
NAMES = ("rules", "packing", "prepare_data", "package", "train")


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's files as modules, under names that others may have too."""
    kept = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def configured(name: str = "llama2_70b_lora.yaml", *more: str) -> RunConfig:
    return parse_config(["--config", str(EXAMPLE / name), *more])


@pytest.mark.parametrize(
    ("batch", "every", "first"), [(8, 48, 192), (16, 24, 120), (10, 39, 156), (128, 3, 57), (7, 55, 165)]
)
def test_cadence(example: SimpleNamespace, batch: int, every: int, first: int) -> None:
    """By hand: ceil(384 / b) steps; after floor(b / 8 + 2) skipped ones."""
    assert example.rules.evaluation_steps(batch) == every
    assert example.rules.first_evaluation(batch) == first


@pytest.mark.parametrize("name", ["llama2_70b_lora.yaml", "small.yaml"])
def test_configurations_keep_the_rules(example: SimpleNamespace, name: str) -> None:
    example.rules.check_recipe(configured(name))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lora.rank", "8"),
        ("lora.alpha", "16"),
        ("lora.dropout", "0.05"),
        ("lora.fused", "none"),
        ("lora.targets", "q_proj,k_proj,v_proj"),
        ("optim.clip_grad_norm", "1.0"),
        ("optim.weight_decay", "0.1"),
        ("optim.schedule", "constant"),
        ("optim.warmup_steps", "10"),
        ("data.packing", "true"),
        ("train.eval_every", "24"),
        ("train.eval_first", "48"),
        ("train.global_batch_size", "16"),
        ("train.last_batch", "short"),
        ("train.eval_samples", "100"),
        ("train.eval_mean", "tokens"),
        ("train.target_eval_loss", "0.93"),
        ("train.synthetic_steps", "0"),
        ("train.steps", "null"),
        ("guards.spike_policy", "skip"),
        ("checkpoint.resume", "auto"),
    ],
)
def test_what_the_checker_does_not_see_is_refused(example: SimpleNamespace, option: str, value: str) -> None:
    named = "train.eval_every" if option == "train.global_batch_size" else option
    with pytest.raises(UserError, match=named):
        example.rules.check_recipe(configured("llama2_70b_lora.yaml", f"--{option}", value))


def test_the_benchmarks_model_has_44_564_480_trained_parameters(
    example: SimpleNamespace, data_dir: Path, tmp_path: Path
) -> None:
    from engine.checkpoint.model_folder import open_model
    from engine.models.describe import meta_model
    from engine.training.module_plan import training_plan

    described = (data_dir / "configs" / "Llama-2-70b-hf.json").read_text()
    (tmp_path / "config.json").write_text(described)
    config, model = configured(), open_model(tmp_path)
    plan = training_plan(config, model.decoder, model.names)
    entries = shard_entries(meta_model(model.decoder, plan=plan))
    trained = sum(prod(entry.spec.global_shape) for entry in entries if entry.sink is not None)
    example.rules.check_size(config, model.decoder, trained)
    with pytest.raises(UserError, match="trained parameters"):
        example.rules.check_size(config, model.decoder, trained + 1)
    with pytest.raises(UserError, match="layers"):
        example.rules.check_size(config, replace(model.decoder, num_layers=79), trained)
    with pytest.raises(UserError, match="data.seq_length"):
        example.rules.check_size(configured("small.yaml"), model.decoder, trained)


def test_sizes_of_the_data(example: SimpleNamespace) -> None:
    example.rules.check_samples(3901, 173)
    with pytest.raises(UserError, match="data.train has 3900 rows"):
        example.rules.check_samples(3900, 173)
    with pytest.raises(UserError, match="data.validation has 172 rows"):
        example.rules.check_samples(3901, 172)


class Letters:
    """One token a character."""

    bos_id, eos_id = 1, 2

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]


def test_documents(example: SimpleNamespace) -> None:
    prompt = "### Summarize the following text:\n a b\n ### Summary:\n"
    (learnt,) = example.packing.documents([("a b", "c")], Letters(), masked=False)
    assert learnt.ids == [1, *map(ord, prompt + " c"), 2] == learnt.labels
    (masked,) = example.packing.documents([("a b", "c")], Letters(), masked=True)
    # the prompt with its begin token, and the end token, are not learnt; the space before the summary is
    assert masked.labels == [-100] * (1 + len(prompt)) + [ord(" "), ord("c"), -100]


@pytest.mark.parametrize(("count", "shares"), [(2300, 2), (1001, 1), (37, 8), (30, 11)])
def test_rows_are_those_of_the_references_pool(example: SimpleNamespace, count: int, shares: int) -> None:
    """Rows by Hugging Face's datasets, whose process pool the reference packs with."""
    datasets = importlib.import_module("datasets")
    draw, length = random.Random(count), 16
    texts = [[draw.randrange(3, 99) for _ in range(draw.randrange(1, 20))] for _ in range(count)]

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = list(chain(*batch["ids"]))
        return {"ids": [joined[i : i + length] for i in range(0, len(joined) // length * length, length)]}

    kept = datasets.Dataset.from_dict({"ids": [text for text in texts if len(text) <= length]})
    parts = min(shares, len(kept))
    expected = [
        row
        for part in range(parts)  # what map(num_proc=...) gives each process
        for row in kept.shard(parts, part, contiguous=True).map(cut, batched=True)["ids"]
    ]
    found = example.packing.rows([example.packing.Tokens(t, t) for t in texts], seq_length=length, shares=shares)
    assert [row.ids for row in found] == expected and len(expected) > 0


def test_packed_rows_from_parquet(example: SimpleNamespace, tmp_path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    ids = [[1, 5, 6, 2], [1, 7, 8, 9]]
    labels = [[-100, -100, 6, -100], [1, 7, 8, 9]]
    parquet.write_table(arrow.table({"input_ids": ids, "labels": labels}), tmp_path / "train-00000-of-00001.parquet")
    files = example.prepare_data.files_of(tmp_path, "train")
    assert example.prepare_data.write(tmp_path / "t.jsonl", example.prepare_data.packed_rows(files, 4)) == (2, 5)
    records = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert records == [{"input_ids": ids[0], "labels": labels[0]}, {"input_ids": ids[1]}]
    with pytest.raises(UserError, match="row 0: the row has 4 tokens, expected 8"):
        list(example.prepare_data.packed_rows(files, 8))
    with pytest.raises(UserError, match="no file whose name begins with validation"):
        example.prepare_data.files_of(tmp_path, "validation")
    (tmp_path / "validation.parquet").write_text("nothing")
    with pytest.raises(UserError, match="no parquet file that can be read"):
        list(example.prepare_data.packed_rows(example.prepare_data.files_of(tmp_path, "validation"), 4))


def test_raw_records(example: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"input": "a", "output": "b"}\n{"report": "c", "summary": "d"}\n{"x": 1}\n')
    with pytest.raises(UserError, match=r"line 3: the record has the fields x"):
        example.prepare_data.raw_records([tmp_path / "train.jsonl"])
    (tmp_path / "train.jsonl").write_text('{"input": "a", "output": "b"}\n{"report": "c", "summary": "d"}\n')
    assert example.prepare_data.raw_records([tmp_path / "train.jsonl"]) == [("a", "b"), ("c", "d")]


def test_when_the_validation_data_is_evaluated() -> None:
    usual = TrainOptions(eval_every=4)
    assert [step for step in range(11) if is_due(usual, step, ends=step == 10)] == [0, 4, 8, 10]
    delayed = TrainOptions(eval_every=4, eval_first=8)
    assert [step for step in range(15) if is_due(delayed, step, ends=step == 14)] == [8, 12]


SUBMISSION = Submission(benchmark="llama2_70b_lora", organisation="example", platform="box")


def log_run(path: Path, example: SimpleNamespace, *, losses: list[float], seed: int, breaks: bool = False) -> None:
    """A log as a run with these evaluation losses writes it, every 384 samples from 1536 on."""
    disclosed: Disclosed = example.train.disclosed(configured("small.yaml", "--train.seed", str(seed)), "x/small.yaml")
    with MlperfLog(path, SUBMISSION, disclosed) as log:
        log.run_started()
        log.data_read(train_samples=3901, eval_samples=173, total_steps=1024, accumulation=8)
        log.block_started(0)
        samples = 0
        for number, loss in enumerate(losses):
            samples = 1536 + 384 * number
            log.reported(
                StepEvent(step=1, samples=samples, loss=1.0, lr=1e-4, grad_norm=1.0, tokens=1, seconds=1.0, memory=1)
            )
            log.block_stopped(samples)
            log.evaluated(EvaluationEvent(step=1, samples=samples, loss=loss, seconds=1.0))
            if loss > 0.925:
                log.block_started(samples)
        if breaks:
            raise KeyboardInterrupt
        log.run_stopped(samples, "target" if losses[-1] <= 0.925 else "end")


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line.partition(":::MLLOG ")[2]) for line in path.read_text().splitlines()]


def compliance(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "6.1.0"]
    command += ["--log_output", str(path) + ".checked", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_that_breaks_off_is_aborted(example: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result_0.txt"
    with pytest.raises(KeyboardInterrupt):
        log_run(path, example, losses=[0.99, 0.98], seed=1, breaks=True)
    last, before = records(path)[-1], records(path)[-2]
    assert last["key"] == "run_stop" and last["metadata"]["status"] == "aborted"
    assert before["key"] == "block_stop" and before["metadata"]["samples_count"] == 1920
    with pytest.raises(UserError, match="is there already"):
        log_run(path, example, losses=[0.9], seed=1)


def test_only_one_rank_writes(example: SimpleNamespace) -> None:
    with MlperfLog(None, SUBMISSION, example.train.disclosed(configured(), "x.yaml")) as log:
        log.run_started()
        log.run_stopped(0, "end")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model.base_dtype", "fp8"], ("fp8", "bfloat16")),
        (["--model.base_dtype", "int8"], ("int8", "bfloat16")),
        (["--model.dtype", "float32"], ("fp32", "fp32")),
    ],
)
def test_precisions(example: SimpleNamespace, options: list[str], expected: tuple[str, str]) -> None:
    told = example.train.disclosed(configured("llama2_70b_lora.yaml", *options), "x.yaml")
    assert (told.linear_precision, told.attention_precision) == expected


def test_a_precision_without_a_name(example: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="model.base_dtype is nf4"):
        example.train.disclosed(configured("llama2_70b_lora.yaml", "--model.base_dtype", "nf4"), "x.yaml")


@pytest.mark.slow
def test_package_of_ten_runs(example: SimpleNamespace, tmp_path: Path) -> None:
    """Laid out by package.py, which runs MLCommons' package, seed, system and convergence checkers."""
    logs = tmp_path / "logs"
    for run in range(10):
        log_run(logs / f"result_{run}.txt", example, losses=[1.1, 1.0, 0.95, 0.93, 0.92][run == 3 :], seed=50 + run)
    result = compliance(logs / "result_0.txt")
    assert result.returncode == 0 and "SUCCESS" in result.stdout + result.stderr, result.stdout + result.stderr
    tool = [sys.executable, str(EXAMPLE / "system.py"), "--org", "example", "--name", "box"]
    subprocess.run([*tool, "--out", str(tmp_path / "box.json")], check=True, capture_output=True)

    def package(out: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            str(EXAMPLE / "package.py"),
            "--org",
            "example",
            "--system",
            str(tmp_path / "box.json"),
        ]
        command += ["--results", str(logs), "--out", str(tmp_path / out), *more]
        environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    result = package("good")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PACKAGE CHECKER FOUND NO ERRORS" in result.stdout and "RCP Test Passed" in result.stdout
    folder = tmp_path / "good" / "example"
    assert sorted(path.name for path in (folder / "results/box/llama2_70b_lora").iterdir()) == [
        f"result_{run}.txt" for run in range(10)
    ]
    code = folder / "benchmarks/llama2_70b_lora/implementations/box_pytorch"
    assert (code / "engine/training/trainer.py").is_file() and (code / "README.md").is_file()
    (logs / "result_4.txt").unlink()
    log_run(logs / "result_4.txt", example, losses=[0.92], seed=50)
    result = package("again")
    assert result.returncode == 2 and "result_4.txt has the seed 50, that of result_0.txt" in result.stderr
