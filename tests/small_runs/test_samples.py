"""Text that a run shows while it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.small_runs.conftest import SmallRuns
from tests.support.commands import losses
from tests.wrong_inputs.workplace import run_here

PROMPTS = '["abab, ba", "cab"]'


def _samples(folder: Path) -> dict[tuple[int, str], str]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if any(name.startswith("sample/") for name in record)]
    return {(record["step"], name): text for record in records for name, text in record.items() if name != "step"}


def test_samples_are_what_generation_writes_and_change_nothing(
    run: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"train__steps": 5, "optim__lr": 0.5, "lora__dropout": 0.2, "lora__targets": "o_proj,down_proj,lm_head"}
    common |= {"data__validation": run.place.train, "train__eval_every": 2, "guards__spike_policy": "off"}
    run(**common)
    plain = losses(run.folder)
    said = run(
        checkpoint__dir=run.folder.with_name("sampled"), train__sample_every=2, train__sample_prompts=PROMPTS,
        train__sample_tokens=6,
    )  # fmt: skip
    assert losses(run.folder) == plain
    found = _samples(run.folder)
    assert [*found] == [(step, f"sample/{number}") for step in (0, 2, 4, 5) for number in (1, 2)]
    assert len(set(found.values())) > 2, "the samples should change as the model does"
    for number, prompt in enumerate(json.loads(PROMPTS), 1):
        assert f'step 5: sample {number}: "{prompt}" -> "{found[5, f"sample/{number}"]}"' in said
        arguments = ["--model", run.place.model, "--prompt", prompt, "--max-new-tokens", 6]
        for step, more in ((0, []), (5, ["--adapter", run.folder])):
            seen = run_here("generate", [*arguments, *more], capsys)
            assert seen.status == 0 and found[step, f"sample/{number}"].strip() in seen.printed, (step, seen.printed)


def test_one_prompt_with_commas_is_one_prompt(run: SmallRuns) -> None:
    run(train__sample_every=1, train__sample_prompts="ab, ba", train__sample_tokens=2)
    assert {name for _, name in _samples(run.folder)} == {"sample/1"}


def test_a_resumed_run_goes_on_sampling(run: SmallRuns) -> None:
    options = {"train__sample_every": 2, "train__sample_prompts": '["ab"]', "train__sample_tokens": 2}
    run(train__steps=2, **options)
    said = run(train__steps=4)
    assert [step for step, _ in _samples(run.folder)] == [0, 2, 4]
    assert "sample_every" not in said


PROMPT = {"train__sample_every": 2, "train__sample_prompts": '["ab"]'}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train__sample_every": 2}, "train.sample_every is 2 and train.sample_prompts has 0 texts, but samples need"),
        ({**PROMPT, "train__sample_tokens": 90}, "the model's context is 64"),
        ({**PROMPT, "train__sample_chat": "true"}, "no chat template"),
        (
            {**PROMPT, "train__sample_images": '["a.png"]'},
            "train.sample_images names an image, but the model reads text",
        ),
        ({**PROMPT, "train__sample_images": '["a.png", "b.png"]'}, "has 2 paths and train.sample_prompts has 1 texts"),
    ],
)
def test_one_sentence(options: dict[str, object], words: str, run: SmallRuns) -> None:
    said = run(status=2, **options)
    assert words in said and "reading weights" not in said
