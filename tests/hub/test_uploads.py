"""Exports that are uploaded, with a hub that answers: what arrives, what stays here, and each refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.hub.conftest import files_of
from tests.hub.local_hub import GOOD_TOKEN, LocalHub, Repo
from tests.wrong_inputs.workplace import Seen, Workplace, run_here

BASE, NAME = "tiny-org/base", "me/mine"
PROMPT = torch.tensor([[1, 5, 9, 4, 7, 30]])


@pytest.fixture
def adapter(hub: LocalHub, place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An exported adapter whose base is on the hub; this process has a token."""
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    place.change_config(place.adapter / "adapter_config.json", base_model_name_or_path=BASE)
    return place.adapter


@pytest.fixture
def run(hub: LocalHub, place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a base of the hub, which started from an adapter, so that B is not zero."""
    hub.model(BASE, files_of(place.model))
    place.set(model__path=BASE, lora__init_from=place.adapter, optim__lr=0.01, train__steps=2)
    seen = run_here("pretrain_lora", [*place.arguments(), "--download"], capsys)
    assert seen.status == 0, seen.printed
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    return Path(place.options["checkpoint.dir"])


@pytest.fixture
def push(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `rankfold export`."""

    def _push(*words: Any) -> Seen:
        return run_here("export", list(words), capsys)

    return _push


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def test_an_adapter_and_a_model_come_back(
    hub: LocalHub, run: Path, place: Workplace, push: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT and transformers open them by name, and compute the same."""
    seen = push(run, "--push", NAME, "--private", "--commit-message", "The first")
    assert seen.status == 0, seen.printed
    repo = hub.repos["models", NAME]
    assert repo.is_private and hub.messages == ["The first"]
    assert f"pushed {NAME}@{repo.branches['main'][:12]}, " in seen.printed and GOOD_TOKEN not in seen.printed
    merged = push(run, "--merged", "--out", tmp_path / "hf", "--push", f"{NAME}-merged")
    assert merged.status == 0, merged.printed
    assert hub.messages[1].startswith("Upload model with rankfold ")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another machine"))
    base = AutoModelForCausalLM.from_pretrained(BASE)
    plain = _logits(base)
    adapted = _logits(PeftModel.from_pretrained(base, NAME))
    assert (adapted - plain).abs().max() > 1e-4
    whole = _logits(AutoModelForCausalLM.from_pretrained(f"{NAME}-merged"))
    # sums of float32 in another order, of values up to 0.1
    assert torch.allclose(whole, adapted, rtol=0, atol=1e-7)


def test_what_is_uploaded_of_a_run(hub: LocalHub, run: Path, place: Workplace, push: Any) -> None:
    """Neither the optimizer's state nor records of the run, nor a path of this machine."""
    assert push(run, "--push", f"{NAME}@trial").status == 0
    repo = hub.repos["models", NAME]
    files = repo.commits[repo.branches["trial"]]
    assert set(files) == {
        ".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.model"
    }  # fmt: skip
    assert set(repo.commits[repo.branches["main"]]) == {".gitattributes"}
    for data in files.values():
        assert str(place.folder.parent).encode() not in data
    config = json.loads(files["adapter_config.json"])
    commit = hub.repos["models", BASE].branches["main"]
    assert config["base_model_name_or_path"] == BASE and config["revision"] == commit
    card = files["README.md"].decode()
    for text in (
        f'base_model: "{BASE}"', "library_name: peft", "- rankfold", "# license: ", "| Data | `train.jsonl` |",
        "| Steps | 2 |", "| Objective | language modeling |", "| Training loss of the last step | ", "| Seed | 1234 |",
        "AdamW, learning rate 0.01", "| Started from the adapter | `adapter` |", f'revision="{commit}"',
    ):  # fmt: skip
        assert text in card, card


def test_the_same_again_and_what_people_wrote(hub: LocalHub, adapter: Path, push: Any) -> None:
    """A second upload commits nothing; a licence and a text stay; files of an earlier export go."""
    seen = push(adapter, "--push", NAME)
    assert seen.status == 0, seen.printed
    repo = hub.repos["models", NAME]
    first = repo.branches["main"]
    seen = push(adapter, "--push", NAME)
    assert seen.status == 0 and "as it was there already" in seen.printed, seen.printed
    assert repo.branches["main"] == first and len(hub.messages) == 1
    assert sum(hub.seen[one] for one in hub.seen if one.startswith("PUT ")) == 1
    (adapter / "README.md").write_text(
        "---\ntags:\n- rankfold\n- lora\n---\n\n# A\n\n<!-- rankfold: begin -->\nnew\n<!-- rankfold: end -->\n"
    )
    files = dict(repo.commits[first])
    theirs = (
        "---\nlicense: mit\ntags: [rankfold, mine]\n---\n# My title\n\n<!-- rankfold: begin -->\nold\n"
        "<!-- rankfold: end -->\n\nMy words.\n"
    )
    files |= {"README.md": theirs.encode(), "model.safetensors": b"stale", "picture.png": b"p", "eval.json": b"{}"}
    repo.commit(files)
    seen = push(adapter, "--push", NAME)
    assert (
        seen.status == 0 and "removed from me/mine, which the export does not have: model.safetensors" in seen.printed
    )
    files = repo.commits[repo.branches["main"]]
    assert "model.safetensors" not in files and {"picture.png", "eval.json", "adapter_config.json"} <= set(files)
    assert files["README.md"].decode() == (
        "---\nlicense: mit\ntags:\n- rankfold\n- mine\n- lora\n---\n# My title\n\n<!-- rankfold: begin -->\nnew\n"
        "<!-- rankfold: end -->\n\nMy words.\n"
    )
    before = len(hub.messages)
    assert push(adapter, "--push", NAME).status == 0 and len(hub.messages) == before


def test_an_upload_that_breaks_is_continued(hub: LocalHub, adapter: Path, push: Any) -> None:
    """By itself where the hub comes back, and by the same command; a branch has all of it or nothing."""
    hub.failures = {"POST /api/models/me/mine/commit": [0], "PUT /storage/": [503, 0]}
    seen = push(adapter, "--push", NAME)
    assert seen.status == 0, seen.printed
    assert f"{hub.address} answers 503: trying again in 1 s (1 of 5)" in seen.printed
    assert "cannot be reached for me/mine" in seen.printed and "Trying again in 5 s (2 of 3)." in seen.printed
    assert "/storage/" not in seen.printed
    repo = hub.repos["models", NAME]
    repo.commits, repo.branches = {}, {}
    empty = repo.commit({".gitattributes": b""})
    hub.large, hub.seen = {}, type(hub.seen)()
    hub.failures = {"POST /api/models/me/mine/commit": [0] * 3}
    seen = push(adapter, "--push", NAME)
    assert seen.status == 2 and "start again, which resumes" in seen.sentence, seen.printed
    assert repo.branches["main"] == empty
    assert push(adapter, "--push", NAME).status == 0
    assert sum(count for one, count in hub.seen.items() if one.startswith("PUT ")) == 1
    assert "adapter_model.safetensors" in repo.commits[repo.branches["main"]]


def _refused(seen: Seen, words: str) -> None:
    assert seen.status == 2 and words in seen.sentence, seen.printed
    assert "Traceback" not in seen.printed and GOOD_TOKEN not in seen.printed
    assert len(seen.sentence) < 700


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--push", "mine"], "--push is 'mine', but a name on the hub is expected: give OWNER/NAME."),
        (["--push", "./me/mine"], "--push is './me/mine', but a name on the hub is expected"),
        (
            ["--push", "me/mine@a", "--revision", "b"],
            "names a branch, and so does --revision b: leave one of them out.",
        ),
        (["--push", "me/mine@" + "0" * 40], "is a commit, which cannot get another one: give a branch."),
        (["--push", "me/mine", "--branch", "../a"], "--revision is '../a', which is no name of a branch"),
        (["--push", "me/mine", "--commit-message", " "], "--commit-message is empty"),
        (["--push", "me/" + "m" * 97], "is no name on the hub"),
        (["--private"], "--private is for an upload: add --push OWNER/NAME, or leave it out."),
        ([], "is a PEFT adapter already: upload it with --push OWNER/NAME, or merge it with --merged."),
        (["--push", "me/mine", "--merged"], "without --out a whole model is written to a folder before it is uploaded"),
        (["--push", "me/mine", "--step", "3"], "--step is for runs, and "),
    ],
)
def test_what_cannot_be_asked_for(hub: LocalHub, adapter: Path, push: Any, words: list[str], sentence: str) -> None:
    _refused(push(adapter, *words), sentence)
    assert not hub.repos


