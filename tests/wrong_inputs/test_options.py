"""Wrong options, files of options, adapters to start from, world sizes and places: one sentence, at once."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.run_files import FILES, FOLDERS, REFERENCE, REPORT
from tests.support.commands import REPOSITORY
from tests.wrong_inputs.workplace import Workplace

Refused = Callable[..., None]

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"model.pth": "x"}, "--model.pth is not an option: did you mean --model.path"),
    ({"lora.targets": "w_proj"}, "lora.targets contains 'w_proj', which matches no module"),
    ({"lora.targets": "(q"}, "'(q', which is not a valid regular expression"),
    ({"trainable": "foo"}, "trainable contains 'foo', which matches no module"),
    ({"trainable": "layers.0.attention.q_proj"}, "is in lora.targets and in trainable"),
    ({"lora.rank": "two"}, "lora.rank is 'two', but a whole number is expected"),
    ({"lora.rank": 0}, "nothing would be trained"),
    ({"parallel.tensor": 2}, "The run has 1 rank and parallel.tensor 2"),
    ({"parallel.pipeline": 3}, "parallel.pipeline 3 x parallel.context 1 needs a multiple of 3"),
    ({"train.global_batch_size": 3, "train.micro_batch_size": 2}, "not a multiple of train.micro_batch_size 2"),
    ({"train.global_batch_size": 10**9}, "is 1,000,000,000 rows, but at most 1,048,576 are expected"),
    ({"data.share_prefixes": "true"}, "is true, but with data.packing false a row holds one document: set data.share"),
    ({"data.share_prefixes": "true", "data.packing": "concatenate"}, "but with data.packing concatenate a row is"),
    ({"data.share_prefixes": "often"}, "data.share_prefixes is 'often', but"),
    ({"train.steps": "1e99"}, "train.steps is '1e99', but a whole number"),
    ({"train.seed": 1.5}, "train.seed is '1.5', but a whole number"),
    ({"train.eval_every": 5}, "data.validation is not set, so there is nothing to evaluate"),
    ({"optim.lr": "nan"}, "optim.lr is 'nan', but a number is expected"),
    ({"optim.lr": 1e300}, "optim.lr is 1e+300, but at most 3.4e+38 is expected"),
    ({"optim.lr_pattern": "{v_prj: 1e-4}"}, "optim.lr_pattern has 'v_prj', but nothing that trains has this name"),
    ({"optim.lr_pattern": "{vision: 1e-4}"}, "optim.lr_pattern has 'vision', but nothing that trains has this name"),
    ({"optim.lr_pattern": "{layers: 0}"}, "optim.lr_pattern of layers is 0.0, but it must be a number above 0"),
    ({"optim.lr_pattern": "{1: 1e-4}"}, "optim.lr_pattern contains 1, but names of modules are expected"),
    ({"optim.lr_pattern": "0.1"}, "optim.lr_pattern is '0.1', but"),
    ({"train.steps": 10**30}, "but at most 2,147,483,647 is expected"),
    ({"lora.rank": 10**18}, "but at most 2,147,483,647 is expected"),
    ({"data.mix": '["a.jsonl=1e308"]'}, "but a weight from 1e-6 to 1e6 is expected"),
    ({"data.mix": '["a.jsonl=1e-308"]'}, "but a weight from 1e-6 to 1e6 is expected"),
    ({"optim.warmup_steps": 100}, "optim.warmup_steps is 100 and train.steps is 1"),
    (
        {"optim.warmup_steps": 4, "train.steps": None, "train.epochs": 1},
        "and train.epochs is 1, which is 3 steps, so",
    ),
    ({"train.early_stopping_patience": 2}, "train.eval_every is 0, so that there are no evaluations to stop after"),
    (
        {"train.early_stopping_min_delta": 0.1},
        "train.early_stopping_patience is null, so that nothing would stop early",
    ),
    ({"checkpoint.keep_best": "true"}, "so that no checkpoint is better than another"),
    ({"model.dtype": "fp64"}, "model.dtype is 'fp64', but one of float32, bfloat16, float16 is expected"),
    ({"checkpoint.resume": "nowhere"}, "checkpoint.resume is nowhere, which is not a folder"),
    ({"checkpoint.resume": "/"}, "has no complete checkpoint under checkpoints/"),
    ({"data.packing": "concatenate", "objective.name": "dpo"}, "which would split"),
    ({"config": "nowhere.yaml"}, "nowhere.yaml cannot be read (No such file or directory)"),
    ({"checkpoint.dir": ""}, "checkpoint.dir is empty"),
    ({"checkpoint.dir": "/proc/nowhere"}, "/proc/nowhere cannot be written (No such file or directory)"),
    ({"checkpoint.dir": "/tmp/" + "a" * 300}, "cannot be written (File name too long)"),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda value: str(value)[:60])
def test_options(options: dict[str, Any], words: str, place: Workplace, refused: Refused):
    place.options |= options
    refused(words)


DEVICE: list[tuple[dict[str, Any], str]] = [
    ({"optim.backend": "apex"}, "FusedAdam runs on a GPU"),
    ({"memory.cuda_graph": "step", "data.packing": "true"}, "CUDA graphs need a GPU"),
    ({"memory.offload_activations": "true"}, "whose memory is the host's already"),
    ({"model.kernels": "triton"}, "TRITON_INTERPRET=1"),
    ({"model.kernels": "triton", "model.dtype": "bfloat16"}, "is right in float32, not in torch.bfloat16"),
    ({"model.kernels": "apex"}, "apex runs on a GPU, not on cpu"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU could do some of it")
@pytest.mark.parametrize(("options", "words"), DEVICE, ids=lambda value: str(value)[:60])
def test_what_the_device_cannot_do(
    options: dict[str, Any], words: str, place: Workplace, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before the data, which may take hours to read, is opened at all."""
    monkeypatch.setattr("engine.training.prepare.build_data", lambda *_: pytest.fail("data was read first"))
    monkeypatch.setattr("engine.ops.backends._interprets", lambda: False)  # kernel tests of this process turn it on
    place.options |= options
    refused(words)


