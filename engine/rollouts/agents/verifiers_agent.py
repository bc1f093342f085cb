"""Environments of the package verifiers 0.4 as agents: its own code runs each conversation, with the environment's
harness, and scores it.

Without an import of the package before one of its environments is named. Runs in an agent's process.
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

from engine.config.rollout import VERIFIERS

_KEY = "OPENAI_API_KEY"
"""The variable that the process of an agent has the key of its conversation in."""


class VerifiersAgent:
    """An environment, called as an agent of a run.

    Args:
        name: of its task set, or a file .toml with what `vf-eval @ FILE` takes: a table env, and select.

    Raises:
        ImportError: the package, or the environment, is not installed.
        ValueError: the options are none.
    """

    def __init__(self, name: str) -> None:
        try:
            options = importlib.import_module("verifiers.v1.configs.cli.eval")
            loaders = importlib.import_module("verifiers.v1.utils.loaders")
        except ImportError as error:
            raise ImportError(
                f"{VERIFIERS}{name} needs the package verifiers 0.4, which cannot be imported ({error}): pip install "
                "verifiers"
            ) from None
        given: dict[str, Any] = {"env": {"taskset": {"id": name}}}
        if name.endswith(".toml"):
            given = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        # what else vf-eval takes (model, client, sampling, counts) is the run's
        config = options.EvalConfig.model_validate({key: given[key] for key in ("env", "select") if key in given})
        self._environment: Any = loaders.load_environment(config.env)
        tasks = self._environment.taskset.select(config.select)
        if not tasks.bounded:
            raise ValueError("the task set has no end: set a limit in its options, as [select] limit = 1000")
        self._tasks = {int(one.data.idx): one for one in tasks}

    def tasks(self) -> list[dict[str, Any]]:
        """Returns its tasks as records; the text of a prompt is for the log, as the harness writes its own."""
        return [
            {"prompt": one.data.prompt_text or one.data.name or f"task {number}", "task": number}
            for number, one in self._tasks.items()
        ]

    async def __call__(self, task: int, base_url: str, model: str) -> dict[str, Any]:
        """Runs one conversation; returns its reward, with the scores that it consists of, and metrics."""
        clients = importlib.import_module("verifiers.v1.clients")
        client = clients.EvalClientConfig(base_url=base_url, api_key_var=_KEY)
        environment = self._environment
        async with environment.serving():
            (slot,) = environment.slots(self._tasks[task], 1)
            episode = await environment.run_slot(slot, clients.ModelContext(model=model, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not ok")
        traces = [one for one in episode.traces if one.agent.trainable] or list(episode.traces)
        metrics: dict[str, float] = {}
        for one in traces:
            metrics |= {name: float(score.score) for name, score in one.rewards.items() if score is not None}
            metrics |= {name: float(value) for name, value in one.metrics.items() if value is not None}
        return {"reward": sum(float(one.reward) for one in traces) / len(traces), "metrics": metrics}
