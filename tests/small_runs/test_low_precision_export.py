"""Exports of runs in few bits: a merge-aware run's model is the one that is written, an ordinary one's change is
counted, and the run's own rows are read again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from engine.api import export as run_export
from engine.api import load_model
from engine.checkpoint.model_weights import open_source
from engine.choices import ExportDType, QuantMethod
from engine.conversion.import_export import export_hf
from engine.conversion.low_precision.linears import low_precision
from engine.errors import UserError
from tests.small_runs.conftest import SmallRuns
from tests.support.sweeps import portion
from tests.unit.test_checkpoint_source import load_folder
from tests.wrong_inputs.workplace import VOCABULARY, Seen, run_here

TEXTS = [{"text": text} for text in ("abab baba abba", "cab bac abc", "aa bb cc", "bb aa cab")]
PAIRS = [("abab ", "baba"), ("cab ", "bac abc")]


def make_base(
    run: SmallRuns,
    dtype: ExportDType | None,
    method: QuantMethod | None = None,
    model: Callable[..., PreTrainedModel] = lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    **more: Any,
) -> None:
    """Gives the workplace a model whose linears have whole groups, in 16 bits or few; `more` changes its sizes."""
    folder, kept = run.place.model, run.place.folder / "kept"
    kept.mkdir()
    shutil.copy(folder / "tokenizer.model", kept)
    shutil.rmtree(folder)
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **more,
    }  # fmt: skip
    plain = folder if dtype is None else run.place.folder / "plain"
    model(**sizes).to(torch.bfloat16).save_pretrained(plain)
    if dtype is not None:
        source = open_source(plain)
        export_hf(source, folder, low=low_precision(source, dtype, method))
    shutil.copy(kept / "tokenizer.model", folder)
    run.place.records(*TEXTS)
    run.place.set(train__steps=3, lora__targets='["q_proj","v_proj","o_proj","up_proj","down_proj"]', optim__lr=0.02)


def export(run: SmallRuns, *words: Any, status: int = 0) -> Seen:
    out = run.place.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    seen = run_here("export", [str(run.folder), "--merged", "--out", str(out), *map(str, words)], run.capture)
    assert seen.status == status, seen.printed
    return seen


def scores(*, dtype: Any, **given: Any) -> list[float]:
    with load_model(dtype=dtype, **given) as model:
        return [float(one) for score in model.score(PAIRS) for one in score.logps]


@pytest.mark.parametrize(
    ("stored", "method", "base_dtype", "dtype"),
    portion([
        ("nvfp4", None, "stored", "bfloat16"), ("nvfp4", None, "stored", "float32"),
        ("mxfp4", None, "stored", "bfloat16"), ("mxfp8", None, "stored", "bfloat16"),
        ("fp8_block", "fp8", "stored", "bfloat16"), ("int4", None, "stored", "bfloat16"),
        ("int8", None, "stored", "bfloat16"), (None, None, "nvfp4", "bfloat16"), (None, None, "int8", "float32"),
        (None, None, "int4", "bfloat16"),
    ], 3, [("nvfp4", None, "stored", "bfloat16"), (None, None, "int8", "float32")]),
)  # fmt: skip
def test_a_merge_aware_run_is_written_as_it_was_trained(
    run: SmallRuns, stored: ExportDType | None, method: QuantMethod | None, base_dtype: str, dtype: str
) -> None:
    make_base(run, stored, method)
    run(model__base_dtype=base_dtype, lora__merge_aware="true", model__dtype=dtype)
    printed = export(run).printed
    assert f"written in {base_dtype}, in which this merge-aware run computed" in printed
    assert "codes are those that training computed with" in printed and "of the update" not in printed
    out = run.place.folder / "out"
    trained = scores(adapter=run.folder, base_dtype=base_dtype, dtype=dtype)
    assert scores(model=out, base_dtype="stored", dtype=dtype) == trained
    assert scores(model=run.place.model, dtype=dtype) != trained
    if stored is not None:
        before, after = load_folder(run.place.model), load_folder(out)
        assert {name: (one.shape, one.dtype) for name, one in before.items()} == {
            name: (one.shape, one.dtype) for name, one in after.items()
        }
        codes = "model.layers.0.self_attn.{}.weight" + ("_packed" if stored in ("nvfp4", "mxfp4", "int4") else "")
        as_bytes = [
            [one[codes.format(leaf)].view(torch.uint8) for leaf in ("q_proj", "k_proj")] for one in (before, after)
        ]
        assert not torch.equal(as_bytes[0][0], as_bytes[1][0]) and torch.equal(as_bytes[0][1], as_bytes[1][1])
        configs = [json.loads((folder / "config.json").read_text()) for folder in (run.place.model, out)]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def phi3(**sizes: Any) -> Phi3ForCausalLM:
    """A model whose queries, keys and values, and gate and up, are one matrix each."""
    return Phi3ForCausalLM(Phi3Config(pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


@pytest.mark.parametrize(
    ("base_dtype", "sizes", "left"),
    [
        ("int4", {"head_dim": 24}, ["o_proj"]), ("nvfp4", {"intermediate_size": 168}, ["down_proj"]),
        ("mxfp4", {"intermediate_size": 144}, ["down_proj"]), ("mxfp8", {"intermediate_size": 144}, ["down_proj"]),
        ("fp8_block", {"head_dim": 24}, []),
        ("fp8_block", {"model": phi3, "hidden_size": 192}, ["qkv_proj"]),
        ("nvfp4", {"model": phi3}, []),
    ],
)  # fmt: skip
def test_what_no_reader_takes_as_codes_is_written_as_its_numbers(
    run: SmallRuns, base_dtype: str, sizes: dict[str, Any], left: list[str]
) -> None:
    """Those that training computed with, beside codes of the other linears."""
    make_base(run, None, **sizes)
    run(model__base_dtype=base_dtype, lora__merge_aware="true", model__dtype="bfloat16")
    printed = export(run).printed
    assert "codes are those that training computed with" in printed
    assert ("rounded as in training and stored as numbers" in printed) == bool(left), printed
    assert "logits not compared" in printed or "checked with transformers" in printed
    out = run.place.folder / "out"
    trained = scores(adapter=run.folder, base_dtype=base_dtype, dtype="bfloat16")
    for read in ("stored", None):
        assert scores(model=out, base_dtype=read, dtype="bfloat16") == trained
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    tensors = load_folder(out)
    for leaf in left:
        assert any(leaf in module for module in ignored)
        assert tensors[next(name for name in tensors if name.endswith(f"{leaf}.weight"))].dtype == torch.bfloat16


def test_an_ordinary_run_keeps_what_does_not_fit_unrounded(run: SmallRuns) -> None:
    make_base(run, None, head_dim=24)
    run(model__base_dtype="int4")
    printed = export(run, "--dtype", "int4").printed
    assert "2 linears left as they are and stored as numbers" in printed and "checked with transformers" in printed
    report = json.loads((run.place.folder / "out" / "merge_report.json").read_text())["tensors"]
    assert report["layers.0.attention.o_proj.weight"]["relative_error"] < 5e-3  # of 16 bits
    assert report["layers.0.attention.q_proj.weight"]["relative_error"] > 2e-2  # of 4


def test_an_ordinary_runs_change_is_counted(run: SmallRuns) -> None:
    make_base(run, "nvfp4")
    run(model__base_dtype="stored")
    printed = export(run, "--dtype", "stored", "--evaluate", run.place.train).printed
    pattern = (
        r"keeps (\d+)% of the update in the median linear, with an error of (\d+)% of its norm, and least in (\S+),"
    )
    found = re.search(pattern, printed)
    assert found is not None, printed
    losses = re.search(r"evaluation loss (\S+) before rounding, (\S+) after \((\S+)\), over 4 rows", printed)
    assert losses is not None and "rounding to the base's format moves logits by" in printed
    out = run.place.folder / "out"
    report = json.loads((out / "merge_report.json").read_text())["tensors"]
    kept = {name: one["update_kept"] for name, one in report.items() if "update_kept" in one}
    assert len(kept) == 10 and 0 < min(kept.values()) < 1
    assert min(kept, key=lambda name: kept[name]) == found[3]
    # by hand, of one of them: the stored change along the wanted one
    adapter = run.place.folder / "adapter out"
    seen = run_here("export", [str(run.folder), "--out", str(adapter)], run.capture)
    assert not seen.status, seen.printed
    name = "layers.1.mlp.up_proj"
    stored = load_file(adapter / "adapter_model.safetensors")
    a, b = (next(one for key, one in stored.items() if f"1.mlp.up_proj.lora_{leaf}." in key) for leaf in "AB")
    wanted = 2 * b.double() @ a.double()
    before, after = (open_source(folder).read_whole(f"{name}.weight").double() for folder in (run.place.model, out))
    assert kept[f"{name}.weight"] == pytest.approx(
        float(((after - before) * wanted).sum() / wanted.norm() ** 2), rel=0.1
    )


def test_adapters_and_programs_export_in_few_bits(run: SmallRuns) -> None:
    """A PEFT adapter beside its base, the run by the command, and the run by a Python program are one model."""
    make_base(run, None)
    run()
    adapter, merged, folder = (run.place.folder / name for name in ("peft", "merged", "by program"))
    export(run, "--dtype", "int8")
    for words in (["--out", adapter], ["--merged", "--dtype", "int8", "--base", run.place.model, "--out", merged]):
        source = run.folder if len(words) == 2 else adapter
        seen = run_here("export", [str(source), *map(str, words)], run.capture)
        assert not seen.status, seen.printed
    assert "checked with transformers, decoding" in seen.printed
    run_export(run.folder, folder, format="hf", dtype="int8")
    ours = load_folder(run.place.folder / "out")
    for other in (merged, folder):
        for key, tensor in load_folder(other).items():
            assert torch.equal(tensor, ours[key]), key
    with pytest.raises(UserError, match="dtype int8 is for a whole model"):
        run_export(run.folder, run.place.folder / "no", dtype="int8")


def test_a_runs_rows_choose_scales_and_measure_losses(run: SmallRuns) -> None:
    make_base(run, None)
    said = run(data__validation=run.place.train)
    plain = export(run, "--dtype", "int4", "--evaluate", "validation").printed
    calibrated = export(run, "--dtype", "int4", "--calibrate", 3, "--evaluate", "validation").printed
    assert "calibrated on 3 rows of" in calibrated and "calibrated" not in plain
    pattern = r"evaluation loss (\S+) before rounding, (\S+) after"
    found = [re.search(pattern, printed) for printed in (plain, calibrated)]
    assert found[0] is not None and found[1] is not None
    assert found[0][1] == found[1][1] and found[0][2] != found[1][2]
    # the loss before is that of the training's own evaluation
    trained = re.findall(r"evaluation loss (\d+\.\d+)", said)
    assert float(found[0][1]) == pytest.approx(float(trained[-1]), abs=2e-4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dtype", "stored"], "--dtype stored keeps the base's format, and"),
        (["--dtype", "int8", "--evaluate", "validation"], "--evaluate is validation, and the run has no"),
        (["--dtype", "int8", "--evaluate", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--dtype", "stored", "--calibrate", 4], "--calibrate chooses scales, and --dtype stored keeps"),
    ],
)
def test_wrong_options_are_one_sentence(run: SmallRuns, words: list[Any], sentence: str) -> None:
    run.place.records(*TEXTS)
    run()
    seen = export(run, *words, status=2)
    assert sentence in seen.sentence and "\n" not in seen.sentence.strip()
    assert not (run.place.folder / "out").exists()
