"""Snapshots of models: what is downloaded, how it is checked, and what a person is told where the hub refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, scan_cache_dir, snapshot_download

from engine.config.hub import HubName, Need, local_folder, recorded, shown
from engine.errors import UserError
from engine.hub.snapshots import find_snapshot
from tests.hub.conftest import files_of
from tests.hub.local_hub import GOOD_TOKEN, LocalHub, Repo, digest_of
from tests.wrong_inputs.workplace import Workplace

NAME = "tiny-org/tiny"
SHARD, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _download(name: str = NAME, need: Need = "model") -> Path:
    return Path(local_folder(name, download=True, need=need))


def _sharded() -> dict[str, bytes]:
    """Files of a model in two shards, which no test opens as one."""
    index = json.dumps({"weight_map": {"a": SHARD, "b": OTHER}}).encode()
    return {
        "config.json": b"{}", "tokenizer.json": b"[]", "chat_template.jinja": b"{{ 1 }}", SHARD: b"1" * 70_000,
        OTHER: b"2" * 90_000, "model.safetensors.index.json": index,
    }  # fmt: skip


def test_the_files_that_are_needed(hub: LocalHub) -> None:
    """Neither duplicates of the weights nor folders; and the client that others use finds them."""
    more = {
        "pytorch_model.bin": b"pickle",
        "original/consolidated.safetensors": b"c",
        "a.gguf": b"g",
        ".hidden.json": b"h",
    }
    commit = hub.model(NAME, _sharded() | more | {"pytorch_model.bin.index.json": b"{}"})
    folder = _download()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == _sharded()
    assert folder.name == commit and folder.is_relative_to(constants.HF_HUB_CACHE)
    assert recorded(folder) == f"{NAME}@{commit}" and shown(str(folder)) == f"{NAME}@{commit[:12]}"
    assert snapshot_download(NAME, local_files_only=True, allow_patterns=["*.json"]) == str(folder)
    (found,) = scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert found.repo_id == NAME and found.size_on_disk == sum(map(len, _sharded().values()))


def test_a_plan_downloads_the_configuration_alone(hub: LocalHub) -> None:
    hub.model(NAME, _sharded())
    assert [path.name for path in _download(need="config").iterdir()] == ["config.json"]
    assert {path.name for path in _download(need="tokenizer").iterdir()} == {
        "config.json", "tokenizer.json", "chat_template.jinja"
    }  # fmt: skip
    assert find_snapshot(HubName(NAME), download=False, need="model") is None
    assert hub.bytes_sent == 2 + 2 + len(b"{{ 1 }}")


def test_what_is_in_the_cache_is_used(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --download nothing is asked; with it a branch is looked up, and a commit is not."""
    assert local_folder(NAME, download=False) == NAME
    commit = hub.model(NAME, _sharded())
    folder = _download()
    asked = hub.seen.total()
    capsys.readouterr()
    assert local_folder(NAME, download=False) == str(folder)
    assert capsys.readouterr().err == f"{NAME}: commit {commit[:12]} in {constants.HF_HUB_CACHE}\n"
    assert _download(f"{NAME}@{commit}") == folder and hub.seen.total() == asked
    assert _download() == folder and hub.seen.total() == asked + 1
    (folder / OTHER).unlink()
    assert local_folder(NAME, download=False) == NAME
    assert _download() == folder and (folder / OTHER).is_file() and hub.seen.total() == asked + 2


def test_revisions(hub: LocalHub) -> None:
    first = hub.model(NAME, _sharded())
    hub.repos["models", NAME].branches["v1"] = first
    second = hub.model(NAME, _sharded() | {"config.json": b'{"a": 1}'})
    other = hub.model(NAME, _sharded() | {"config.json": b'{"a": 2}'}, branch="refs/pr/1")
    names = {NAME: second, f"{NAME}@v1": first, f"{NAME}@{first}": first, f"{NAME}@refs/pr/1": other}
    for name, commit in names.items():
        assert _download(name).name == commit
        assert Path(local_folder(name, download=False)).name == commit
    with pytest.raises(UserError, match=f"^{NAME} has no revision v2: give a branch, a tag or a commit of "):
        _download(f"{NAME}@v2")


