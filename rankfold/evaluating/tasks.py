"""Tasks of lm-evaluation-harness: found by name, loaded, and evaluated, without leaving a trace in this process.

How a task is read, how prompts are written and how metrics are computed is the harness's. This module has what is
around it: refusals in one sentence, the hub closed unless it was opened, and random states as before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import numpy as np
import torch
from huggingface_hub import constants as hub
from jinja2 import TemplateError
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from engine.config.suggestions import closest
from engine.errors import UserError
from engine.sentences import listed, on_one_line
from rankfold.evaluating.choice import TaskChoice

_SEED, _OTHER_SEED = 0, 1234
"""Those of the harness, for Python's random numbers, and for those of numpy and torch."""

Results = dict[str, Any]
"""What the harness returns: "results", "versions", "higher_is_better" and so on, by task."""


class Tasks:
    """Loaded tasks.

    Args:
        choice: which.

    Raises:
        UserError: there is no such task, it cannot be loaded, needs the hub, or runs code.
    """

    def __init__(self, choice: TaskChoice) -> None:
        self.choice = choice
        with _surroundings(choice):
            manager, names = _found(choice)
            what = f"evaluation.tasks {','.join(choice.tasks)}"
            with _sentences(what, download=choice.download):
                try:
                    self._loaded = manager.load(names)
                except (KeyError, ValueError, TypeError, AssertionError) as error:
                    raise UserError(f"{what}: {_reason(error)}: correct the task's YAML file.") from error
        self.tasks: dict[str, Any] = self._loaded["tasks"]
        runs_code = [name for name, task in self.tasks.items() if getattr(task, "UNSAFE_CODE", False)]
        if runs_code and not choice.allow_code:
            raise UserError(
                f"task {listed(runs_code)} runs code that the model wrote, on this machine: leave it out, or allow it "
                "with evaluation.allow_code where nothing can be harmed."
            )
        for task in self.tasks.values():
            self._configure(task)

    def _configure(self, task: Any) -> None:
        """Changes a task's settings to those of the choice, as the harness's own command does."""
        given = task.get_config("num_fewshot")
        if self.choice.num_fewshot is not None and given != 0:
            task.set_config(key="num_fewshot", value=self.choice.num_fewshot)
        elif given is None:
            task.set_config(key="num_fewshot", value=0)
        if self.choice.gen_kwargs and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=dict(self.choice.gen_kwargs), update=True)

    def evaluate(self, model: LM, *, samples: bool = False, errors: bool = True) -> Results:
        """Evaluates a model.

        Args:
            model: the same on all ranks.
            samples: whether the result has every document with its answers, under "samples".
            errors: whether standard errors are computed, some by resampling, which takes long.

        Raises:
            UserError: a task cannot be evaluated.
        """
        choice = self.choice
        for task in self.tasks.values():
            task.set_fewshot_seed(seed=choice.seed)
        names = listed(self.tasks)
        with _surroundings(choice), _sentences(f"task {names}", download=choice.download):
            found: Results = evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=choice.limit,
                bootstrap_iters=100_000 if errors else 0,
                log_samples=samples,
                system_instruction=choice.system,
                apply_chat_template=choice.apply_chat_template,
                fewshot_as_multiturn=choice.apply_chat_template,
                confirm_run_unsafe_code=choice.allow_code,
            )
        return found


def _found(choice: TaskChoice) -> tuple[TaskManager, list[str]]:
    """Returns the index of tasks, and the names or paths that the choice means.

    Raises:
        UserError: there is no such task.
    """
    if choice.include_path is not None:
        # thousands of files are read otherwise
        manager = TaskManager(include_path=choice.include_path, include_defaults=False)
        if all(name in manager.all_subtasks for name in choice.tasks):
            return manager, list(choice.tasks)
    manager = TaskManager(include_path=choice.include_path)
    names: list[str] = []
    for name in choice.tasks:
        meant = [name] if Path(name).suffix == ".yaml" and Path(name).is_file() else manager.match_tasks([name])
        if not meant:
            near = closest(name, manager.all_tasks)
            advice = "" if near is None else f" (did you mean {near}?)"
            raise UserError(
                f"evaluation.tasks names {name}, which is no task of lm-evaluation-harness{advice}: "
                "`lm-eval ls tasks` lists them; tasks of your own are found in evaluation.include_path."
            )
        names += meant
    return manager, names


@contextmanager
def _surroundings(choice: TaskChoice) -> Iterator[None]:
    """Seeds random numbers as the harness does and restores them afterwards, closes the hub, and keeps the harness's
    bars and lines from where results go."""
    python, numpy = random.getstate(), np.random.get_state()
    with ExitStack() as left:
        left.enter_context(torch.random.fork_rng())
        left.callback(np.random.set_state, numpy)
        left.callback(random.setstate, python)
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)
        torch.manual_seed(_OTHER_SEED)
        left.enter_context(redirect_stdout(sys.stderr))
        left.enter_context(_offline(not choice.download))
        left.enter_context(_no_bars())
        yield


@contextmanager
def _offline(closed: bool) -> Iterator[None]:
    """Closes the hub for the packages that read it, as HF_HUB_OFFLINE does for a process."""
    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = (closed or one for one in before)
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hides the bars of `datasets`, and that of the harness over the documents of a task, which has no option."""
    shown, bar = datasets.is_progress_bar_enabled(), lm_eval.api.task.tqdm
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = bar
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def _sentences(what: str, *, download: bool) -> Iterator[None]:
    """Turns errors of the harness, of a task's files and of data sets into one sentence.

    Raises:
        UserError: there was one.
    """
    try:
        yield
    except TemplateError as error:
        raise UserError(f"{what}: its template fails ({_reason(error)}): correct the task's YAML file.") from None
    except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
        if download:
            raise UserError(
                f"{what}: data cannot be read ({_reason(error)}): check its name and the connection."
            ) from None
        raise UserError(
            f"{what}: data is not on this machine ({_reason(error)}), and nothing is downloaded unless it is asked "
            "for: allow it with hub.download, or choose tasks whose data is local."
        ) from None


def _reason(error: Exception) -> str:
    return on_one_line(f"{type(error).__name__}: {error}")


def figures(results: Results) -> Iterator[tuple[str, str, float, bool | None]]:
    """Yields each figure of an evaluation: task or group, metric with its filter where that is not "none", value, and
    whether higher is better, None where the harness does not know."""
    for task, values in results["results"].items():
        better = results["higher_is_better"].get(task, {})
        for name, value in values.items():
            metric, _, chosen = name.partition(",")
            if not chosen or metric.endswith("_stderr") or isinstance(value, str | bool):
                continue
            yield task, metric if chosen == "none" else name, float(value), better.get(metric)
