"""From YAML and the command line to a configuration, and what is said when something is wrong with them."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.checkpoint import CheckpointOptions
from engine.config.data import DataOptions
from engine.config.load import from_yaml, load_config, parse_config, to_yaml
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.optim import OptimOptions
from engine.config.option_help import MOST_SET
from engine.config.option_names import option_types, sections
from engine.config.parallel import ParallelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ALIASES = "".join(
    f"\n    {name}: &{name} [{', '.join([value] * 20)}]"
    for name, value in zip("abcd", ("x", "*a", "*b", "*c"), strict=True)
)
HELP = [sys.executable, "-c", "from engine.config.load import load_config; load_config()"]


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """Arguments of a run whose files exist."""
    samples = tmp_path / "train.jsonl"
    samples.write_text("{}\n")
    return ["--model.path", str(tmp_path), "--data.train", str(samples)]


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def refusal(argv: list[str]) -> str:
    """The sentence with which these arguments are refused."""
    with pytest.raises(UserError) as caught:
        load_config(argv)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    return message


def test_command_line_wins_over_the_file(tmp_path: Path, base: list[str]) -> None:
    path = write(tmp_path, "parallel: {tensor: 2, bucket_mb: 1e1}\noptim:\n  lr: 1e-4\ntrainable: [lm_head]\n")
    config = load_config([*base, "--config", path, "--parallel.tensor", "4", "--train.steps=7"])
    assert (config.parallel.tensor, config.parallel.bucket_mb, config.optim.lr) == (4, 10.0, 1e-4)
    assert (config.train.steps, config.trainable) == (7, ("lm_head",))


@pytest.mark.parametrize("written", ['["q_proj","v_proj"]', "[q_proj, v_proj]", "q_proj,v_proj", "q_proj, v_proj"])
@pytest.mark.parametrize("joined", [False, True])
def test_ways_to_write_a_list(base: list[str], written: str, joined: bool) -> None:
    given = [f"--lora.targets={written}"] if joined else ["--lora.targets", written]
    assert load_config([*base, *given]).lora.targets == ("q_proj", "v_proj")


def test_lists_of_one_and_of_numbers(base: list[str]) -> None:
    config = load_config([*base, "--trainable", "*", "--optim.betas", "0.8,0.95", "--lora.targets", r".*\.(q|v)_proj"])
    assert config.trainable == ("*",)
    assert config.optim.betas == (0.8, 0.95)
    assert config.lora.targets == (r".*\.(q|v)_proj",)


def test_paths_stay_as_given(tmp_path: Path, base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["--config", write(tmp_path, "model: {path: ./}\ndata: {train: train.jsonl}\n")])
    assert (config.model.path, config.data.train) == ("./", "train.jsonl")


def test_what_is_printed_is_read_back(tmp_path: Path, base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [*base, "--lora.rank", "4", "--optim.eps", "1e-9", "--trainable", "lm_head"]
    with pytest.raises(SystemExit) as ended:
        load_config([*given, "--print_config"])
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    assert load_config(["--config", write(tmp_path, printed)]) == load_config(given)
    assert yaml.safe_load(printed)["lora"]["rank"] == 4


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


def _with_lists(value: Any) -> Any:
    """YAML has lists alone."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, tuple | list) else value


@settings(max_examples=40, deadline=None)
@given(
    path=NAMES,
    lr=st.floats(1e-30, 1e30),
    eps=st.floats(5e-324, 1.0),
    beta=st.floats(0, 1, exclude_max=True),
    steps=st.none() | st.integers(1, 10**12),
    sequence=st.none() | st.booleans(),
    trainable=st.lists(NAMES, max_size=3),
    validation=st.none() | NAMES,
    resume=NAMES,
)
def test_yaml_round_trip(path, lr, eps, beta, steps, sequence, trainable, validation, resume) -> None:
    config = RunConfig(
        model=ModelOptions(path=path, dtype="bfloat16"),
        trainable=tuple(trainable),
        parallel=ParallelOptions(tensor=2, sequence=sequence),
        data=DataOptions(validation=validation),
        optim=OptimOptions(lr=lr, eps=eps, betas=(beta, 0.5)),
        train=TrainOptions(steps=steps),
        checkpoint=CheckpointOptions(resume=resume),
    )
    text = to_yaml(config)
    assert from_yaml(text) == config
    assert yaml.safe_load(text) == _with_lists(asdict(config))