def test_a_folder_of_that_name_comes_first(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.model(NAME, _sharded())
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert local_folder(NAME, download=True) == NAME and not hub.seen


def test_a_cut_connection_is_resumed(hub: LocalHub) -> None:
    """By huggingface_hub itself, from the byte that came last."""
    hub.model(NAME, _sharded())
    hub.cuts[OTHER] = [30_000, 20_000]
    assert (_download() / OTHER).read_bytes() == b"2" * 90_000
    assert sum(hub.seen[f"GET /storage/{digest_of(name, _sharded()[name])}"] for name in (OTHER,)) == 3


def test_the_next_call_resumes(hub: LocalHub) -> None:
    """What an interrupted call has received is not asked for again."""
    hub.model(NAME, _sharded())
    hub.cuts[OTHER] = [50_000] + [0] * 6
    with pytest.raises(UserError, match="cannot be reached for tiny-org/tiny .*start again, which resumes"):
        _download()
    sent = hub.bytes_sent
    assert (_download() / OTHER).read_bytes() == b"2" * 90_000
    assert hub.bytes_sent - sent <= 40_000


def test_other_content_than_listed_is_refused(hub: LocalHub) -> None:
    commit = hub.model(NAME, _sharded())
    for path, kind in (("tokenizer.json", "git's SHA-1"), (OTHER, "SHA-256")):
        data = _sharded()[path]
        hub.sent_instead = {path: b"x" * len(data)}
        with pytest.raises(UserError, match=f"^{path} of {NAME} arrived with {kind} .* it was removed; start again"):
            _download()
        assert find_snapshot(HubName(NAME, commit), download=False, need="model") is None
    hub.sent_instead = {OTHER: b"2" * 100}
    with pytest.raises(UserError, match=f"^{OTHER} of {NAME} arrived with 100 B, but the hub lists 87.9 KiB"):
        _download()
    hub.sent_instead = {}
    assert (_download() / OTHER).read_bytes() == b"2" * 90_000


@pytest.mark.parametrize("path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "C:\\evil.json", "a\nb.json"])
def test_names_outside_of_the_folder(hub: LocalHub, path: str) -> None:
    hub.model(NAME, _sharded() | {path: b"{}"})
    with pytest.raises(UserError, match="lists a file .*, which would be outside of its folder"):
        _download()
    assert not Path(constants.HF_HUB_CACHE, "models--tiny-org--tiny").exists()


def test_a_hostile_index(hub: LocalHub) -> None:
    index = json.dumps({"weight_map": {"a": "../../../evil.safetensors"}}).encode()
    hub.model(NAME, _sharded() | {"model.safetensors.index.json": index})
    with pytest.raises(UserError, match="names '../../../evil.safetensors', which is no weight file of it"):
        _download()


def test_pickles_are_never_opened(hub: LocalHub) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle"}
    hub.model(NAME, files)
    with pytest.raises(UserError, match="has its weights in pytorch_model.bin alone, a pickle, which is never opened"):
        _download()
    hub.model(NAME, {"README.md": b"nothing"})
    with pytest.raises(UserError, match="has no config.json at .*, so it is not a model"):
        _download()


def test_tokens(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.model(NAME, _sharded())
    hub.repos["models", NAME].is_private = True
    with pytest.raises(UserError, match=f"has no model {NAME}, or does not show it without a token: .* set HF_TOKEN"):
        _download()
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    with pytest.raises(UserError, match="does not accept the token .Invalid credentials in") as refused:
        _download()
    assert "hf_wrong" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    assert (_download() / "config.json").is_file()
    assert set(hub.tokens) == {"hf_wrongwrongwrong", GOOD_TOKEN}
    with pytest.raises(UserError, match=f"has no model {NAME}-2, or does not show it"):
        _download(f"{NAME}-2")


def test_gated(hub: LocalHub) -> None:
    hub.model(NAME, _sharded())
    hub.repos["models", NAME].gated = "Access to model tiny is restricted and you must agree to its license."
    page = f"{hub.address}/{NAME}"
    with pytest.raises(UserError) as refused:
        _download()
    assert str(refused.value) == (
        f"{NAME} is gated (Access to model tiny is restricted and you must agree to its license): ask for access on "
        f"{page}, then set HF_TOKEN or run `hf auth login`."
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (429, r"has had too many requests from here \(429\): start again in 17 s, with HF_TOKEN set"),
        (500, "answers 500 for tiny-org/tiny .the hub is under maintenance.: start again later, which resumes"),
        (503, "answers 503 for tiny-org/tiny"),
        (403, "does not allow this with tiny-org/tiny: check the rights of the token"),
        (418, "refuses tiny-org/tiny with status 418"),
    ],
)
def test_statuses(hub: LocalHub, status: int, words: str) -> None:
    hub.model(NAME, _sharded())
    hub.statuses, hub.headers = {"/api/models/": status}, {"Retry-After": "17"}
    with pytest.raises(UserError, match=words):
        _download()


@pytest.mark.parametrize(
    "answer", [b"<html>Log in</html>", b"{}", b"[]", b"null", b"\xff", b'{"id": 1, "siblings": [3]}']
)
def test_answers_of_no_hub(hub: LocalHub, answer: bytes) -> None:
    hub.model(NAME, _sharded())
    hub.answers = {"/api/models/": answer}
    with pytest.raises(UserError, match="this is no Hugging Face hub"):
        _download()


def test_a_status_of_a_file(hub: LocalHub) -> None:
    hub.model(NAME, _sharded())
    hub.statuses = {"/storage/": 500}
    with pytest.raises(UserError, match="answers 500 for tiny-org/tiny"):
        _download()


def test_a_hub_that_is_not_there(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="^the hub at http://127.0.0.1:9 cannot be reached for tiny-org/tiny"):
        _download()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="^HF_HUB_OFFLINE is set, so that tiny-org/tiny cannot be asked for"):
        _download()


def test_room_on_the_disk(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["models", NAME] = repo = Repo()
    repo.commit(_sharded())
    repo.listed = {OTHER: (40_000_000_000_000_000, "0" * 64)}
    with pytest.raises(UserError, match="more than the hub gives over plain HTTP: download it with `hf download"):
        _download()
    repo.listed = {}
    monkeypatch.setattr("engine.hub.download.shutil.disk_usage", lambda _: SimpleNamespace(free=100_000))
    words = "^tiny-org/tiny needs 156.2 KiB more in .*, where 97.7 KiB are free: free some space, or set HF_HOME"
    with pytest.raises(UserError, match=words):
        _download()


def test_an_adapter(hub: LocalHub, place: Workplace) -> None:
    hub.model(NAME, files_of(place.adapter) | {"adapter_model.bin": b"pickle", "checkpoint-1/optimizer.pt": b"p"})
    assert files_of(_download(need="adapter")) == files_of(place.adapter)
    with pytest.raises(UserError, match="has no config.json at .*, so it is not a model"):
        _download()


def test_a_model_without_a_tokenizer(hub: LocalHub) -> None:
    """It is complete without one, and that is known without asking again."""
    files = {path: data for path, data in _sharded().items() if not path.startswith("tokenizer")}
    hub.model(NAME, files)
    folder = _download()
    assert local_folder(NAME, download=False) == str(folder)
    (Path(constants.HF_HUB_CACHE) / "models--tiny-org--tiny" / ".no_exist" / folder.name / "tokenizer.json").unlink()
    assert local_folder(NAME, download=False) == NAME
