"""Wrong options and data of rollouts: one sentence, before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.wrong_inputs.workplace import Workplace

Refused = Callable[..., None]

GOOD = {
    "objective.name": "grpo", "rollout.rewards": "exact_match", "rollout.num_generations": 2,
    "rollout.max_completion_length": 4, "train.global_batch_size": 4, "train.micro_batch_size": 2,
}  # fmt: skip
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"objective.name": "language_modeling"}, "rollout.rewards is set and objective.name is language_modeling"),
    ({"rollout.rewards": "[]"}, "rollout.rewards is [], so that no completion is better than another"),
    ({"rollout.rewards": "rewards"}, "rollout.rewards has 'rewards', but FILE.py:NAME"),
    ({"rollout.rewards": "nowhere.py:f"}, "nowhere.py is not a file: give the path of a Python file"),
    ({"rollout.rewards": "exact_match=0.5"}, "weights stand in an option of their own: write exact_match, and its"),
    ({"rollout.rewards": "exact_match,numeric_answer", "rollout.reward_weights": "1"}, "has 1 numbers and"),
    ({"rollout.reward_weights": "a"}, "rollout.reward_weights is 'a', but a list of numbers is expected: use for"),
    ({"rollout.num_generations": 3}, "is 4, which counts completions, and rollout.num_generations 3"),
    ({"rollout.num_generations": 1}, "rollout.num_generations is 1, but rewards are compared between"),
    ({"rollout.max_completion_length": 512}, "which leaves no room for a prompt: raise data.seq_length"),
    ({"rollout.temperature": 0}, "rollout.temperature is 0.0, but it must be a number above 0"),
    ({"rollout.top_p": 1.5}, "rollout.top_p is 1.5, but a share"),
    ({"rollout.min_p": 1.5}, "rollout.min_p is 1.5, but a share"),
    ({"rollout.repetition_penalty": 0}, "rollout.repetition_penalty is 0.0, but it must be a number above 0"),
    ({"rollout.overlong_buffer": 5}, "rollout.overlong_buffer is 5, but 1 to rollout.max_completion_length 4"),
    ({"rollout.environment": "nowhere.py:F"}, "rollout.environment has nowhere.py:F, and nowhere.py is not a file"),
    ({"rollout.tools": "f"}, "rollout.tools has 'f', but FILE.py:NAME is expected"),
    ({"rollout.tools": "python:f"}, "a function or class of a Python program: give it in that program"),
    ({"rollout.tools": "a.py:f,a.py:f"}, "rollout.tools has a.py:f twice"),
    ({"rollout.environment": "openenv:10.0.0.7"}, "rollout.environment is 'openenv:10.0.0.7', but the address of an"),
    ({"rollout.tools": "openenv:http://h:1"}, "rollout.tools has 'openenv:http://h:1', but FILE.py:NAME is expected"),
    ({"rollout.rewards": "environment"}, "rollout.rewards has environment and rollout.environment is null"),
    ({"rollout.max_turns": 3}, "rollout.max_turns is set and neither rollout.tools nor rollout.environment is"),
    ({"rollout.environment_timeout": 3}, "rollout.environment_timeout is set and neither rollout.tools nor"),
    ({"rollout.agent": "agent"}, "rollout.agent has 'agent', but FILE.py:NAME is expected"),
    ({"rollout.agent": "nowhere.py:f"}, "rollout.agent has nowhere.py:f, and nowhere.py is not a file"),
    ({"rollout.agent": "verifiers:"}, "but the name of an environment is expected behind verifiers:"),
    ({"rollout.agent": "verifiers:x"}, "whose own tasks are the prompts: remove data.train"),
    ({"rollout.agent": "verifiers:no.toml", "data.train": None}, "has verifiers:no.toml, and no.toml is not a file"),
    ({"rollout.agent": "python:f"}, "an agent runs in processes of its own: name a file, as agent.py:NAME"),
    ({"rollout.agent": "a.py:f", "rollout.tools": "a.py:g"}, "rollout.agent and rollout.tools are both set"),
    ({"rollout.agent": "a.py:f", "rollout.endpoint": "8700"}, "rollout.endpoint is '8700', but HOST:PORT is expected"),
    ({"rollout.agent": "a.py:f", "rollout.endpoint": "h:99999"}, "but HOST:PORT is expected: write for example"),
    ({"rollout.agent": "a.py:f", "rollout.agent_timeout": 0}, "rollout.agent_timeout is 0.0, but it must be"),
    (
        {"rollout.agent": "a.py:f", "rollout.environment_timeout": 9},
        "rollout.environment_timeout is 9 and rollout.agent",
    ),
    ({"rollout.endpoint": "h:80"}, "rollout.endpoint is set and rollout.agent is not"),
    (
        {"data.share_prefixes": "true", "objective.loss_type": "bnpo"},
        "data.share_prefixes is true, but the loss is a mean over each micro-batch",
    ),
    ({"rollout.tool_format": "xml"}, "rollout.tool_format is 'xml', but one of hermes, qwen_xml"),
    ({"rollout.server": "http://h/a b"}, "rollout.server is http://h/a b, but the address of a server"),
    ({"rollout.server": "10.0.0.7:8000"}, "rollout.server is 10.0.0.7:8000, but the address of a server"),
    ({"rollout.server": "http://[x"}, "but the address of a server is expected"),
    ({"rollout.server": "http://h,http://h/"}, "rollout.server has http://h twice"),
    ({"rollout.server": "http://me:word@h"}, "rollout.server has a user name or a password before an @"),
    ({"rollout.overlap": True}, "rollout.overlap is true and rollout.server is not set"),
    ({"rollout.mismatch": "stop"}, "rollout.mismatch is set and rollout.server is not"),
    (
        {
            "rollout.server": "http://h",
            "rollout.mismatch": "correct",
            "rollout.rewards": [],
            "distillation.teachers": ["/m"],
            "distillation.whole": True,
        },
        "distillation.whole is true and rollout.mismatch is correct, but there are no importance weights",
    ),
    (
        {"rollout.server": "http://h", "rollout.mismatch": "ask"},
        "rollout.mismatch is 'ask', but one of warn, correct, stop is expected",
    ),
    ({"rollout.server": "http://h", "rollout.server_timeout": 0}, "rollout.server_timeout is 0.0, but it must be"),
    ({"rollout.server": "http://h", "lora.dora": True}, "lora.dora is true and rollout.server is set, which loads"),
    (
        {"rollout.server": "http://h", "lora.merge_aware": True, "model.base_dtype": "int8"},
        "lora.merge_aware is true and rollout.server is set, which loads",
    ),
    ({"rollout.merge_once": False}, "rollout.merge_once is false and lora.merge_aware is not true, so that nothing"),
    ({"rollout.merge_once": "twice"}, "rollout.merge_once"),
    ({"data.mix": '["{train}=1"]'}, "whose data are the prompts of data.train"),
    ({"rollout.eval_generations": 4}, "rollout.eval_generations is set and data.validation is not, so that nothing"),
    ({"data.validation": "{train}", "rollout.eval_generations": 0}, "rollout.eval_generations is 0"),
    ({"data.validation": "{train}", "rollout.eval_temperature": -1}, "rollout.eval_temperature is -1.0, but it must"),
    ({"data.validation": "{train}", "rollout.eval_top_p": 0}, "rollout.eval_top_p is 0.0, but a share above 0"),
    ({"data.validation": "{train}", "rollout.pass_reward": "nan"}, "rollout.pass_reward is 'nan', but a number"),
    (
        {"data.validation": "{train}", "rollout.eval_temperature": 0, "rollout.eval_generations": 2},
        "but all completions of a prompt would be the same: set rollout.eval_generations to 1",
    ),
    (
        {"data.validation": "{train}", "rollout.eval_temperature": 0, "rollout.eval_top_p": 0.5},
        "rollout.eval_top_p is 0.5, but the most likely token is taken whatever the others are",
    ),
    (
        {"data.validation": "{train}", "checkpoint.keep_best": True, "checkpoint.best": "eval/pass@3"},
        "checkpoint.best is eval/pass@3, but evaluations of grpo can judge by eval/reward, eval/rewards/exact_match",
    ),
    ({"checkpoint.keep_best": True}, "checkpoint.keep_best is true and data.validation is not set"),
    ({"data.validation": "{train}", "train.target_eval_loss": 1}, "is grpo, which evaluates rewards: remove it"),
    (
        {
            "data.validation": "{train}",
            "rollout.rewards": "[]",
            "distillation.teachers": "[base]",
            "rollout.num_generations": 1,
            "train.eval_every": 1,
        },
        "data.validation is set and rollout.rewards is [], so that completions of its prompts could not be scored",
    ),
    ({"data.format": "text"}, "data.format is text and objective.name is grpo"),
    ({"data.overlong": "cut"}, "data.overlong is cut and objective.name is grpo"),
    ({"data.learn_after_end": "false"}, "whose completions end where sampling ends: remove it"),
    ({"data.show": 2}, "whose rows are not there before the first step: rollout.show logs completions: remove it"),
    ({"data.image_folder": "."}, "whose prompts have no images: remove it"),
    ({"train.last_batch": "full"}, "whose batches are all full, since prompts continue over the ends of epochs"),
    ({"train.eval_mean": "rows"}, "train.eval_mean is rows and objective.name is grpo, which evaluates completions"),
    ({"objective.reference": "initial"}, "compared with the model without its adapters, if at all: remove it"),
    ({"objective.importance_max": 2}, "objective.importance_max is 2.0 and objective.importance_correction is none"),
    ({"objective.importance_min": 0.5}, "objective.importance_min is 0.5 and objective.importance_correction is none"),
    ({"objective.entropy_coefficient": -0.1}, "objective.entropy_coefficient is -0.1, but it must be 0 or more"),
    ({"objective.reference_sync_steps": 8}, "objective.reference_sync_steps is 8 and objective.beta is 0, so that"),
    ({"objective.reference_mixup_alpha": 0.5}, "reference_mixup_alpha is 0.5 and objective.reference_sync_steps is"),
    ({"objective.reference_mixup_alpha": 0}, "objective.reference_mixup_alpha is 0.0, but a share above 0"),
    ({"objective.kl_bias_correction": "false"}, "so that there is no divergence to correct: set objective.beta"),
    ({"data.seq_length": 65}, "the model's context is 64: set data.seq_length to 64 or less"),
]


def _prepare(place: Workplace, prompts: str = '{"prompt": "ab", "answer": "b"}\n') -> None:
    Path(place.train).write_text(prompts, encoding="utf-8")
    place.options |= GOOD


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda value: str(value)[:60])
def test_options(options: dict[str, Any], words: str, place: Workplace, refused: Refused) -> None:
    _prepare(place)
    place.options |= {
        name: value.replace("{train}", str(place.train)) if isinstance(value, str) else value
        for name, value in options.items()
    }
    refused(words)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ('{"text": "ab"}\n', "the record has the fields text, expected prompt or messages"),
        ('{"prompt": "ab"}\n{"prompt": []}\n', "field 'prompt' is empty, expected a list of turns"),
        ('{"prompt": [{"role": "user", "content": "a"}]}\n', "chat template"),
    ],
)
def test_prompts(prompts: str, words: str, place: Workplace, refused: Refused) -> None:
    _prepare(place, prompts)
    refused(words)


def test_a_function_that_does_not_load(place: Workplace, refused: Refused, tmp_path: Path) -> None:
    _prepare(place)
    (tmp_path / "rewards.py").write_text("import nothing_like_this\n", encoding="utf-8")
    place.options |= {"rollout.rewards": f"{tmp_path}/rewards.py:f"}
    refused("cannot be loaded (ModuleNotFoundError: No module named 'nothing_like_this')", at_once=False)


def test_a_column_that_no_record_has(place: Workplace, refused: Refused) -> None:
    """It was a warning in each step, and a run that stopped at the first."""
    _prepare(place)
    place.options |= {"rollout.rewards": "exact_match:gold"}
    refused("has exact_match:gold, but no record of", at_once=False)
