"""tools/plan.py certify: layouts of a real small model agree, a fault put into one is found and named, and refusals.

What it compares with is checked on files that stock safetensors wrote, with numbers worked out by hand.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import UserError
from rankfold.certifying.certificate import GRADIENT, LOSS, NORM, PARAMETER, Recording, certificate_config
from rankfold.certifying.command import COARSE, FINE, CertifyOptions, certify
from rankfold.certifying.compare import Recorded, compare
from rankfold.certifying.layouts import Layout, other_layout, own_layout
from rankfold.certifying.ranks import run_layout
from rankfold.certifying.report import Certificate
from tests.end_to_end.test_few_bits_run import MIXED
from tests.support.commands import REPOSITORY, run_tool
from tests.support.few_bits import in_few_bits
from tests.support.shared_data import write_plays
from tests.support.warm_python import warm_python

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

STEPS = 2
DOWN_B = "layers.2.mlp.down_proj.lora_B"
LAYOUTS = {
    "tensor=2": "tensor 2",
    "pipeline=2": "pipeline 2",
    "context=2,shard=optimizer": "context 2, parallel.shard optimizer",
}

DROPS_A_SUM = f"""
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from engine.layers.module import ShardedModule
from rankfold.certifying.worker import main

own = ShardedModule.own

def without_sum(self, name, tensor, spec, *, trainable):
    spec = replace(spec, grad_reduce=()) if name == {DOWN_B!r} else spec
    return own(self, name, tensor, spec, trainable=trainable)

with patch.object(ShardedModule, "own", without_sum):
    main(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict:
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 3000)
    return {
        "model": {"path": str(stories_dir)},
        "lora": {"rank": 4, "dropout": 0.1},
        "data": {"train": str(text), "seq_length": 64},
        "optim": {"lr": 3e-3, "weight_decay": 0.01, "warmup_steps": 2},
        "train": {"steps": 10, "global_batch_size": 4},
    }


