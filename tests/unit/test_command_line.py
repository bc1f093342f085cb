"""Every tool's command line: one sentence for each mistake, options by the tool's own names, units where sizes are."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.config.command_line import CommandLine, in_flags, named_as
from engine.config.load import parse_config, to_yaml
from engine.config.option_names import option_types, sections
from engine.config.paths import PATH_OPTIONS, path_text
from engine.config.run import RunConfig
from engine.config.units import read_count, read_gb, read_gib, read_length
from engine.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("benchmark", "convert", "generate", "plan", "preprocess", "report")


class _Stop(Exception):
    pass


@cache
def _parsers() -> dict[str, CommandLine]:
    """Program and subcommand -> its parser, of all tools but `rankfold train`, which has the options of a run."""
    found: dict[str, CommandLine] = {}

    def catch(parser: CommandLine, *_: Any) -> None:
        subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        found.update({one.prog: one for one in subs[0].choices.values()} if subs else {parser.prog: parser})
        raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommandLine, "parse_args", catch)
        for name in NAMES:
            patch.setattr(sys, "argv", [f"{name}.py"])
            with pytest.raises(_Stop):
                importlib.import_module(f"rankfold.{name}").main()
    return found


def _refusal(parser: CommandLine, words: list[str]) -> str:
    with pytest.raises(UserError) as error:
        parser.parse_args(words)
    sentence = str(error.value)
    assert "usage" not in sentence and "\n" not in sentence and sentence.endswith((".", "?")), sentence
    return sentence


def test_no_tool_has_a_parser_of_its_own() -> None:
    """Every command line; a plain argparse parser dumps its usage."""
    paths = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "rankfold").rglob("*.py")]
    own = [path.name for path in paths if re.search(r"ArgumentParser\(", path.read_text("utf-8"))]
    assert own == []
    assert {path.stem for path in (ROOT / "tools").glob("*.py")} == {*NAMES, "pretrain_lora"}


def test_flags_stand_for_options_that_exist() -> None:
    for parser in _parsers().values():
        for option, flag in parser.stands_for.items():
            assert option in option_types() or option.startswith("--"), (parser.prog, option)
            assert flag in parser._option_string_actions, (parser.prog, flag)


_A_PATH = re.compile(r"\b(files?|folders?|FILE|FOLDER|DIR|RUN_DIR|PATH)\b")
_NO_PATH = ("convert.py config --flags",)


def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_tilde_is_the_home_in_every_path_of_a_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, seen = _home(monkeypatch, tmp_path), 0
    for parser in _parsers().values():
        for action in parser._actions:
            name = f"{parser.prog} {action.option_strings[-1] if action.option_strings else action.dest}"
            if action.nargs == 0 or action.choices is not None:
                continue
            is_path = action.type in (Path, path_text)
            if not is_path:
                told = f"{action.help} {action.metavar}"
                speaks_of_one = action.type is None and _A_PATH.search(told) and name not in _NO_PATH
                assert not speaks_of_one, f"{name} is a path, by what it says: {told}"
                continue
            seen += 1
            assert str(parser._get_value(action, "~/x")) == str(home / "x"), name
            with pytest.raises(argparse.ArgumentError, match="is ~nobody-here/x, but there is no home ~nobody-here: "):
                parser._get_value(action, "~nobody-here/x")
    assert seen >= 20


def test_a_tilde_is_the_home_in_every_path_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given on the command line or in a file; what has no such home is refused, not made here."""
    home = _home(monkeypatch, tmp_path)
    texts = {"data.mix": "~/x=0.5", "data.train": "~/a.jsonl", "rollout.rewards": "~/x.py:f"}
    texts |= {"rollout.tools": "~/x.py:f", "rollout.environment": "~/x.py:F", "rollout.agent": "~/x.py:F"}
    given = dict.fromkeys(PATH_OPTIONS, "~/x") | texts
    prompt = ["--train.sample_prompts=x", "--train.sample_every=1"]  # which the image belongs to
    together = {name: value for name, value in given.items() if name != "rollout.agent"}  # in place of the environment
    for options in (together, {name: given[name] for name in ("model.path", "rollout.agent")}):
        config = parse_config([*prompt, *(f"--{name}={value}" for name, value in options.items())])
        assert "~" not in to_yaml(config) and to_yaml(config).count(str(home)) == len(options)
    (home / "run.yaml").write_text("model: {path: ~/x}\ncheckpoint: {dir: ~/run}\n", encoding="utf-8")
    assert parse_config(["--config=~/run.yaml"]).checkpoint.dir == str(home / "run")
    for name, value in given.items():
        with pytest.raises(UserError, match=rf"^{name} is ~nobody-here/.*, but there is no home ~nobody-here: "):
            parse_config(["--model.path", "x", *prompt, f"--{name}={value.replace('~', '~nobody-here')}"])
    assert parse_config(["--model.path", "./~x"]).model.path == "./~x"


def test_no_path_of_a_run_is_forgotten() -> None:
    """Options of text whose explanation speaks of a folder or a file."""
    texts = {name for name, kind in option_types().items() if "str" in str(kind) and "Literal" not in str(kind)}
    told = {name for name in texts if re.search(r"\b([Ff]older|[Ff]ile|[Pp]ath)\b", _explained(name))}
    assert told - {"log.metrics", "log.mlflow_experiment"} <= set(PATH_OPTIONS) <= texts, told


