"""A loaded model: one answer by all of its methods, streams, scores against transformers, adapters, closing."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import Model, UserError, export, generate, load_config, load_model, train
from tests.support.character_tokenizer import write_character_tokenizer
from tests.wrong_inputs.workplace import RECORDS, make_place

PROMPT = "abab cab"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and a trained run and its adapter, which is the current one."""
    folder = make_place(tmp_path_factory.mktemp("api") / "place").folder
    shutil.rmtree(folder / "adapter")
    write_character_tokenizer(folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load_config(
            model={"path": "model"}, lora={"rank": 2, "targets": ["q_proj", "v_proj"]}, data={"seq_length": 20},
            optim={"lr": 0.3}, train={"steps": 6, "global_batch_size": 3}, checkpoint={"dir": "run"},
        )  # fmt: skip
        train(config, data=RECORDS)
        export("run", "merged", format="hf")
        yield folder


@pytest.fixture(scope="module")
def model(place: Path) -> Iterator[Model]:
    with load_model("model", adapter="run", chat_template="template.jinja") as opened:
        yield opened


def test_all_ways_to_answer(model: Model) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "seed": 3}
    prompts = [PROMPT, "bac"]
    answers = model.generate(prompts, **options)
    assert answers == generate("model", prompts, adapter="run", **options) != model.generate(prompts, max_new_tokens=12)
    whole = model.complete(prompts, **options)
    assert [one.text for one in whole] == answers
    assert all(len(one.logps) == len(one.token_ids) <= 12 and one.prompt_tokens > 2 for one in whole)
    pieces = list(model.stream(PROMPT, **options))
    assert "".join(pieces) == answers[0] and len(pieces) > 1
    messages = [{"role": "user", "content": PROMPT}]
    asked = model.complete([messages], **options)[0]
    assert model.chat(messages, **options) == asked.text == model.generate([{"messages": messages}], **options)[0]
    assert model.generate([{"prompt": PROMPT}], **options) == answers[:1] and model.generate([]) == []

    abandoned = model.stream(PROMPT, **options)
    assert pieces[:2] == list(itertools.islice(abandoned, 2))
    abandoned.close()  # type: ignore[attr-defined]
    assert model.generate(prompts, **options) == answers, "after a stream that was left"


def test_scores_are_those_of_transformers(model: Model) -> None:
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained("merged").eval()
    pairs = [(PROMPT, " abba"), ("a", "bcb"), ("", "cab"), ([3, 4, 5, 6], [7, 8])]
    found = model.score(pairs)
    texts = model.generate([PROMPT], max_new_tokens=3)
    for pair, score in zip(pairs, found, strict=True):
        count = len(score.token_ids)
        before = [0] if pair[0] == "" else pair[0] if isinstance(pair[0], list) else None
        if before is None:
            (whole,) = model.complete([pair[0]], max_new_tokens=1)
            before = _ids(model, str(pair[0]))
            assert whole.prompt_tokens == len(before)
        ids = torch.tensor([[*before, *score.token_ids]])
        with torch.no_grad():
            logps = stock(ids).logits[0, -count - 1 : -1].double().log_softmax(-1)
        torch.testing.assert_close(
            torch.tensor(score.logps, dtype=torch.float64), logps.gather(1, ids[0, -count:, None])[:, 0],
            rtol=0, atol=2e-5,
        )  # fmt: skip
        assert list(score.is_greedy) == (logps.argmax(-1) == ids[0, -count:]).tolist()
        assert score.logp == sum(score.logps)
    ((greedy),) = model.complete([PROMPT], max_new_tokens=3)
    (again,) = model.score([(PROMPT, list(greedy.token_ids))])
    assert all(again.is_greedy) and greedy.text == texts[0]
    assert again.logps == pytest.approx(greedy.logps, abs=1e-5)


def _ids(model: Model, text: str) -> list[int]:
    from engine.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("model")
    return tokenizer.encode(text, bos=tokenizer.adds_bos)


def test_adapters_are_exchanged(place: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12}
    with load_model("model") as model:
        plain = model.generate([PROMPT], **options)
        assert model.adapter is None
        model.use_adapter("run")
        adapted = model.generate([PROMPT], **options)
        assert adapted == generate("merged", [PROMPT], **options) != plain
        assert model.score([(PROMPT, "ab")]) != []
        with pytest.raises(UserError, match="adapter nowhere is not a folder"):
            model.use_adapter("nowhere")
        assert model.adapter == Path("run") and model.generate([PROMPT], **options) == adapted
        model.use_adapter(None)
        assert model.generate([PROMPT], **options) == plain
    model.close()
    with pytest.raises(UserError, match="this model is closed"):
        model.generate([PROMPT])


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (PROMPT, {}, "prompts is one prompt, but a list of them is expected: write [prompt]."),
        ([3], {}, "prompt number 1: the prompt is of type int"),
        ([""], {}, "prompt 1 has no tokens"),
        ([{"text": "a"}], {}, "prompt number 1: field 'messages' is missing"),
        ([{"prompt": "a", "images": ["x.png"]}], {}, "a model that reads text alone has no place"),
        ([[{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]], {}, "the model reads text alone"),
        (["a"], {"max_new_tokens": 1000}, "set max_new_tokens to"),
        (["a"], {"top_k": 3}, "but temperature is 0"),
        (["a"], {"min_p": 2}, "min_p is 2, but from 0 to 1 was expected"),
        ([[99]], {}, "prompt 1 has token 99, but the model has 48"),
    ],
)
def test_refusals_leave_it_usable(model: Model, prompts: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        model.generate(prompts, **{"max_new_tokens": 2} | options)
    assert words in str(caught.value)
    assert len(model.generate([PROMPT], max_new_tokens=2)) == 1


def test_what_cannot_be_scored(model: Model) -> None:
    for pair, words in ((("a", ""), "0 that are scored"), ((PROMPT * 20, "a"), "the model's context is 64")):
        with pytest.raises(UserError, match=words):
            model.score([pair])