@pytest.fixture(scope="module")
def run_file(settings: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process."""
    return write_run(tmp_path_factory.mktemp("run"), settings)


def write_run(folder: Path, settings: dict, **sections: dict) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings | sections), encoding="utf-8")
    return path


def test_every_layout_computes_what_one_process_does(run_file: Path, tmp_path: Path) -> None:
    against = [word for text in LAYOUTS for word in ("--against", text)]
    out = tmp_path / "certificate.json"
    result = run_tool("plan", "certify", "--config", run_file, *against, "--steps", STEPS, "--json", out, timeout=390)
    verdicts = result.stdout.splitlines()[-len(LAYOUTS) :]
    for label, verdict in zip(LAYOUTS.values(), verdicts, strict=True):
        assert verdict.startswith(f"certified: one process computes what {label} does: loss "), verdict
        assert f"[{label}] step {STEPS}/{STEPS}  loss" in result.stderr
    assert "drawn" in result.stdout and "0 gradients" not in result.stdout
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["certified"] and record["limit"] == FINE and record["layout"]["ranks"] == 1
    assert [part["layout"] for part in record["copies"]] == ["one process", *LAYOUTS.values()]
    copies = {part["layout"]: part["looked_at"] for part in record["copies"]}
    # 5 layers of 7 adapters of 2 factors, seen at each step, before the first and after the last
    whole = 70 * (STEPS + 2)
    # over tensor ranks A of the 5 column linears and B of the 2 row linears are whole: half of all; over context ranks
    # all gradients are, and the masters, which are sharded, in no part
    assert copies == dict(zip(copies, (0, whole // 2, 0, 70 * STEPS), strict=True))
    for part in record["comparisons"]:
        assert part["first"] is None and part["zero_gradients"] == []
        assert len(part["tensors"]) == whole and len(part["figures"]) == 2 * STEPS
        assert max(item["relative"] for item in part["figures"]) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "merges, against", [(False, ("tensor=2", "shard=parameters")), (True, ("pipeline=2",))], ids=["beside", "merged"]
)
def test_layouts_of_a_base_in_few_bits(
    merges: bool, against: tuple[str, ...], settings: dict, stories_dir: Path, tmp_path: Path
) -> None:
    """As the checkpoint has it, with adapters beside it or merged into it before it is rounded, on each of them."""
    in_few_bits(stories_dir, tmp_path, MIXED)
    for file in stories_dir.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "hf")
    model, lora = {"path": str(tmp_path / "hf"), "base_dtype": "stored"}, {"rank": 4, "merge_aware": merges}
    run = write_run(tmp_path, settings, model=model, lora=lora)
    wanted = [word for text in against for word in ("--against", text)]
    result = run_tool("plan", "certify", "--config", run, *wanted, "--steps", STEPS, timeout=390)
    assert all(line.startswith("certified: ") for line in result.stdout.splitlines()[-len(against) :])
    assert "are as the checkpoint has them (" in result.stderr
    assert ("merge-aware training" in result.stderr) == merges


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"ensure_weight_tying": True}], ids=["a copy", "one for both"])
@pytest.mark.parametrize("trained", ["lm_head", "embed_tokens"])
def test_every_layout_trains_one_side_of_a_tied_matrix_alike(
    trained: str, changes: dict, settings: dict, tmp_path: Path
) -> None:
    assert json.loads(Path(settings["model"]["path"], "config.json").read_text())["tie_word_embeddings"]
    run_file = write_run(tmp_path, settings, trainable=[trained], lora={**settings["lora"], **changes})
    layouts = ("tensor=2", "pipeline=2", "context=2,shard=parameters")
    against = [word for text in layouts for word in ("--against", text)]
    result = run_tool("plan", "certify", "--config", run_file, *against, "--steps", STEPS, timeout=390)
    assert result.stdout.count("certified: one process computes what") == len(layouts), result.stdout


def test_ranks_import_what_their_starter_does(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may lie where neither an installation nor PYTHONPATH names it."""
    (tmp_path / "nowhere_else.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    worker = tmp_path / "worker" / "worker.py"
    worker.parent.mkdir()
    worker.write_text("import nowhere_else", encoding="utf-8")
    run_layout(own_layout(run_file, 1), tmp_path, steps=1, device="cpu", say=print, worker=worker)


def test_a_sum_that_is_left_out_is_found_and_named(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under two tensor ranks B of a row linear keeps each rank's part of its gradient; nothing else is touched."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr("sys.executable", str(warm_python()))
    worker = tmp_path / "worker.py"
    worker.write_text(DROPS_A_SUM, encoding="utf-8")
    run_file = write_run(tmp_path, settings, parallel={"tensor": 2, "sequence": False})
    certificate = certify(CertifyOptions(config=run_file, steps=1), worker)
    assert not certificate.certified
    (comparison,) = certificate.comparisons
    # B would be zero, and the gradient of A with it
    assert comparison.nonzero == set(certificate.trained)
    first = comparison.first
    assert (first.kind, first.name, first.step) == (GRADIENT, DOWN_B, 1) and first.relative > 0.1
    beyond = [(item.kind, item.name) for item in comparison.tensors if comparison.beyond(item)]
    assert beyond == [(GRADIENT, DOWN_B), (PARAMETER, DOWN_B)]
    own, other = comparison.replicas
    assert {(item.name, item.ranks) for item in own.differing} == {(DOWN_B, (0, 1))} and not other.differing
    (verdict,) = certificate.verdicts()
    assert verdict.startswith(
        "not certified: tensor 2 without sequence parallelism does not compute what one process does: the gradient of "
        f"{DOWN_B} deviates by "
    )
    assert ", alone of 70" in verdict and f"hold different copies of the gradient of {DOWN_B} at step 1" in verdict


def test_status_1_when_a_layout_deviates(run_file: Path, tmp_path: Path) -> None:
    """A limit below all rounding: two data ranks find the numbers of one process, but not their bits."""
    out = tmp_path / "certificate.json"
    arguments = ("--config", run_file, "--against", "data=2", "--steps", 1, "--limit", 1e-12, "--json", out)
    result = run_tool("plan", "certify", *arguments, status=1)
    assert result.stdout.splitlines()[-1].startswith(
        "not certified: one process does not compute what data 2 does: the"
    )
    assert "Traceback" not in result.stderr
    (comparison,) = json.loads(out.read_text(encoding="utf-8"))["comparisons"]
    assert 1e-12 < max(item["relative"] for item in comparison["tensors"] + comparison["figures"]) < FINE


def test_ranks_that_refuse_a_run(settings: dict, tmp_path: Path) -> None:
    """What only reading the data shows is said once, as for training, with the layout that met it."""
    records = tmp_path / "broken.jsonl"
    records.write_text('{"text": "fine"}\n{"text": 3}\n', encoding="utf-8")
    run_file = write_run(tmp_path, settings, data={"train": str(records), "seq_length": 64})
    result = run_tool("plan", "certify", "--config", run_file, "--against", "tensor=2", status=2)
    errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and errors[0].startswith(f"error: {run_file}: {records}"), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"against": ("tensr=2",)}, ["--against 'tensr=2'", "parallel.tensr", "parallel.tensor"]),
        ({"against": ("train.batch=2",)}, ["--against 'train.batch=2'", "train.batch"]),
        ({"against": ("tensor=3,sequence=false",)}, ["--against 'tensor=3,sequence=false'", "heads", "3"]),
        ({"against": ("pipeline=8",)}, ["--against 'pipeline=8'", "5 layers", "8 stages"]),
        ({"against": ("data=8",)}, ["--against 'data=8'", "train.global_batch_size is 4"]),
        ({"against": ("data=0",)}, ["data=0", "data=2"]),
        ({"against": ("tensor",)}, ["'tensor'", "key=value"]),
        ({"against": ("tensor=2,parallel.tensor=4",)}, ["parallel.tensor twice"]),
        ({"against": ("tensor=2", "data=1")}, ["--against 'data=1'", "nothing to compare"]),
        ({}, ["one process", "nothing to compare"]),
        ({"against": ("lora.rank=8",)}, ["does not train the same tensors", "lora_"]),
        ({"against": ("tensor=2,model.dtype=float16",)}, ["model.dtype is float16", "--dtype float32"]),
        ({"steps": 0}, ["--steps is 0"]),
        ({"data": 0}, ["--data is 0"]),
        ({"limit": math.nan}, ["--limit is nan"]),
        ({"json": Path("nowhere", "deep", "out.json")}, ["--json nowhere", "folder that exists"]),
    ],
)
def test_mistakes_are_one_sentence(run_file: Path, changes: dict, words: list[str]) -> None:
    """Found before anything is started."""
    with pytest.raises(UserError) as caught:
        certify(CertifyOptions(config=run_file, **changes), worker=Path("never started"))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_mistake_on_the_command_line(run_file: Path) -> None:
    result = run_tool("plan", "certify", "--config", run_file, "--steps", 0, status=2)
    assert (result.stdout, result.stderr) == ("", "error: --steps is 0: give at least 1.\n")