def test_without_a_token_or_a_network(
    hub: LocalHub, adapter: Path, push: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    _refused(push(adapter, "--push", NAME), "does not accept the token (Invalid credentials in Authorization header")
    monkeypatch.delenv("HF_TOKEN")
    _refused(push(adapter, "--push", NAME), "takes uploads to me/mine with a token alone: set HF_TOKEN to one")
    (tmp_path / "token").write_text(GOOD_TOKEN)  # that of `hf auth login`
    assert push(adapter, "--push", NAME).status == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _refused(push(adapter, "--push", NAME), "HF_HUB_OFFLINE is set, so that nothing can be uploaded to me/mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    _refused(push(adapter, "--push", NAME), "the hub at http://127.0.0.1:9 cannot be reached for me/mine")


def test_repositories_that_are_not_touched(hub: LocalHub, adapter: Path, push: Any) -> None:
    hub.model(NAME, {"config.json": b"{}", "model.safetensors": b"w", "README.md": b"---\ntags: [other]\n---\n"})
    repo = hub.repos["models", NAME]
    held = repo.branches["main"]
    repo.gated = "Access to model mine is restricted."
    _refused(push(adapter, "--push", NAME), "me/mine is gated (Access to model mine is restricted): ask for access on ")
    repo.gated = ""
    _refused(push(adapter, "--push", NAME), "me/mine exists and has config.json, which was not uploaded by rankfold")
    _refused(push(adapter, "--push", NAME, "--private"), "exists and is public, but --private asks for a private one")
    repo.is_foreign = True
    seen = push(adapter, "--push", NAME, "--overwrite")
    _refused(seen, "does not let this token write to me/mine (You have read access but not the required permissions)")
    repo.is_foreign = False
    held = repo.commit(repo.commits[held] | {"README.md": b"---\na: [\n---\n"})
    _refused(push(adapter, "--push", NAME), "README.md of me/mine ")
    assert repo.branches["main"] == held and not hub.messages
    repo.commit(repo.commits[held] | {"README.md": b"My words."})
    assert push(adapter, "--push", NAME, "--overwrite").status == 0
    assert {"config.json", "model.safetensors"}.isdisjoint(repo.commits[repo.branches["main"]])


@pytest.mark.parametrize(
    ("part", "status", "sentence"),
    [
        ("/api/repos/create", 403, "does not let this token write to me/mine"),
        ("/api/repos/create", 402, "does not let this token write to me/mine"),
        ("/preupload/", 413, "takes no files of this size for me/mine: write smaller ones with --max-shard-gb"),
        ("/storage/", 403, "does not let this token write to me/mine"),
        ("/commit/", 412, "me/mine was changed while this upload was under way: start again."),
        ("/commit/", 400, "refuses the upload to me/mine: correct what it names"),
        ("/commit/", 429, "has had too many requests from here (429)"),
        ("/commit/", 500, "answers 500 for me/mine (the hub is under maintenance): start again later"),
    ],
)
def test_statuses(hub: LocalHub, adapter: Path, push: Any, part: str, status: int, sentence: str) -> None:
    hub.statuses = {part: status}
    _refused(push(adapter, "--push", NAME), sentence)
    assert not hub.messages


def test_a_card_that_the_hub_refuses(hub: LocalHub, adapter: Path, push: Any) -> None:
    (adapter / "README.md").write_text("---\nlicense: wrong\n---\n")
    sentence = 'refuses the upload to me/mine ("license" is none of ours): correct what it names'
    _refused(push(adapter, "--push", NAME), sentence)


@pytest.mark.parametrize("answer", [b"<html>Log in</html>", b"{}", b"[]", b"null"])
@pytest.mark.parametrize("part", ["/preupload/", "/commit/", "/objects/batch", "/api/models/", "/api/repos/create"])
def test_answers_of_no_hub(hub: LocalHub, adapter: Path, push: Any, part: str, answer: bytes) -> None:
    hub.answers = {part: answer}
    seen = push(adapter, "--push", NAME)
    assert seen.status == 2 and "me/mine" in seen.sentence, seen.printed
    assert "this is no Hugging Face hub" in seen.sentence or "does not take the upload" in seen.sentence


def test_a_hub_without_xet(hub: LocalHub, adapter: Path, push: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what huggingface_hub uploads by, where hf_xet is installed."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    seen = push(adapter, "--push", NAME)
    _refused(seen, "HF_HUB_DISABLE_XET=1 uses another way to the hub's storage.")
    assert hub.seen[f"GET /api/models/{NAME}/xet-write-token/main"] == 3


def test_a_file_that_does_not_arrive(hub: LocalHub, adapter: Path, push: Any) -> None:
    hub.repos["models", NAME] = repo = Repo(ignored=("adapter_config.json",))
    repo.commit({".gitattributes": b""})
    _refused(push(adapter, "--push", NAME), "lists adapter_config.json without it at ")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("notes.txt", "hf_" + "a" * 34, "notes.txt has an access token of the hub in it: remove it before the upload"),
        ("notes.txt", GOOD_TOKEN, "notes.txt has an access token of the hub in it"),
        ("README.md", "see {home}/data", "README.md names {home}, a folder of this machine"),
        ("x.json", '{{"a": [{{"b": "{folder}"}}]}}', "has '{folder}' in a.b, a path of this machine: correct it"),
        ("adapter_config.json", '{{"base_model_name_or_path": "{folder}"}}', "a path of this machine: correct it"),
        ("adapter_config.json", '{{"base_model_name_or_path": "base"}}', "has 'base' as its base, where others do not"),
        ("manifest.json", "{{}}", "is a checkpoint of rankfold, which other programs do not read"),
        ("config.json", "{{}}", "has an adapter_config.json and a config.json, and it is not clear which"),
    ],
)
def test_what_must_not_leave_this_machine(
    hub: LocalHub, adapter: Path, push: Any, tmp_path: Path, name: str, text: str, sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    values = {"home": str(tmp_path / "home"), "folder": str(tmp_path)}
    (adapter / name).write_text(text.format(**values) if "{" in text else text)
    _refused(push(adapter, "--push", NAME), sentence.format(**values))
    assert not hub.messages


def test_links_and_origins(hub: LocalHub, adapter: Path, place: Workplace, push: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    (adapter / "notes.txt").symlink_to(tmp_path / "secret")
    (adapter / "trainer_state.json").write_text("{}")
    (adapter / "optimizer.pt").write_bytes(b"o")
    (adapter / "tokenizer_config.json").write_text(json.dumps({"name_or_path": str(tmp_path), "a": 1}))
    seen = push(adapter, "--push", NAME)
    assert seen.status == 0 and "notes.txt is not uploaded: it is a link" in seen.printed, seen.printed
    assert "tokenizer_config.json is uploaded without name_or_path" in seen.printed
    repo = hub.repos["models", NAME]
    files = repo.commits[repo.branches["main"]]
    assert set(files) == {
        ".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"
    }  # fmt: skip
    assert json.loads(files["tokenizer_config.json"]) == {"a": 1}
    (adapter / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    _refused(push(adapter, "--push", NAME), "adapter_model.safetensors is a link: copy the file itself there.")
    (adapter / "adapter_model.safetensors").unlink()
    _refused(push(adapter, "--push", NAME), "has no adapter_model.safetensors, so it is not complete: export again.")


def test_a_base_that_only_this_machine_has(
    hub: LocalHub, place: Workplace, push: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_here("pretrain_lora", place.arguments(), capsys).status == 0
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    run = place.options["checkpoint.dir"]
    _refused(push(run, "--push", NAME, "--no-proof"), "give the base's name there with --base-name.")
    assert not hub.repos
    seen = push(run, "--push", NAME, "--no-proof", "--base-name", BASE)
    assert seen.status == 0, seen.printed


def test_convert_pushes_too(
    hub: LocalHub, adapter: Path, place: Workplace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    words = ["merge", "--base", place.model, "--adapter", adapter, "--out", out, "--no-proof", "--push", NAME]
    hub.statuses = {"/commit/": 403}
    seen = run_here("convert", words, capsys)
    _refused(seen, f"The export is in {out}: `rankfold export {out} --push {NAME}` uploads it later.")
    hub.statuses = {}
    seen = run_here("export", [out, "--push", NAME], capsys)
    assert seen.status == 0, seen.printed
    repo = hub.repos["models", NAME]
    files = repo.commits[repo.branches["main"]]
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert "| Merged adapter | a LoRA adapter |" in files["README.md"].decode()
