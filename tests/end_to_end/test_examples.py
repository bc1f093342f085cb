"""The configurations of examples/ run as they are, on a small model: what trains is what they say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import REPOSITORY, losses, options, run_tool

pytestmark = pytest.mark.timeout(300)

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    """What a user names on the command line, and sizes for a test."""
    folder = tmp_path_factory.mktemp("data")
    corpus = (data_dir / "corpus" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    pieces = [corpus[start : start + 120] for start in range(0, 6000, 120)]
    for name, part in (("train", pieces[:40]), ("valid", pieces[40:44])):
        text = "".join(json.dumps({"text": piece}) + "\n" for piece in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {
        "model.path": stories_dir, "data.train": folder / "train.jsonl", "data.validation": folder / "valid.jsonl",
        "data.seq_length": 128, "train.epochs": "null", "train.steps": 6, "train.global_batch_size": 4,
        "optim.warmup_steps": 0, "train.eval_every": 0, "log.peak_tflops": 0,
    }  # fmt: skip


def _evaluations(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["eval_loss"] for record in records if "eval_loss" in record]


def test_lm_head_only(small: dict[str, object], stories_dir: Path, tmp_path: Path) -> None:
    """Only the head differs in the exported model; the held-out loss falls."""
    run, out = tmp_path / "run", tmp_path / "tuned"
    config = EXAMPLES / "lm_head_only" / "lm_head.yaml"
    untied = _untied(stories_dir, tmp_path / "untied")
    own = {**small, "model.path": untied, "model.dtype": "float32", "optim.lr": 1e-3, "checkpoint.dir": run}
    run_tool("pretrain_lora", "--config", config, *options(own))
    found = _evaluations(run)
    assert found[-1] < found[0]
    run_tool("convert", "export", "--source", run, "--out", out, "--format", "hf", "--no-proof")
    before, after = load_file(untied / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["lm_head.weight"]


def _untied(source: Path, folder: Path) -> Path:
    """The model with a head of its own, as large models have it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    head = model.lm_head.weight.detach().clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)
    for file in source.iterdir():
        if "token" in file.name and not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["lora", "nf4"])
def test_llama3_8b_one_gpu(name: str, small: dict[str, object], tmp_path: Path) -> None:
    """As written, in bfloat16; at a learning rate that shows within six steps of a small model."""
    run = tmp_path / "run"
    config = EXAMPLES / "llama3_8b_one_gpu" / f"{name}.yaml"
    run_tool("pretrain_lora", "--config", config, *options({**small, "optim.lr": 5e-3, "checkpoint.dir": run}))
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    found = _evaluations(run)
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("name", "lr", "changed"),
    [
        ("minicpm_v", 3e-3, ("embed_tokens", "k_proj", "o_proj", "q_proj", "resampler", "v_proj")),
        ("cogvlm", 1e-2, ("vision_expert_query_key_value",)),
        ("qwen_vl", 1e-2, ("_proj.", "visual.merger")),
        ("qwen3_5", 1e-2, ("_proj", "visual.merger")),
        ("minicpm_v_4_6", 1e-2, ("_proj", "model.merger")),
        ("omnilmm", 3e-3, ("k_proj", "o_proj", "q_proj", "resampler", "v_proj")),
    ],
)
def test_images(name: str, lr: float, changed: tuple[str, ...], tmp_path: Path) -> None:
    """What run.yaml says trains, and nothing else: the merged model has the released names, and differs there alone."""
    from examples.cogvlm import make_small as cogvlm
    from examples.minicpm_v import make_small as minicpm_v
    from examples.minicpm_v_4_6 import make_small as minicpm_v_4_6
    from examples.omnilmm import make_small as omnilmm
    from examples.qwen3_5 import make_small as qwen3_5
    from examples.qwen_vl import make_small as qwen_vl

    makers = {
        "minicpm_v": minicpm_v, "cogvlm": cogvlm, "omnilmm": omnilmm, "qwen_vl": qwen_vl, "qwen3_5": qwen3_5,
        "minicpm_v_4_6": minicpm_v_4_6,
    }  # fmt: skip
    makers[name].write(tmp_path / "in")
    _check_what_trains(name, tmp_path, lr, changed)