def test_overrides(run_file: Path) -> None:
    """Lists keep their commas; a layout is called by its sizes and by what else was changed."""
    layout = other_layout(run_file, 2, "pipeline=2,layers_per_stage=[2, 3],memory.recompute=full", "bfloat16")
    parallel = layout.config.parallel
    assert (parallel.pipeline, parallel.layers_per_stage, layout.num_ranks) == (2, (2, 3), 4)
    assert (layout.config.memory.recompute, layout.config.model.dtype) == ("full", "bfloat16")
    assert layout.label == "pipeline 2, data 2, parallel.layers_per_stage [2, 3], memory.recompute full"
    config = certificate_config(layout.config, 10_000)
    # the peak of a warm-up is capped; a gradient of norm 1 has elements of 1e-2, a hundredth of which is 1e-4
    assert (config.optim.lr, config.optim.warmup_steps, config.optim.eps) == (2e-4, 0, pytest.approx(1e-4))


def record(folder: Path, ranks: list[dict[str, tuple]], figures: list[tuple[float, float]]) -> Recording:
    """Files as ranks write them, one step, the same tensors at every moment.

    Args:
        ranks: of each, name -> (values, where they begin in the whole).
        figures: of each rank, loss and norm.
    """
    folder.mkdir()
    for rank, (held, (loss, norm)) in enumerate(zip(ranks, figures, strict=True)):
        tensors = {f"{name}@": values for name, (values, _) in held.items()}
        places = {
            f"{name}@": (name, [(first, first + size) for first, size in zip(begin, values.shape, strict=True)])
            for name, (values, begin) in held.items()
        }
        for moment in ("parameter_00000", "gradient_00001", "parameter_00001"):
            path = folder / f"rank_{rank:05d}.{moment}.safetensors"
            save_file(tensors, path, {"pieces": json.dumps(places)})
        (folder / f"rank_{rank:05d}.json").write_text(json.dumps({LOSS: [loss], NORM: [norm]}), encoding="utf-8")
    return Recording(folder, len(ranks))


@pytest.fixture
def two_layouts(run_file: Path) -> tuple[Layout, Layout]:
    return own_layout(run_file, 1), other_layout(run_file, 1, "tensor=2")


def certificate_of(own: Recorded, other: Recorded, trained: dict[str, tuple[int, ...]]) -> Certificate:
    comparisons = compare(own, [other], trained, steps=1, limit=1e-3)
    return Certificate(layout=own.layout, steps=1, limit=1e-3, device="cpu", trained=trained, comparisons=comparisons)


