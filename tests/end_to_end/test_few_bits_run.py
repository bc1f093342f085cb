"""Runs on a checkpoint in few bits as it is stored: resumed, exported, generated with, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.choices import BaseDType
from engine.config.load import load_config
from engine.conversion.import_export import import_checkpoint
from engine.conversion.run_facts import training_facts
from engine.errors import UserError
from engine.inference.options import ModelChoice
from engine.telemetry.log import Log
from engine.training.generation import live_sources
from engine.training.start_model import check_model, model_source
from engine.training.trainer import train
from tests.support.commands import losses, options, run_tool
from tests.support.few_bits import CONFIGS, NVFP4, compressed, group, in_few_bits
from tests.support.shared_data import write_plays
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

STEPS = 6
MIXED = compressed(
    "mixed-precision",
    {**NVFP4, "targets": ["re:.*self_attn.*"], "format": "nvfp4-pack-quantized"},
    group(["re:.*mlp.*"], "float", 8, "channel", format="float-quantized"),
)
"""Blocks of 16 in attention alone: MLPs are 172 wide."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> dict[str, Path]:
    """The small trained Llama in each format, and with the numbers that its codes mean."""
    found = {}
    for name, config in {**{one: CONFIGS[one] for one in ("nvfp4", "fp8_channel")}, "mixed": MIXED}.items():
        folder = tmp_path_factory.mktemp(name)
        in_few_bits(stories_dir, folder, config)
        for place in ("hf", "decoded"):
            for file in stories_dir.glob("tokenizer*"):
                shutil.copy(file, folder / place)
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], data_dir: Path) -> dict[str, Any]:
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 20000)
    return {
        "model.path": models["mixed"] / "hf", "model.base_dtype": "stored", "data.train": text, "data.seq_length": 64,
        "data.packing": "true", "train.steps": STEPS, "train.micro_batch_size": 2, "train.global_batch_size": 4,
        "optim.lr": 3e-3, "lora.rank": 4, "lora.dropout": 0.1, "log.every": 1, "checkpoint.every": 3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(load_config(options({**settings, "checkpoint.dir": folder})))
    return folder


def _trained(run: Path) -> dict[str, torch.Tensor]:
    trained = open_run(run).trained()
    return {name: trained.read_whole(name) for name in trained.tensor_names()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"parallel.tensor": 2},
    "pp2": {"parallel.pipeline": 2},
    "dp2, parameters": {"parallel.shard": "parameters"},
}


@pytest.mark.parametrize("layout", sampled(LAYOUTS, ["one"]))
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    layout: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    given = {**settings, **LAYOUTS[layout]}
    for name, more in (
        ("whole", {}),
        ("rest", {"checkpoint.resume": tmp_path / "whole" / "checkpoints" / "step_00000003"}),
    ):
        asked = options({**given, **more, "checkpoint.dir": tmp_path / name})
        if layout == "one":
            train(load_config(asked))
        else:
            run_tool("pretrain_lora", *asked, ranks=2)
    whole, rest = _trained(tmp_path / "whole"), _trained(tmp_path / "rest")
    assert whole.keys() == rest.keys() and all(torch.equal(whole[name], rest[name]) for name in whole)
    before = losses(tmp_path / "whole")
    assert losses(tmp_path / "rest") == {step: loss for step, loss in before.items() if step > 3}