def test_the_metrics_file_may_not_be_another(place: Workplace, refused: Refused) -> None:
    """Every name that a run uses in its folder, and what a file system may take for it."""
    names = [*FILES, *FOLDERS, REPORT, "Run.Lock", "CHECKPOINTS", "run.lock.", "config.yaml.tmp", ".run.lock.x"]
    for name in [*names, f"{REFERENCE}train.safetensors"]:
        place.set(log__metrics=name)
        refused(f"log.metrics is {name!r}, a name that the run's folder needs for something else")


def test_names_in_the_folder_are_written_in_one_place() -> None:
    """So that the list of them, which the test above goes through, cannot lack one that is in use."""
    for path in (REPOSITORY / "engine").rglob("*.py"):
        if path.name != "run_files.py" and {"training", "telemetry", "distributed", "checkpoint"} & {*path.parts}:
            written = re.findall(r"[\"/]([a-z_]+(?:\.[a-z]+)?)\"", path.read_text(encoding="utf-8"))
            assert not {*written} & {*FILES, *FOLDERS, REPORT}, path


YAML: list[tuple[bytes, str]] = [
    (b"", "is empty, but a mapping of sections is expected"),
    (b"- a\n", "holds a list, but sections such as"),
    (b"modell: {}\n", "has the unknown key modell: did you mean model"),
    (b"lora: {ranks: 3}\n", "has the unknown key lora.ranks: did you mean lora.rank"),
    (b"lora: {rank: 3, rank: 4}\n", "has the key rank a second time in line 1"),
    (b"lora:\n\trank: 3\n", "is not valid YAML in line 2"),
    (b"lora: 3\n", "gives lora the value 3, but lora is a section"),
    (b"lora: {dropout: much}\n", "lora.dropout is 'much', but a number is expected"),
    (b"lora: {exclude: q_proj}\n", "lora.exclude is 'q_proj', but a list of names is expected"),
    (b"lora: {[1, 2]: 3}\n", "has a key that is no name in line 1"),
    (b"lora: !!python/object/apply:os.system [ls]\n", "but lora is a section"),
    (bytes(range(256)), "is not UTF-8 text"),
    (b"[" * 5000, "is nested too deeply"),
    (b"lora: &a {targets: *a}\n", "has a value in line 1 that holds itself"),
    (
        b"lora: {targets: ["
        + b", ".join(b"&a%d [%s]" % (at, b", ".join([b"*a%d" % (at - 1)] * 9)) for at in range(1, 9)).replace(
            b"*a0", b"x"
        )
        + b"]}\n",
        "stands for more than 100,000 values",
    ),
    (b"#" * (1 << 20) + b"\n", "has 1,048,577 characters, too many for a configuration"),
    (b"train: {steps: 2001-99-99}\n", "train.steps is"),
    (b"train: {steps: " + b"9" * 5000 + b"}\n", "has a number of 5,000 digits in line 1"),
]


