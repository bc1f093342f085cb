"""A name on the Hugging Face hub that is not in the cache: every tool says what permits a download."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.distillation import DistillationOptions
from engine.config.hub import HubName, instead_of, looks_like_hub_name, name_of_snapshot, parse_name, recorded
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.config.snapshots import with_snapshots
from tests.wrong_inputs.workplace import Workplace, make_place, run_here

MODEL, DATA = "meta-llama/Llama-3.1-8B", "tatsu-lab/alpaca"
LOAD_MODEL = "cache: add --download, which fetches it."
LOAD_DATA = f"give hub:{DATA}, with --download where it was not downloaded before"
OUT = ["--out", "made"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))  # of other processes
    return make_place(tmp_path / "place")


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("pretrain_lora", ["--model.path", MODEL, "--data.train", "{train}"]),
        ("pretrain_lora", ["--model.path", "{model}", "--data.train", "{train}", "--lora.init_from", MODEL]),
        ("pretrain_lora", ["--model.path", "{model}", "--data.train", "{train}", "--data.tokenizer", MODEL]),
        ("convert", ["import", "--source", MODEL, *OUT]),
        ("convert", ["reshard", "--source", MODEL, "--tensor", "2", *OUT]),
        ("convert", ["export", "--source", MODEL, "--format", "hf", *OUT]),
        ("convert", ["merge", "--base", MODEL, "--adapter", "{adapter}", *OUT]),
        ("convert", ["merge", "--base", "{model}", "--adapter", MODEL, *OUT]),
        ("convert", ["inspect", MODEL]),
        ("generate", ["--model", MODEL, "--prompt", "a"]),
        ("generate", ["--model", "{model}", "--adapter", MODEL, "--prompt", "a"]),
        ("plan", ["memory", "--model", MODEL, "--gpus", "1", "--gpu-memory", "80", "--seq-length", "128"]),
        pytest.param("preprocess", ["{train}", "--tokenizer", MODEL, *OUT], marks=pytest.mark.slow),
        ("export", [MODEL, "--merged", *OUT]),
        ("serve", ["--model", MODEL]),
        ("chat", [MODEL]),
    ],
)
def test_models(tool: str, words: list[str], place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {"model": place.model, "train": place.train, "adapter": place.adapter}
    seen = run_here(tool, [word.format(**paths) for word in words], capsys)
    assert seen.status == 2 and MODEL in seen.sentence and seen.sentence.endswith(LOAD_MODEL), seen.printed
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("pretrain_lora", ["--model.path", "{model}", "--data.train", DATA]),
        ("pretrain_lora", ["--model.path", "{model}", "--data.train", "{train}", "--data.validation", DATA]),
    ],
)
def test_data(tool: str, words: list[str], place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    seen = run_here(tool, [word.format(model=place.model, train=place.train) for word in words], capsys)
    assert seen.status == 2 and LOAD_DATA in seen.sentence, seen.printed


@pytest.mark.parametrize("name", [DATA, f"hub:{DATA}"])
def test_a_store_of_data(name: str, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    seen = run_here("preprocess", [name, "--tokenizer", place.model, *OUT], capsys)
    assert seen.status == 2 and f"give hub:{DATA} as data.train of a run, which tokenises it" in seen.sentence


def test_what_the_cache_lacks_is_named(place: Workplace, tmp_path: Path) -> None:
    commit = "0123456789" * 4
    repository = tmp_path / "cache" / "models--meta-llama--Llama-3.1-8B"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    lacks = f"of which {tmp_path / 'cache'} lacks tokenizer.json and 2 more: add --download, which fetches it"
    assert instead_of(MODEL, "").endswith(lacks)
    assert name_of_snapshot(snapshot) == HubName(MODEL, commit) and recorded(snapshot) == f"{MODEL}@{commit}"
    for other in (snapshot / "a", snapshot.parent, tmp_path / "x" / "snapshots" / commit):
        assert name_of_snapshot(other) is None and recorded(other) == str(other)


def test_paths_are_no_names(place: Workplace) -> None:
    Path("models").mkdir()
    for path in ("models/mine", "./org/name", "/org/name", "../name", "a/b/c", "name", "~/name", "d/train.jsonl", "a/"):
        assert not looks_like_hub_name(path), path
    assert instead_of("models/mine", "correct the path") == ": correct the path"
    for text in ("org/a--b", "org/a..b", "org/name@", "org/name@../x", "org/name@-x", "org/naïve", "org/name.gguf/x"):
        assert parse_name(text) is None, text
    assert parse_name("models/mine") == HubName("models/mine")
    assert parse_name("org/name@refs/pr/1") == HubName("org/name", "refs/pr/1")


def test_the_planner_finds_the_teachers_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the config.json of a snapshot alone, where a planner asks."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--org--teacher", "0123456789abcdef0123456789abcdef01234567"
    (snapshot := repository / "snapshots" / commit).mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    teachers = ("base", "org/teacher", "http://10.0.0.7:8000")
    given = RunConfig(model=ModelOptions(path="nowhere"), distillation=DistillationOptions(teachers=teachers))
    found = with_snapshots(given, model_need="config").distillation.teachers
    assert found == ("base", str(snapshot), "http://10.0.0.7:8000")