# Not "null" and "~": where null is allowed, the parser takes these words for it, in quotes too.
@pytest.mark.parametrize(
    "name", ["5", "true", "1e3", "1.5e-3", ".5", "1_0", "nan", "a: b", "[x]", "x # y", "0x1f", "2024-01-01", "'"]
)
def test_names_that_look_like_other_values(name: str) -> None:
    config = RunConfig(model=ModelOptions(path=name), trainable=(name,), checkpoint=CheckpointOptions(dir=name))
    assert from_yaml(to_yaml(config)) == config


def test_records_are_frozen() -> None:
    config = RunConfig(model=ModelOptions(path="x"))
    with pytest.raises(FrozenInstanceError):
        config.model.path = "y"  # type: ignore[misc]
    with pytest.raises(UserError, match="above 0"):
        replace(config.optim, lr=-1.0)


def test_derived_values() -> None:
    assert [ParallelOptions(tensor=t, sequence=s).sequence_parallel for t in (1, 2) for s in (None, True, False)] == [
        *(False, False, False),
        *(True, True, False),
    ]
    assert LoraOptions(rank=16, alpha=32).scale_of("q_proj") == 2.0
    assert LoraOptions(rank=16, alpha=32, rslora=True).scale_of("q_proj") == 8.0
    assert LoraOptions(rank=0).scale_of("q_proj") == 0.0
    assert [TrainOptions().num_epochs, TrainOptions(steps=3).num_epochs, TrainOptions(epochs=0.5).num_epochs] == [
        *(1.0, None, 0.5)
    ]
    resumes = [CheckpointOptions(resume=value).resume_path for value in ("auto", "none", "runs/7")]
    assert resumes == [None, None, "runs/7"]


@pytest.mark.parametrize("words", [["--help"], ["--help", "all"], ["-h"]])
def test_help_is_quick(words: list[str]) -> None:
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*HELP, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of the processor, because a test that runs beside others waits for it
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 2.0
    assert "--model.path" in done.stdout