def test_mixture(tmp_path: Path) -> None:
    """Experts and attention, and no router."""
    from examples.qwen3_30b_a3b.make_small import write

    write(tmp_path / "in")
    _check_what_trains("qwen3_30b_a3b", tmp_path, 1e-2, ("experts.7.gate_proj", "self_attn", ".experts."))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        pytest.param("model", ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), marks=pytest.mark.slow),
        ("mixture", ("experts.7.gate_proj", "experts.7.down_proj", "self_attn", "shared_experts", "mlp.")),
        pytest.param("images", (".experts.", "self_attn", "visual.merger"), marks=pytest.mark.slow),
    ],
)
def test_types_without_a_family(name: str, changed: tuple[str, ...], tmp_path: Path) -> None:
    """Linears of the layers and, as asked, experts and the merger of images; no router and no norm."""
    from examples.released_yesterday.make_small import write

    folder = tmp_path / "in"
    write(folder)
    records = folder / "pictures" if name == "images" else folder
    _check_what_trains("released_yesterday", tmp_path, 1e-2, changed, f"{name}.yaml", folder / name, records)


def test_low_precision(tmp_path: Path) -> None:
    """The merged checkpoint has the tensors of the one before, other codes, and, read by transformers, the loss that
    the run reported; logits are in bfloat16, and the data's means of each are over other orders of the same tokens."""
    pytest.importorskip("compressed_tensors")
    from examples.low_precision import compare, make_small

    make_small.write(tmp_path / "in")
    run, out, model = tmp_path / "run", tmp_path / "merged", tmp_path / "in" / "model"
    data = {name: tmp_path / "in" / f"{name}.json" for name in ("train", "validation")}
    own = {
        "model.path": model, "data.train": data["train"], "data.validation": data["validation"],
        "data.seq_length": 128, "optim.lr": 1e-2, "train.steps": 4, "train.micro_batch_size": 2,
        "train.global_batch_size": 4, "train.eval_every": 0, "checkpoint.dir": run,
    }  # fmt: skip
    run_tool("pretrain_lora", "--config", EXAMPLES / "low_precision" / "run.yaml", *options(own))
    run_tool("convert", "export", "--source", run, "--out", out, "--format", "hf", "--merge")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: (one.dtype, one.shape) for name, one in before.items()} == {
        name: (one.dtype, one.shape) for name, one in after.items()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.endswith((compare.CODES, "weight_scale")) for name in changed), sorted(changed)
    first, *_, last = _evaluations(run)
    assert last < first
    for folder, loss in ((model, first), (out, last)):
        assert compare.answer_loss(folder, data["validation"]) == pytest.approx(loss, rel=5e-3)


def _check_what_trains(
    name: str,
    tmp_path: Path,
    lr: float,
    changed: tuple[str, ...],
    config: str = "run.yaml",
    model: Path | None = None,
    records: Path | None = None,
) -> None:
    """Runs `config` on the model and records in `tmp_path`/in: the merged model differs where one of `changed` is."""
    run, out, model = tmp_path / "run", tmp_path / "merged", model or tmp_path / "in" / "model"
    records = records or tmp_path / "in"
    own = {
        "model.path": model, "model.dtype": "float32", "data.train": records / "train.json",
        "data.validation": records / "validation.json", "data.seq_length": 192, "optim.lr": lr,
        "optim.schedule": "constant", "optim.warmup_ratio": "null", "train.epochs": "null", "train.steps": 6,
        "train.micro_batch_size": 8, "train.eval_every": 0, "parallel.tensor": 1, "checkpoint.dir": run,
    }  # fmt: skip
    run_tool("pretrain_lora", "--config", EXAMPLES / name / config, *options(own))
    found = _evaluations(run)
    assert found[-1] < found[0]
    run_tool("convert", "export", "--source", run, "--out", out, "--format", "hf", "--merge")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved and all(any(part in key for part in changed) for key in moved), sorted(moved)
    assert all(any(part in key for key in moved) for part in changed), sorted(moved)