def test_losses_are_those_on_the_decoded_model(run: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit: codes are decoded to the numbers that the other run read."""
    folder = Path(settings["model.path"]).parent / "decoded"
    given = {**settings, "model.path": folder, "model.base_dtype": "null", "checkpoint.dir": tmp_path / "run"}
    train(load_config(options(given)))
    assert losses(run) == losses(tmp_path / "run")


def test_records_name_the_formats(run: Path) -> None:
    checkpoint = open_run(run)
    assert checkpoint.base["dtype"] == "stored" and checkpoint.base["encodings"] == ["fp8_channel", "nvfp4"]
    precision = training_facts(checkpoint).rows["Precision"]
    assert precision == "float32, base in fp8_channel and nvfp4, as it is stored"


def test_a_run_is_not_resumed_with_another_base(run: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    given = {**settings, "train.steps": STEPS + 1, "checkpoint.resume": run, "checkpoint.dir": tmp_path / "run"}
    with pytest.raises(UserError, match="was trained with model.base_dtype stored, but this run has null"):
        train(load_config(options({**given, "model.base_dtype": "null"})))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixed", "logits not compared: transformers decodes checkpoints of one format alone"),
        ("fp8_channel", "checked with PEFT: logits of"),
    ],
)
def test_adapters_are_exported(
    name: str, words: str, run: Path, settings: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    """With PEFT's logits on the base as transformers decodes it."""
    if name != "mixed":
        given = {**settings, "model.path": models[name] / "hf", "train.steps": 2, "checkpoint.dir": tmp_path / "run"}
        train(load_config(options(given)))
        run = tmp_path / "run"
    out = tmp_path / "adapter"
    said = run_tool("convert", "export", "--source", run, "--out", out, "--format", "peft")
    assert words in said.stdout + said.stderr
    written, trained = load_file(out / "adapter_model.safetensors"), open_run(run).trained()
    for one in trained.tensor_names():
        stock = f"base_model.model.model.{one.replace('attention', 'self_attn')}.weight"
        assert torch.equal(written[stock], trained.read_whole(one).to(written[stock].dtype))


def test_generation_reads_the_codes(run: Path, models: dict[str, Path]) -> None:
    """The same text as with the decoded base, in float32, and no warning, since the numbers are the same."""
    texts = []
    for more in ([], ["--base-dtype", "stored"]):
        found = run_tool(
            "generate", "--adapter", run, "--prompt", "Once upon a time", "--max-new-tokens", 12, "--temperature", 0,
            *more,
        )  # fmt: skip
        assert "trained beside a base" not in found.stderr
        assert ("frozen base:" in found.stderr) == bool(more)
        texts.append(found.stdout)
    assert texts[0] == texts[1] and len(texts[0]) > 20


@pytest.mark.parametrize(("base_dtype", "warns"), [(None, False), ("stored", False), ("int8", True)])
def test_generation_beside_other_numbers_is_warned_of(base_dtype: BaseDType | None, warns: bool, run: Path) -> None:
    said = io.StringIO()
    live_sources(ModelChoice(path=None, adapter=run, base_dtype=base_dtype), Log(stream=said))
    assert ("trained beside a base in stored, and --base-dtype is int8" in said.getvalue()) == warns


def _refused(settings: dict[str, Any], words: str, world: int = 1) -> None:
    with pytest.raises(UserError, match=words) as caught:
        config = load_config(options(settings))
        source = model_source(config)
        check_model(config, source.model, world, source.weights)
    message = str(caught.value)
    assert message.endswith((".", "?")) and "\n" not in message


def test_a_checkpoint_in_16_bits_is_refused(settings: dict[str, Any], stories_dir: Path) -> None:
    _refused({**settings, "model.path": stories_dir}, "has no weights in few bits: set model.base_dtype to null, or")


def test_a_partitioned_checkpoint_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    import_checkpoint(open_source(settings["model.path"]), tmp_path / "parts", tensor=1)
    _refused(
        {**settings, "model.path": tmp_path / "parts"},
        "is partitioned, where all weights are numbers: give the Hugging Face folder that it was made from",
    )


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"model.init": "random"}, 1, "model.base_dtype is stored and model.init is random"),
    ({"lora.dora": "true"}, 1, "lora.dora is true and model.base_dtype is stored, but DoRA needs the lengths"),
    ({"lora.rank": 0, "trainable": "layers"}, 1, "trains every linear of the layers, so that nothing frozen is left"),
    (
        {"parallel.tensor": 4},
        4,
        "cuts the 172 input features of .*down_proj into 43 a rank, .*: use parallel.tensor 1, or",
    ),
]


@pytest.mark.parametrize(("changes", "world", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_options_that_cannot_be(
    changes: dict[str, Any], world: int, words: str, settings: dict[str, Any], models: dict[str, Path]
) -> None:
    _refused({**settings, "model.path": models["nvfp4"] / "hf", **changes}, words, world)


def test_weights_that_are_stored_otherwise_than_their_neighbours_are_named(
    models: dict[str, Path], settings: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One linear's k has 16 bits: q and v are decoded, to 16 bits as without base_dtype, and the run says so once."""
    stories = json.loads(json.dumps(CONFIGS["nvfp4"]))
    stories["ignore"].append("re:.*layers[.]0[.].*k_proj")
    in_few_bits(models["nvfp4"] / "decoded", tmp_path, stories)
    for file in (models["nvfp4"] / "hf").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "hf")
    train(load_config(options({
        **settings, "model.path": tmp_path / "hf", "train.steps": 1, "checkpoint.dir": tmp_path / "run"
    })))  # fmt: skip
    lines = [line for line in capfd.readouterr().err.splitlines() if "decoded to bfloat16:" in line]
    assert len(lines) == 1 and "2 weights that the checkpoint has in few bits" in lines[0]
    assert "layers.0.attention.q_proj.weight, layers.0.attention.v_proj.weight" in lines[0]
