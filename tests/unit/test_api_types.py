"""The types of `engine.api` as a checker of a program sees them, and its docstrings as the reference takes them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mypy import api as mypy

import engine
import rankfold
from engine import api
from tests.support.commands import REPOSITORY

PROGRAM = r'''
"""A user's program, as type checkers see it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.api import (
    CheckpointEvent,
    Completion,
    EvaluationEvent,
    GenerationOptions,
    Model,
    RunConfig,
    RunListener,
    RunSummary,
    Score,
    Session,
    StepEvent,
    UserError,
    export,
    generate,
    load_config,
    load_model,
    train,
)


def records() -> Iterator[dict[str, Any]]:
    yield {"prompt": "2+3=", "answer": "5"}


def accuracy(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(right in one) for one, right in zip(completions, answer, strict=True)]


class Hears(RunListener):
    def reported(self, event: StepEvent) -> None:
        loss: float = event.loss
        if loss < 0.1:
            self.stop()

    def evaluated(self, event: EvaluationEvent) -> None:
        print(event.figures.get("accuracy"))

    def saved(self, event: CheckpointEvent) -> None:
        print(event.path.name)


config: RunConfig = load_config("run.yaml", lora={"rank": 8})
summary: RunSummary = train(config, Hears(), data=records, validation=[{"text": "a"}], mix=[("more.jsonl", 0.5)])
train(config, data=list(records()), rewards=[accuracy, ("exact_match", 0.5)])
folder: Path = export(summary.run_dir, "adapter", step="best")
options: GenerationOptions = {"temperature": 0.7, "stop_texts": ["\n"]}
answers: list[str] = generate("model", ["a", [{"role": "user", "content": "b"}], {"prompt": "c"}, [1, 2]], **options)
with load_model("model", adapter=folder, base_dtype="nf4") as model:
    found: list[Completion] = model.complete(answers, max_new_tokens=3, top_p=0.9)
    scores: list[Score] = model.score([("a", "b"), ([1], [2])])
    text: str = model.chat([{"role": "user", "content": "b"}])
    for piece in model.stream("a", max_new_tokens=3):
        text += piece
    model.use_adapter(None)
    opened: Model = model
try:
    with Session(config, data=records) as run:
        step: StepEvent = run.step(3)
        print(step.tokens_per_second, run.evaluate().loss, run.generate(["a"]), run.save().name)
except UserError as error:
    print(error)
'''
WRONG = {
    'generate("model", ["a"], temprature=0.7)': 'Unexpected keyword argument "temprature" for "generate"',
    "train(config, data=3)": 'Argument "data" to "train" has incompatible type "int"',
    'train(config, rewards=[(accuracy, "much")])': "List item 0 has incompatible type",
    "model.chat(3)": 'Argument 1 to "chat" of "Model" has incompatible type "int"',
    "run.step().los": '"StepEvent" has no attribute "los"',
    'export("a", "b", format="gguf")': 'Argument "format" to "export" has incompatible type',
}


def test_a_program_is_checked(tmp_path: Path) -> None:
    for package in (engine, rankfold):
        assert (Path(str(package.__file__)).parent / "py.typed").is_file()
    program = tmp_path / "program.py"
    lines = PROGRAM.strip().splitlines()
    program.write_text("\n".join([*lines, *WRONG]) + "\n")
    # the configuration of this repository leaves out torch, which takes longer than all the rest
    options = ["--config-file", str(REPOSITORY / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    limit = sys.getrecursionlimit()
    try:
        found, problems, _ = mypy.run([*options, str(program)])
    finally:
        sys.setrecursionlimit(limit)  # which mypy raises for the whole process
    assert not problems
    errors = dict(re.findall(r"program.py:(\d+): error: (.*)", found))
    assert list(errors) == [str(len(lines) + place) for place in range(1, len(WRONG) + 1)], found
    for error, words in zip(errors.values(), WRONG.values(), strict=True):
        assert words in error


def _documented() -> Iterator[tuple[str, Any]]:
    for name in api.__all__:
        one = getattr(api, name)
        yield name, one
        if not inspect.isclass(one) or one in (api.RunConfig, api.UserError):
            continue
        for member, value in vars(one).items():
            called = value.fget if isinstance(value, property) else value
            is_public = not member.startswith("_") or (member == "__init__" and one is api.Session)
            if is_public and inspect.isfunction(called):
                yield f"{name}.{member}", called


@pytest.mark.parametrize(("name", "documented"), _documented())
def test_docstrings_explain_every_argument(name: str, documented: Any) -> None:
    text = inspect.getdoc(documented) or ""
    assert text.splitlines() and text.splitlines()[0].endswith((".", ":")), f"{name} begins with no sentence"
    if dataclasses.is_dataclass(documented):
        named = [field.name for field in dataclasses.fields(documented)]
    elif inspect.isfunction(documented):
        named = [one for one in inspect.signature(documented).parameters if one != "self"]
    else:
        return
    _, _, explained = text.partition("Args:\n")
    for one in named:
        assert re.search(rf"^ +(\w+, )*{one}(, \w+)*:", explained, re.MULTILINE), f"{name}: {one}"