def test_pieces_make_up_whole_tensors(two_layouts: tuple[Layout, Layout], tmp_path: Path) -> None:
    """Rows of `a` on two ranks, columns of `b`, `c` on both: equal to the whole ones, but for a known error in `b`."""
    a, b, c = torch.arange(12.0).view(4, 3), torch.full((2, 6), 2.0), torch.ones(5)
    off = b.clone()
    off[0, 5] += 0.5
    halves = [
        {"a": (a[:1].clone(), (0, 0)), "b": (off[:, :3].contiguous(), (0, 0)), "c": (c, (0,))},
        {"a": (a[1:].clone(), (1, 0)), "b": (off[:, 3:].contiguous(), (0, 3)), "c": (c, (0,))},
    ]
    whole = {"a": (a, (0, 0)), "b": (b, (0, 0)), "c": (c, (0,))}
    own = Recorded(two_layouts[0], record(tmp_path / "own", [whole], [(4.0, 1.0)]))
    other = Recorded(two_layouts[1], record(tmp_path / "other", halves, [(4.0, 1.0), (4.002, 1.0)]))
    trained = {"c": (5,), "a": (4, 3), "b": (2, 6)}
    certificate = certificate_of(own, other, trained)
    (comparison,) = certificate.comparisons
    found = {(item.kind, item.step, item.name): item.relative for item in comparison.tensors}
    # norms by hand: the difference is 0.5, b with the error has 11 elements of 2 and one of 2.5
    expected = 0.5 / math.sqrt(11 * 4 + 2.5**2)
    assert found == {
        (kind, step, name): pytest.approx(expected) if name == "b" else 0
        for kind, step in ((PARAMETER, 0), (GRADIENT, 1), (PARAMETER, 1))
        for name in trained
    }
    assert [replicas.looked_at for replicas in comparison.replicas] == [0, 3]
    assert not any(replicas.differing for replicas in comparison.replicas)
    loss, norm = comparison.figures
    assert (loss.relative, norm.relative) == (pytest.approx(0.0005), 0)
    assert (
        not certificate.certified
        and "the parameter of b deviates by 7.1e-02 before the first step" in (certificate.verdicts()[0])
    )


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (torch.tensor([3.0, 4.0, 0.0]), None),
        (torch.tensor([3.0, 4.0, 5e-7]), ["ranks 0 and 1 of tensor 2 hold different copies", "apart by 1.0e-07"]),
        (torch.tensor([3.0, 4.0, 0.1]), ["ranks 0 and 1 of tensor 2 hold different copies", "apart by 2.0e-02"]),
        (None, []),
        (torch.tensor([3.0, 4.0, torch.nan]), ["apart by not finite"]),
    ],
)
def test_copies_have_the_same_bits(
    two_layouts: tuple[Layout, Layout], tmp_path: Path, second: Tensor | None, words: list[str] | None
) -> None:
    """Copies that differ are a finding however little they do, since they would drift apart."""
    x = torch.tensor([3.0, 4.0, 0.0])
    held = [{"x": (x, (0,))}, {"x": (second, (0,))} if second is not None else {}]
    own = Recorded(two_layouts[0], record(tmp_path / "own", held[:1], [(4.0, 1.0)]))
    other = Recorded(two_layouts[1], record(tmp_path / "other", held, [(4.0, 1.0)] * 2))
    certificate = certificate_of(own, other, {"x": (3,)})
    assert certificate.certified is not bool(words)
    assert all(word in certificate.verdicts()[0] for word in words or ()), certificate.verdicts()
    json.loads(json.dumps(certificate.record(), allow_nan=False))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"x": (torch.ones(2), (0,))}, "(the ranks of tensor 2 do not hold all of it)"),
        ({}, "(the ranks of tensor 2 do not hold all of it)"),
        ({"x": (torch.tensor([1.0, 1.0, torch.inf]), (0,))}, "cannot be compared"),
        ({"x": (torch.zeros(3), (0,))}, "cannot be compared"),
    ],
)
def test_what_is_missing_or_not_finite(
    two_layouts: tuple[Layout, Layout], tmp_path: Path, held: dict, words: str
) -> None:
    own = Recorded(two_layouts[0], record(tmp_path / "own", [{"x": (torch.ones(3), (0,))}], [(4.0, 1.0)]))
    other = Recorded(two_layouts[1], record(tmp_path / "other", [held], [(4.0, 1.0)]))
    certificate = certificate_of(own, other, {"x": (3,)})
    assert not certificate.certified and words in certificate.verdicts()[0]
    assert "not finite" in certificate.text()
    json.dumps(certificate.record(), allow_nan=False)


def test_gradients_that_prove_nothing_are_named(two_layouts: tuple[Layout, Layout], tmp_path: Path) -> None:
    zero = [{"x": (torch.zeros(3), (0,)), "y": (torch.ones(3), (0,))}]
    own, other = (
        Recorded(layout, record(tmp_path / str(place), zero, [(4.0, 1.0)])) for place, layout in enumerate(two_layouts)
    )
    certificate = certificate_of(own, other, {"x": (3,), "y": (3,)})
    assert certificate.certified
    assert "1 gradients were zero in every step and prove nothing: x" in certificate.text()


def test_coarse_dtypes_have_a_limit_of_their_own() -> None:
    assert FINE < COARSE < 0.7


def test_help() -> None:
    result = run_tool("plan", "certify", "--help")
    assert all(option in result.stdout for option in ("--against", "--steps", "--limit", "--dtype", "--json"))
