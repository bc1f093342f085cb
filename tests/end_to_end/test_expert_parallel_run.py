"""Runs of a small mixture of experts that is divided over ranks: certified, resumed on other numbers of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.manifest import MANIFEST, sign
from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.errors import UserError
from tests.faults.checkpoint_damage import HOSTILE
from tests.small_runs.routed_place import put_experts
from tests.support.commands import losses, run_tool
from tests.support.sweeps import sampled
from tests.wrong_inputs.workplace import Workplace, make_place

STEPS, STOP = 6, 3

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Four experts in each layer."""
    place = make_place(tmp_path_factory.mktemp("place") / "place")
    put_experts(place, 4, sees_signs=False)
    place.records(*[{"text": " ".join(["abab", "cab", "bac", "aa bb"][index % 4 :] * 2)} for index in range(16)])
    place.set(
        train__steps=STEPS, train__micro_batch_size=1, train__global_batch_size=4, optim__lr=0.01,
        checkpoint__every=STOP, checkpoint__keep=0, data__seq_length=20,
    )  # fmt: skip
    return place


@pytest.fixture(scope="module")
def whole(place: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, with half of the experts on each."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    place.set(parallel__expert=2, checkpoint__dir=folder)
    result = run_tool("pretrain_lora", *place.arguments(), ranks=2)
    assert "data 2, expert 2; " in result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def cut(place: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two tensor ranks, with half of every expert's inner features on each."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    kept = dict(place.options)
    place.options |= {**CUT, "checkpoint.dir": folder}
    run_tool("pretrain_lora", *place.arguments(), ranks=2)
    place.options = kept
    return folder


CUT: dict[str, object] = {"parallel.expert": 1, "parallel.tensor": 2, "parallel.expert_tensor": 2}


def _masters(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = TrainingCheckpoint(checkpoint_folder(run, STEPS))
    return {name: checkpoint.read_whole(name) for name in checkpoint.tensor_names() if name.startswith("master/")}


@pytest.mark.parametrize(
    ("ranks", "options"),
    sampled(
        [
            (1, {"parallel.expert": 1}),
            (4, {"parallel.expert": 4}),
            (4, {"parallel.expert": 2, "parallel.tensor": 2, "parallel.shard": "parameters"}),
            (2, {"parallel.expert": 1, "parallel.tensor": 2}),
        ],
        [(1, {"parallel.expert": 1})],
    ),
)
def test_a_run_goes_on_with_another_number_of_expert_ranks(
    ranks: int, options: dict[str, object], place: Workplace, whole: Path, tmp_path: Path
) -> None:
    """Steps, losses and weights are those of the run that was not stopped, to rounding."""
    _goes_on(whole, ranks, options, place, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True])
def test_experts_that_were_cut_go_on_whole_and_back(
    back: bool, place: Workplace, cut: Path, whole: Path, tmp_path: Path
) -> None:
    """A run resumes with another expert_tensor on the same tensor ranks: cut experts become whole ones, or whole ones
    are cut over tensor ranks that had no part in them."""
    changed = CUT if back else {**CUT, "parallel.expert_tensor": 1}
    _goes_on(whole if back else cut, 2, changed, place, tmp_path / "run")


def _goes_on(whole: Path, ranks: int, options: dict[str, object], place: Workplace, folder: Path) -> None:
    shutil.copytree(whole, folder)
    for number in range(STOP + 1, STEPS + 1):
        shutil.rmtree(checkpoint_folder(folder, number), ignore_errors=True)
    kept = dict(place.options)
    place.options |= {**options, "checkpoint.dir": folder}
    result = run_tool("pretrain_lora", *place.arguments(), ranks=0 if ranks == 1 else ranks)
    place.options = kept
    assert f"step {STOP}" in result.stdout + result.stderr
    expected, found = losses(whole), losses(folder)
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    masters, others = _masters(whole), _masters(folder)
    assert masters.keys() == others.keys() and len(masters) == 2 * 2 * (1 + 3 * 4)
    for name, value in masters.items():
        assert torch.allclose(others[name], value, rtol=1e-3, atol=1e-5), name


DAMAGES = {
    "bits": ("rank_00001.safetensors", lambda content: content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]),
    "half": ("rank_00001.safetensors", lambda content: content[: len(content) // 2]),
    "manifest": ("manifest.json", lambda content: content.replace(b"experts.3", b"experts.2", 1)),
    "half a manifest": ("manifest.json", lambda content: content[: len(content) // 2]),
}
"""The file of the rank with experts 2 and 3, or what names them; and what is done to it."""


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_on_every_number_of_expert_ranks(
    damage: str, place: Workplace, whole: Path, tmp_path: Path
) -> None:
    name, spoil = DAMAGES[damage]
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = checkpoint_folder(folder, STEPS) / name
    path.write_bytes(spoil(path.read_bytes()))
    kept = dict(place.options)
    for ranks in (2, 4):
        place.options |= {"parallel.expert": ranks, "checkpoint.dir": folder, "train.steps": STEPS + 1}
        result = run_tool("pretrain_lora", *place.arguments(), ranks=ranks, status=1)
        assert any(line.startswith("error: ") and str(path) in line for line in result.stderr.splitlines())
    place.options = kept


EXPERT = re.compile(r"master/layers\.1\.mlp\.experts\.3\.\w+\.lora_[AB]")
NEEDS_EMPTY_MODEL = ("deep", "long_number")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [one for one in HOSTILE if one.__name__ not in NEEDS_EMPTY_MODEL])
def test_a_manifest_that_lies_about_an_experts_pieces_is_refused(
    kind: Callable[..., Any], whole: Path, tmp_path: Path
) -> None:
    """Signed again, so that only what it says of one expert's factor can give it away."""
    sound = checkpoint_folder(whole, STEPS)
    folder = tmp_path / sound.name
    shutil.copytree(sound, folder)
    data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    del data["digest"]
    name = next(filter(EXPERT.fullmatch, sorted(data["tensors"])))
    record = data["tensors"][name]
    assert record["pieces"][0]["file"] == "rank_00001.safetensors"
    text = kind(data, name, record, record["pieces"][0], record["pieces"][0]["file"])
    (folder / MANIFEST).write_bytes(sign(text or json.dumps(data)))
    with pytest.raises(UserError) as caught:
        checkpoint = TrainingCheckpoint(folder)
        for one in checkpoint.tensor_names():
            checkpoint.read_whole(one)
    assert str(folder) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "int8"])
def test_expert_parallel_layouts_are_certified(base: str | None, place: Workplace, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    sections: dict[str, dict[str, object]] = {}
    changes: dict[str, object] = {"parallel.expert": 1, "checkpoint.dir": tmp_path / "run"}
    if base is not None:
        changes["model.base_dtype"] = base
    for name, value in (place.options | changes).items():
        section, _, option = name.partition(".")
        sections.setdefault(section, {})[option] = str(value) if isinstance(value, Path) else value
    import yaml

    sections["lora"]["targets"] = str(sections["lora"]["targets"]).split(",")
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    layouts = {
        "data=2,expert=2": "expert 2, data 2",
        "tensor=2,expert=2": "tensor 2, expert 2",
        "data=2,tensor=2,expert=2,expert_tensor=2": "tensor 2, expert 2, data 2",
    }
    against = [word for text in layouts for word in ("--against", text)]
    result = run_tool("plan", "certify", "--config", path, *against, "--steps", 2, timeout=200)
    for verdict, label in zip(result.stdout.splitlines()[-len(layouts) :], layouts.values(), strict=True):
        assert verdict.startswith(f"certified: one process computes what {label}"), verdict