def _explained(option: str) -> str:
    section, _, name = option.rpartition(".")
    kind = sections()[section] if section else RunConfig
    return re.split(r"\n        \w+: ", (kind.__doc__ or "").partition(f"        {name}: ")[2])[0]


def _mistakes() -> Iterator[tuple[CommandLine, list[str], str]]:
    """What anybody may type wrongly, for each option of each tool: the words, and what the sentence must name."""
    for parser in _parsers().values():
        for flag, action in parser._option_string_actions.items():
            if not flag.startswith("--") or flag == "--help":
                continue
            if len(flag) > 6:
                yield parser, [f"{flag[:-2]}{flag[-1]}", "1"], flag
            if "-" in flag[2:]:
                yield parser, [f"--{flag[2:].replace('-', '_')}", "1"], f"did you mean {flag}?"
            if action.nargs == 0:
                continue
            name = action.option_strings[-1]  # an earlier name is answered with the present one
            yield parser, [flag], f"{name} has no value"
            if action.choices is not None:
                yield parser, [flag, "fnord"], f"{name} is 'fnord', but it must be one of"
            elif action.type not in (None, str, Path, path_text):
                yield parser, [flag, "fnord"], f"{name} is 'fnord', but "
        required = [action for action in parser._actions if action.required]
        if required:
            yield parser, [], "not given"


def test_every_mistake_is_one_sentence() -> None:
    cases = list(_mistakes())
    assert len(cases) > 300
    for parser, words, named in cases:
        assert named in _refusal(parser, words), (parser.prog, words)


@pytest.mark.parametrize(
    ("prog", "words", "sentence"),
    [
        ("generate.py", "--base x", "--base is not an option of generate.py: did you mean --model?"),
        ("generate.py", "--dtype bf16", "one of float32, bfloat16, float16: did you mean bfloat16?"),
        ("generate.py", "--parallel.tensor 2", "did you mean --tensor?"),
        ("generate.py", "--lr 3", "rankfold train has --optim.lr"),
        ("plan.py memory", "--gpu-memory 80XB", "--gpu-memory is '80XB', but a size such as 80, 80GB"),
        ("plan.py memory", "--lora_r 8", "did you mean --rank?"),
        ("plan.py memory", "--max_seq_length 8", "did you mean --seq-length?"),
        ("plan.py memory", "--per_device_train_batch_size 8", "did you mean --micro-batch?"),
        ("preprocess.py", "--tokeniser x", "did you mean --tokenizer?"),
        ("convert.py import", "--source a --out b c", "'c' belongs to no option of convert.py import"),
        ("convert.py merge", "--base-dtype 4bit", "did you mean nf4?"),
        ("convert.py import", "--source", "write --source followed by one, or --source=VALUE"),
    ],
)
def test_what_was_meant(prog: str, words: str, sentence: str) -> None:
    assert sentence in _refusal(_parsers()[prog], words.split())


def test_units_where_sizes_are_read() -> None:
    arguments = _parsers()["plan.py memory"].parse_args(
        ["--model", "m", "--gpu-memory", "80GB", "--seq-length", "8k", "--beside", "427M"]
    )
    assert (arguments.gpu_memory, arguments.seq_length, arguments.beside) == (80.0, 8192, 427_000_000)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (read_gib, "80", 80.0), (read_gib, "80GB", 80.0), (read_gib, "80 GiB", 80.0), (read_gib, "81920MiB", 80.0),
        (read_gib, "0.5t", 512.0), (read_gib, "1e2", 100.0), (read_gib, "-1", -1.0),
        (read_gb, "5", 5.0), (read_gb, "5GB", 5.0), (read_gb, "500MB", 0.5), (read_gb, "4GiB", 4.294967296),
        (read_length, "8192", 8192), (read_length, "8k", 8192), (read_length, "128K", 131072),
        (read_length, "1M", 2**20),
        (read_count, "427e6", 427_000_000), (read_count, "427M", 427_000_000), (read_count, "6.7B", 6_700_000_000),
    ],
)  # fmt: skip
def test_units(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [(read_gib, "80XB"), (read_gib, ""), (read_gb, "five"), (read_length, "0.3"), (read_length, "nan"),
     (read_length, "8kB"), (read_count, "inf"), (read_count, "2.5")],
)  # fmt: skip
def test_what_is_no_size(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is expected: write one of these forms"):
        read(text)


def test_a_sentence_names_the_flags() -> None:
    flags = {"parallel.tensor": "--tensor", "--base": "--model", "trainable": "--trainable"}
    sentence = "parallel.tensor is 3, parallel.tensors stay, --base-dtype stays, nothing is trainable: change --base."
    changed = "--tensor is 3, parallel.tensors stay, --base-dtype stays, nothing is trainable: change --model."
    assert in_flags(sentence, flags) == changed
    assert in_flags(sentence, {}) == sentence
    with pytest.raises(UserError, match="^--tensor is 3"), named_as(flags):
        raise UserError("parallel.tensor is 3: change it.")