def help_about(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_config(list(words))
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_help_shows_what_most_runs_set(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_about(capsys, "--config", "nowhere.yaml", "--help")
    shown = re.findall(r"^  --([\w.]+)", text, re.MULTILINE)
    assert shown == list(MOST_SET) and set(shown) <= set(option_types()) and 15 <= len(shown) <= 18
    assert "  --model.path  (required)\n" in text and "  --lora.rank  (default 16)\n" in text
    assert "  --model.base_dtype stored|nf4|int8|fp8|fp8_row|nvfp4|mxfp4|mxfp8|fp8_block|int4\n" in text
    assert "rankfold train --nproc 2 --config run.yaml" in text and "--help all" in text
    for name in sections():
        assert re.search(rf"^  {name} +\w", text, re.MULTILINE), name
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("topic", [*sections(), "trainable", "optim.lr"])
def test_help_about_one_topic(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    text = help_about(capsys, "--help", topic)
    shown = re.findall(r"^  --([\w.]+)", text, re.MULTILINE)
    assert shown == [option for option in option_types() if topic in (option, option.partition(".")[0])] and shown
    assert help_about(capsys, f"--help={topic}") == text


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("lorra", "--help lorra is neither a section nor an option: did you mean --help lora?"),
        ("learning_rate", "did you mean --help optim.lr?"),
        ("optim.lrs", "did you mean --help optim.lr?"),
        ("zebra", "give all, or one of model, parallel, lora,"),
    ],
)
def test_help_about_nothing(topic: str, words: str) -> None:
    assert words in refusal(["--help", topic])


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_about(capsys, "--help", "all").splitlines()
    for option in option_types():
        at = next(number for number, line in enumerate(lines) if line.startswith(f"  --{option} "))
        entry = " ".join(lines[at : at + 2]).partition("(type:")[0].split(maxsplit=2)
        assert len(entry) == 3 and len(entry[2]) > 10, f"{option} is not explained: {lines[at : at + 2]}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--parallel.tensr 2", "--parallel.tensr is not an option: did you mean --parallel.tensor?"),
        ("--tensor 2", "--tensor is not an option: did you mean --parallel.tensor?"),
        ("--train.lr 2", "--train.lr is not an option: did you mean --optim.lr?"),
        ("--parallel.tens 2", "did you mean --parallel.tensor?"),
        ("--zebra 2", "--zebra is not an option: see --help all"),
        ("--optim.learning_rate 2", "--optim.learning_rate is not an option: did you mean --optim.lr?"),
        ("--lr 2", "did you mean --optim.lr?"),
        ("--learning_rate 2", "did you mean --optim.lr?"),
        ("--lora_r 2", "did you mean --lora.rank?"),
        ("--max_steps 2", "did you mean --train.steps?"),
        ("--num-train-epochs 2", "did you mean --train.epochs?"),
        ("--model.dtype bf16", "did you mean bfloat16?"),
        ("--parallel.shard parameter", "did you mean parameters?"),
        ("--parallel.shard zero", "is expected: choose one of them."),
        ("--model.base_dtype 4bit", "did you mean nf4?"),
        ("--data.seq_length 8k", "did you mean 8192?"),
        ("--train.steps 1e3", "did you mean 1000?"),
        ("--parallel.tensor two", "parallel.tensor is 'two', but a whole number is expected: use for example 1."),
        ("--parallel.tensor 2.0", "parallel.tensor is '2.0', but a whole number"),
        ("--parallel.tensor 0", "parallel.tensor is 0, but it must be 1 or more"),
        ("--parallel.tensor", "--parallel.tensor has no value"),
        ("--parallel.virtual 2", "set parallel.virtual to null, or parallel.pipeline above 1"),
        ("--parallel.layers_per_stage [2,2]", "one number of layers above 0 for each stage of a pipeline is expected"),
        ("--parallel.sequence maybe", "parallel.sequence is 'maybe', but true or false or null is expected"),
        ("--parallel.bucket_mb 0", "parallel.bucket_mb is 0.0"),
        ("stray", "'stray' belongs to no option"),
        ("--model.dtype fp8", "model.dtype is 'fp8', but one of float32, bfloat16, float16 is expected"),
        ("--lora.rank -1", "lora.rank is -1, but it must be 0 or more"),
        ("--lora.dropout 1", "lora.dropout is 1.0, but a probability"),
        ("--lora.alpha 0", "lora.alpha is 0.0"),
        ("--lora.targets (q", "lora.targets contains '(q', which is not a valid regular expression"),
        ("--data.seq_length 1", "data.seq_length is 1"),
        ("--data.seq_length null", "data.seq_length is null, but a whole number"),
        ("--data.format csv", "data.format is 'csv', but one of auto, text, completion"),
        ("--data.packing yep", "data.packing is 'yep', but true or false or concatenate is expected"),
        ("--optim.lr 0", "optim.lr is 0.0, but it must be a number above 0: use for example 2e-4."),
        ("--optim.lr .inf", "optim.lr is inf"),
        ("--optim.lr fast", "optim.lr is 'fast', but a number is expected"),
        ("--optim.betas 0.9", "a list of two numbers is expected: use for example [0.9, 0.999]"),
        ("--optim.betas 0.9,1", "optim.betas is [0.9, 1.0], but two numbers from 0 to below 1"),
        ("--optim.min_lr 1", "optim.min_lr is 1.0 and optim.lr is 0.0002"),
        ("--optim.warmup_ratio 3", "optim.warmup_ratio is 3.0, but a share from 0 to 1"),
        ("--optim.warmup_ratio 0.1 --optim.warmup_steps 3", "remove one of the two"),
        ("--optim.clip_grad_norm -1", "use 0 to switch clipping off"),
        ("--train.steps 5 --train.epochs 2", "train.steps is 5 and train.epochs is 2.0"),
        ("--train.steps 0", "train.steps is 0"),
        ("--train.epochs 0", "train.epochs is 0.0"),
        ("--train.seed -1", "train.seed is -1"),
        ("--train.micro_batch_size 0", "train.micro_batch_size is 0"),
        ("--checkpoint.keep -1", "checkpoint.keep is -1"),
        ("--checkpoint.resume nowhere", "checkpoint.resume is nowhere, which is not a folder"),
        ("--lora.init_from nowhere", "lora.init_from is nowhere, which is not a folder"),
        ("--data.validation nowhere", "data.validation is nowhere, which is not a file"),
        ("--data.tokenizer nowhere", "data.tokenizer is nowhere, which does not exist"),
        ("--log.every 0", "log.every is 0"),
        ("--log.metrics a/b", "log.metrics is 'a/b'"),
        ("--config nowhere.yaml", "nowhere.yaml cannot be read (No such file or directory)"),
        ("--config", "--config has no value"),
        ("--checkpoint.dir -x", "or --checkpoint.dir=VALUE where it begins with a dash."),
    ],
)
def test_refused_arguments(base: list[str], argv: str, words: str) -> None:
    assert words in refusal([*base, *argv.split()])