@pytest.mark.parametrize(("text", "words"), YAML, ids=lambda value: str(value)[:40])
def test_files_of_options(text: bytes, words: str, place: Workplace, refused: Refused):
    file = place.folder / "run.yaml"
    file.write_bytes(text)
    place.options = {"config": file, **place.options}
    refused(words)


@pytest.mark.parametrize(
    ("world", "options", "words"),
    [
        (3, {"parallel.tensor": 2}, "The run has 3 ranks and parallel.tensor 2"),
        (5, {"train.global_batch_size": 4}, "1 x 5 data-parallel ranks: use for example train.global_batch_size 5"),
        (4, {"parallel.pipeline": 2, "parallel.context": 4}, "needs a multiple of 8"),
        (2, {"parallel.expert": 4}, "stage has 2 data, context and tensor parallel ranks to divide"),
        (
            4,
            {"parallel.tensor": 2, "parallel.expert": 4, "parallel.expert_tensor": 2},
            "a pipeline stage has 2 data and context parallel ranks to divide experts over: use a parallel.expert that",
        ),
        (
            2,
            {"parallel.tensor": 2, "parallel.expert_tensor": 1, "parallel.sequence": "false", "data.seq_length": 15},
            "do not divide over parallel.tensor 2 before whole experts: make data.seq_length a multiple of 2",
        ),
        (
            4,
            {"parallel.tensor": 4, "parallel.expert_tensor": 2},
            "whole or divided over all tensor ranks: use 1, 4, or",
        ),
    ],
)
def test_world_sizes(
    world: int, options: dict[str, Any], words: str, place: Workplace, refused: Refused, monkeypatch: pytest.MonkeyPatch
):
    """Known before the ranks look for each other."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    place.options |= options
    refused(words)


ADAPTER_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "PREFIX_TUNING"}, "has peft_type 'PREFIX_TUNING': expected LORA"),
    ({"r": "two"}, "has r 'two': expected a whole number of at least 1"),
    ({"r": 0}, "has r 0: expected a whole number"),
    ({"r": 4}, "has rank 2 at layers.0.attention.q_proj, but adapter_config.json says r 4"),
    ({"lora_alpha": [4]}, "lora_alpha [4]"),
    ({"lora_alpha": 8}, "multiplied by 4: set lora.alpha to 8"),
    ({"use_rslora": True}, "lora.rslora to true"),
    ({"rank_pattern": [1]}, "rank_pattern [1]: expected an object"),
    ({"rank_pattern": {"q_proj": "x"}}, "'x' for 'q_proj' in rank_pattern"),
    ({"rank_pattern": {"(q": 3}}, "'(q' in rank_pattern, which is no expression"),
    ({"rank_pattern": {"(([a-z_.0-9])+)+!": 8}, "r": 3}, "has rank 2 at layers.0.attention.q_proj, but"),
    ({"alpha_pattern": {"(.*.*)*!": 8.0}, "r": 3}, "has rank 2 at layers.0.attention.q_proj, but"),
    ({"alpha_pattern": {"(" * 3000 + ")" * 3000: 8.0}}, "which is no expression that can be matched (it nests too"),
    ({"rank_pattern": {"a{99999999999}": 8}}, "no expression that can be matched (a repetition number is too large)"),
    ({"rank_pattern": {"q_proj": 10**400}}, "a number of many digits for 'q_proj' in rank_pattern"),
    ({"r": 10**400}, "has r a number of many digits: expected a whole number"),
    ({"lora_alpha": 10**400}, "has lora_alpha a number of many digits: expected a number"),
    ({"lora_alpha": True}, "has lora_alpha true: expected a number"),
    ({"lora_dropout": "x"}, "has lora_dropout 'x': expected a number"),
    ({"lora_dropout": []}, "has lora_dropout []: expected a number"),
    ({"lora_dropout": 10**400}, "has lora_dropout a number of many digits: expected a number"),
    ({"use_rslora": "false"}, "has use_rslora 'false': expected true or false"),
    ({"bias": "all"}, "bias 'all', which is not supported"),
    ({"layer_replication": [[0, 1]]}, "layer_replication [[0, 1]], which is not supported"),
    ({"use_qalora": True}, "use_qalora true, which is not supported"),
    ({"use_something_new": True}, "use_something_new true, which is not supported"),
]


@pytest.mark.parametrize(("changes", "words"), ADAPTER_CONFIGS, ids=lambda value: str(value)[:50])
def test_adapter_configs(changes: dict[str, Any], words: str, place: Workplace, refused: Refused):
    place.set(lora__init_from=place.adapter)
    place.change_config(place.adapter / "adapter_config.json", **changes)
    refused(words)


FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Workplace], None]:
    return lambda place: place.change_tensors(change, place.adapter / WEIGHTS)


def _factor(value: torch.Tensor) -> Callable[[Workplace], None]:
    return _tensors(lambda tensors: tensors.update({FACTOR: value}))


def _elsewhere(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("layers.1", "layers.7")] = tensors.pop(name)


ADAPTERS: dict[str, tuple[Callable[[Workplace], Any], str]] = {
    "other targets": (lambda place: place.set(lora__targets="v_proj"), "asks for layers.0.attention.v_proj, which the"),
    "no config": (lambda place: (place.adapter / SETTINGS).unlink(), "has no adapter_config.json"),
    "config no JSON": (lambda place: (place.adapter / SETTINGS).write_text("{"), "config.json is not valid JSON"),
    "config a list": (lambda place: (place.adapter / SETTINGS).write_text("[]"), "holds no JSON mapping"),
    "no weights": (lambda place: (place.adapter / WEIGHTS).unlink(), "adapter_model.safetensors is missing"),
    "a pickle": (
        lambda place: (place.adapter / WEIGHTS).rename(place.adapter / "adapter_model.bin"),
        "holds adapter_model.bin, a pickle, which is never opened here",
    ),
    "cut off": (
        lambda place: (place.adapter / WEIGHTS).write_bytes((place.adapter / WEIGHTS).read_bytes()[:-4]),
        "is damaged or truncated",
    ),
    "one factor": (_tensors(lambda tensors: tensors.pop(FACTOR)), "lacks lora_A of layers.0.attention.q_proj"),
    "no factor": (_tensors(lambda tensors: tensors.clear()), "which the adapter in"),
    "a strange tensor": (_tensors(lambda tensors: tensors.update(foo=torch.ones(1))), "has foo, which is neither"),
    "another layer": (_tensors(_elsewhere), "lora.targets asks for layers.1.attention.q_proj, which the"),
    "narrower": (_factor(torch.ones(2, 8)), "with shape [2, 8], but this model takes [2, 16]"),
    "another rank": (_factor(torch.ones(3, 16)), "has rank 3 at layers.0.attention.q_proj, but"),
    "codes": (_factor(torch.ones(2, 16, dtype=torch.int8)), "lora_A as int8, but numbers with a point"),
    "float8": (_factor(torch.ones(2, 16).to(torch.float8_e4m3fn)), "lora_A as float8_e4m3fn, but numbers with a point"),
    "not finite": (_factor(torch.full((2, 16), float("nan"))), "that are not finite"),
    "a file": (lambda place: place.set(lora__init_from=place.train), "train.jsonl, which is not a folder"),
    "a model": (lambda place: place.set(lora__init_from=place.model), "has no adapter_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters(case: str, place: Workplace, refused: Refused):
    change, words = ADAPTERS[case]
    place.set(lora__init_from=place.adapter)
    change(place)
    refused(words)


def test_places_that_are_taken(place: Workplace, refused: Refused):
    run = place.folder / "taken"
    place.set(checkpoint__dir=run)
    run.write_text("")
    refused("cannot be written (File exists)")
    place.set(checkpoint__dir=run / "run")
    refused("cannot be written (Not a directory)")
    for name, words in (("metrics.jsonl", "is a folder, but"), ("config.yaml", "is a folder, but")):
        folder = place.folder / f"run-{name}"
        (folder / name).mkdir(parents=True)
        place.set(checkpoint__dir=folder)
        refused(words)
    (place.folder / "other").mkdir()
    (place.folder / "other" / "checkpoints").write_text("")
    place.set(checkpoint__dir=place.folder / "other")
    refused("checkpoints is a file, but the run needs a folder there")


def test_a_full_disk(place: Workplace, refused: Refused, monkeypatch: pytest.MonkeyPatch):
    """Only a write can tell; training before it is not lost work that could have been spared."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    refused("could not be saved", at_once=False)


def test_a_run_of_other_adapters(place: Workplace, refused: Refused, tmp_path: Path):
    """What a checkpoint was trained with is found out before the first step."""
    usual, run = place.options["checkpoint.dir"], tmp_path / "resumed"
    place.set(checkpoint__dir=run)
    with pytest.raises(AssertionError, match="step 1/1"):  # it trains
        refused("")
    place.set(checkpoint__dir=usual, checkpoint__resume=run, lora__alpha=8)
    refused("lora.alpha 4.0, but this run has 8.0")
    manifest = next(run.glob("checkpoints/step_*/manifest.json"))
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "kind": "base"}))
    refused("manifest.json")
