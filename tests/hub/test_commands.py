"""Names on the hub in place of folders in every command, with a hub that answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from engine import api
from tests.hub.conftest import files_of
from tests.hub.local_hub import LocalHub
from tests.wrong_inputs.workplace import Workplace, run_here

MODEL, ADAPTER = "tiny-org/tiny", "tiny-org/adapter"


@pytest.fixture
def commit(hub: LocalHub, place: Workplace) -> str:
    """The commit of the model on the hub; its folder is gone."""
    hub.model(ADAPTER, files_of(place.adapter))
    return hub.model(MODEL, files_of(place.model))


def _train(place: Workplace, capsys: pytest.CaptureFixture[str], *more: str, **options: object) -> str:
    place.set(model__path=MODEL, **options)
    seen = run_here("pretrain_lora", [*place.arguments(), *more], capsys)
    assert seen.status == 0, seen.printed
    return seen.printed


def test_a_run_keeps_its_snapshot(
    hub: LocalHub,
    commit: str,
    place: Workplace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It records name and commit, and resumes with them where the branch has moved; so do exports."""
    printed = _train(place, capsys, "--download")
    assert f"{MODEL}: commit {commit[:12]} in {constants.HF_HUB_CACHE}, " in printed
    assert f"model: {MODEL}@{commit[:12]}, " in printed
    run = Path(place.options["checkpoint.dir"])
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["model"]["path"] == f"{MODEL}@{commit}"
    place.change_config(rms_norm_eps=0.5)
    moved = hub.model(MODEL, files_of(place.model))
    printed = _train(place, capsys, "--hub.download", "true", train__steps=2)
    assert f"{MODEL}@{commit}: commit" in printed and moved[:12] not in printed and "step 2/2" in printed
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["path"] == f"{MODEL}@{commit}"

    place.options["checkpoint.dir"] = run.parent / "other"
    assert f"model: {MODEL}@{moved[:12]}, " in _train(place, capsys, "--download")

    out = run.parent / "adapter"
    words = ["export", "--source", run, "--out", out, "--format", "peft", "--no-proof"]
    seen = run_here("convert", words, capsys)
    assert seen.status == 0, seen.printed
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == MODEL and config["revision"] == commit
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(run.parent / "new cache"))  # as on another machine
    seen = run_here("convert", [*words, "--overwrite"], capsys)
    assert f"the base of {run}" in seen.sentence and "add --download, which fetches it, or give its" in seen.sentence
    assert run_here("convert", [*words, "--overwrite", "--download"], capsys).status == 0


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("convert", ["import", "--source", MODEL, "--out", "{out}"]),
        ("convert", ["export", "--source", MODEL, "--out", "{out}", "--format", "hf", "--no-proof"]),
        ("convert", ["merge", "--base", MODEL, "--adapter", ADAPTER, "--out", "{out}", "--no-proof"]),
        ("convert", ["inspect", ADAPTER]),
        ("generate", ["--model", MODEL, "--adapter", ADAPTER, "--prompt", "a", "--max-new-tokens", "2"]),
        ("export", [ADAPTER, "--base", MODEL, "--merged", "--out", "{out}", "--no-proof"]),
        pytest.param(
            "generate",
            ["--model", "{model}", "--tokenizer", MODEL, "--prompt", "a", "--max-new-tokens", "2"],
            marks=pytest.mark.slow,
        ),
        ("plan", ["memory", "--model", MODEL, "--gpus", "1", "--gpu-memory", "80", "--seq-length", "128"]),
        pytest.param("plan", ["adapters", "--model", MODEL, "--seq-length", "128"], marks=pytest.mark.slow),
        pytest.param("preprocess", ["{train}", "--tokenizer", MODEL, "--out", "{out}"], marks=pytest.mark.slow),
    ],
)
def test_every_command(
    tool: str, words: list[str], commit: str, place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused without --download, done with it, and then without it too."""
    paths = {"model": place.model, "train": place.train, "out": place.folder / "out"}
    words = [word.format(**paths) for word in words]
    assert "add --download, which fetches it" in run_here(tool, words, capsys).sentence
    seen = run_here(tool, [*words, "--download"], capsys)
    assert seen.status == 0, seen.printed
    if tool == "plan":
        (folder,) = Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*")
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        assert f"{MODEL}@{commit[:12]}" in seen.printed
    seen = run_here(
        tool, [*words, *(["--overwrite"] if tool in ("convert", "export") and "--out" in words else [])], capsys
    )
    assert "add --download" not in seen.printed


def test_a_plan_of_a_run_file(commit: str, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    file = place.folder / "run.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": MODEL}, "train": {"global_batch_size": 1}}))
    seen = run_here("plan", ["memory", "--config", file, "--gpu-memory", "80", "--download"], capsys)
    assert seen.status == 0, seen.printed


def test_from_python(hub: LocalHub, commit: str, place: Workplace) -> None:
    options = {"model": {"path": MODEL}, "data": {"train": place.train}, "lora": {"init_from": ADAPTER, "rank": 2}}
    with pytest.raises(
        api.UserError, match="^model.path is tiny-org/tiny, which is not a folder, but looks like a mod"
    ):
        api.load_config(options)
    config = api.load_config(options, hub={"download": True})
    assert Path(config.model.path).name == commit
    assert (Path(str(config.lora.init_from)) / "adapter_model.safetensors").is_file()
    assert api.load_config(options).model == config.model