def test_what_is_required() -> None:
    assert refusal(["--data.train", "x"]).startswith("model.path is not set, but it is required: give --model.path")
    assert "model.path is nowhere, which is not a folder" in refusal(["--model.path", "nowhere"])
    assert "data.train is not set" in refusal(["--model.path", "."])
    assert parse_config(["--model.path", "nowhere"]).model.path == "nowhere"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("paralel: {tensor: 2}", "has the unknown key paralel: did you mean parallel?"),
        ("parallel: {tensr: 2}", "has the unknown key parallel.tensr: did you mean parallel.tensor?"),
        ("tensor: 2", "has the unknown key tensor: did you mean parallel.tensor?"),
        ("optim: {seed: 2}", "has the unknown key optim.seed: did you mean train.seed?"),
        ("parallel: 3", "gives parallel the value 3, but parallel is a section"),
        ("parallel:", "gives parallel no value, but parallel is a section"),
        ("parallel: [2]", "gives parallel a list, but parallel is a section"),
        ("- 3", "holds a list, but sections"),
        ("", "is empty, but a mapping of sections is expected"),
        ("model: {path: x\nlora: 3", "is not valid YAML in line 2"),
        ("train: {seed: 1, seed: 2}", "has the key seed a second time in line 1"),
        ("train: {seed: 1}\ntrain: {steps: 2}", "has the key train a second time in line 2"),
        ("lora:\n  rank_pattern: {q_proj: 1,\n    q_proj: 2}", "has the key q_proj a second time in line 3"),
        (f"data:\n  chat_arguments:{ALIASES}", "stands for more than 100,000 values"),
        ("parallel: {tensor: null}", "parallel.tensor is null, but a whole number is expected"),
        ("parallel: {tensor: true}", "parallel.tensor is true, but a whole number is expected"),
        ("lora: {targets: q_proj}", "lora.targets is 'q_proj', but a list of names is expected"),
        ("trainable: lm_head", "trainable is 'lm_head', but a list of names is expected: use for example [lm_head]."),
        ("data: {mix: {b: 1}}", "but a list of PATH=WEIGHT is expected: use for example [b.jsonl=0.5]."),
        ("train: {sample_prompts: {a: b}}", "but a list of texts is expected: use for example [Once upon a time]."),
        ("rollout: {router_replay: on}", "is true, but one of auto, on, off is expected: write 'on' with its quotes"),
        ("guards: {spike_policy: off}", "is false, but one of off, warn, skip, stop is expected: write 'off' with"),
        ("checkpoint: {dir: 5}", "checkpoint.dir is '5', but text or null is expected"),
        ("lora: {rank_pattern: {1: 2}}", "lora.rank_pattern contains 1, but names are expected: put it in quotes"),
    ],
)
def test_refused_files(tmp_path: Path, base: list[str], text: str, words: str) -> None:
    path = write(tmp_path, text)
    message = refusal([*base, "--config", path])
    assert words in message
    with pytest.raises(UserError) as caught:
        from_yaml(text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(["--config", str(path)])
    assert "Is a directory" in refusal([f"--config={tmp_path}"])
