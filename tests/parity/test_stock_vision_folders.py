"""Whole folders of vision-language models that transformers has: greedy text about images is its own, and what a run
trains leaves as an adapter and as a merged model that transformers and PEFT read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.checkpoint.model_weights import open_source
from engine.conversion.peft_read import AdapterSource
from tests.distributed.cases import relative_error
from tests.support import minicpm_v4_6 as minicpm
from tests.support.commands import run_tool
from tests.support.gemma_images import make_folder as make_gemma
from tests.support.qwen_vl import KINDS as QWEN
from tests.support.qwen_vl import make_model as make_qwen
from tests.support.stock_vision import make_model
from tests.support.sweeps import sampled
from tests.unit.test_vision_data_processors import KINDS, NESTED, PINPOINTS, processor_of, saved_images, written

NEW = 6
TEXTS = ("What is this?", "Who are they, and where do they go?")
NAMES = ("llava", "internvl", "llava_next", "llava_onevision", "gemma3", *QWEN)
QUICK = ("internvl", "gemma3", "qwen3_vl")
PROJECTORS = {
    "gemma3": "mm_input_projection_weight", "qwen2_5_vl": "mlp.0.weight",
    **dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen3_5_moe"), "linear_fc1.weight"),
    **dict.fromkeys(minicpm.KINDS, "mlp.0.linear_1.weight"),
}  # fmt: skip


def model_folder(kind: str, folder: Path) -> tuple[nn.Module, Any]:
    """A model with tokenizer and image processor, as released folders have them; returns stock model and processor."""
    if kind in QWEN:
        model = make_qwen(kind, folder)
        if kind in minicpm.KINDS:
            return model, minicpm.written(kind, folder / "beside", scale_resolution=minicpm.SLICES[kind])
        return model, processor_of(kind, *written(kind, folder / "beside"))
    if kind == "gemma3":
        model = make_gemma(folder)
        return model, processor_of(kind, *written(kind, folder / "beside"))
    tokenizer, images = written(kind, folder)
    tokens = KINDS[kind]["tokens"]
    image = tokenizer.convert_tokens_to_ids(tokens.get("context_image_token") or tokens["image_token"])
    side = PINPOINTS[0][0] if kind.startswith("llava_") else 28
    model = make_model(kind, folder, vocab=len(tokenizer), image=image, side=side)
    return model, processor_of(kind, tokenizer, images)


def inputs(kind: str, processor: Any, text: str, shown: list[Any]) -> dict[str, Tensor]:
    content = [*({"type": "image"} for _ in shown), {"type": "text", "text": text}]
    asked = [{"role": "user", "content": content}]
    prompt = processor.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    more = {"images": [shown] if kind in NESTED else shown} if shown else {}
    found = dict(processor(text=[prompt], return_tensors="pt", **more))
    assert "token_type_ids" in found or kind != "gemma3"
    return found


@pytest.mark.parametrize("kind", sampled(NAMES, QUICK))
def test_greedy_text_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """With an image, with two, and of text alone."""
    model, processor = model_folder(kind, tmp_path)
    shown = saved_images(tmp_path)
    asked = [(TEXTS[0], [0]), (TEXTS[1], [0, 1]), (TEXTS[0], [])]
    records = []
    expected = []
    model.generation_config.eos_token_id = None
    for text, numbers in asked:
        named = {"images": [f"{number}.png" for number in numbers]} if numbers else {}
        content = [*({"type": "image"} for _ in numbers), {"type": "text", "text": text}]
        records.append({"messages": [{"role": "user", "content": content}], **named})
        given = inputs(kind, processor, text, [shown[number] for number in numbers])
        out = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        expected.append(out[0, given["input_ids"].shape[1] :].tolist())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = run_tool(
        "generate", "--model", tmp_path, "--prompts", tmp_path / "in.jsonl", "--ids", "--ignore-eos",
        "--max-new-tokens", NEW,
    )  # fmt: skip
    assert [json.loads(line)["completion_ids"] for line in result.stdout.splitlines()] == expected


@pytest.mark.parametrize("kind", sampled(NAMES, ("gemma3",)))
def test_a_run_leaves_as_adapter_and_as_merged_model(kind: str, tmp_path: Path) -> None:
    """Adapters on language model and tower, the projector in full; from LLaVA's records."""
    from peft import PeftModel

    folder, projector = tmp_path / "model", "visual.merger" if kind in QWEN else "multi_modal_projector"
    projector = "merger" if kind in minicpm.KINDS else projector
    model, processor = model_folder(kind, folder)
    shown = saved_images(tmp_path)
    turns = [{"from": "human", "value": f"<image>\n{TEXTS[0]}"}, {"from": "gpt", "value": "He goes there."}]
    records = [{"image": f"{number % 2}.png", "conversations": turns} for number in range(4)]
    (tmp_path / "train.json").write_text(json.dumps(records))
    run_tool(
        "pretrain_lora", "--model.path", folder, "--model.dtype", "float32", "--data.train", tmp_path / "train.json",
        "--data.seq_length", 192, "--train.steps", 3, "--train.global_batch_size", 2, "--optim.lr", 0.01,
        "--lora.rank", 2, "--lora.targets", r"q_proj,up_proj,.*(vision_tower|visual\.blocks).*(v_proj|fc1|qkv)",
        "--trainable", projector, "--checkpoint.dir", tmp_path / "run",
    )  # fmt: skip
    for form, reader in ((["--format", "peft"], "PEFT"), (["--format", "hf", "--merge"], "transformers")):
        said = run_tool("convert", "export", "--source", tmp_path / "run", "--out", tmp_path / form[1], *form)
        assert f"checked with {reader}: logits of 32 tokens agree" in said.stdout + said.stderr
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    given = inputs(kind, processor, TEXTS[1], shown[:1])
    with torch.no_grad():
        before = model(**given).logits
        merged = type(model).from_pretrained(tmp_path / "hf", dtype=torch.float32)(**given).logits
        adapted = PeftModel.from_pretrained(model, tmp_path / "peft").eval()
        beside = adapted(**given).logits
    assert relative_error(merged, before) > 1e-2, "nothing was learnt, so that agreement says little"
    assert relative_error(beside, merged) < 1e-5
    source = open_source(folder)
    read = AdapterSource(
        tmp_path / "peft", names=source.model.names, decoder=source.model.decoder, with_saved_modules=True
    )
    assert f"vision.{projector}.{PROJECTORS.get(kind, 'linear_1.weight')}" in read
    assert any(
        name.startswith(("vision.vision_tower", "vision.visual.blocks")) and name.endswith("lora_B")
        for name in read.tensor_names()
    )
    adapted.save_pretrained(tmp_path / "theirs")
    again = AdapterSource(
        tmp_path / "theirs", names=source.model.names, decoder=source.model.decoder, with_saved_modules=True
    )
    assert read.tensor_names() == again.tensor_names()
    assert all(torch.equal(read.read_whole(name), again.read_whole(name)) for name in read.tensor_names())
