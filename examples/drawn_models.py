"""What the tiny models of the examples share: weights that are drawn, tokenizers that have read a few texts, and the
command that writes them."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

Shape = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor."""

SENTENCEPIECE_VOCABULARY = 340
BYTE_LEVEL_VOCABULARY = 360
QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
"""Behind the pieces of a byte-level vocabulary."""
QWEN_VOCABULARY = 384
"""Rows of the embedding, more than there are tokens, as in the released models."""
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's own, without its system message."""
_TABLES = (
    "embed_tokens.weight", "pos_embed", "position_embedding.weight", "cls_token", "cls_embedding", "resampler.query",
    "boi", "eoi",
)  # fmt: skip
"""Endings of the names of what stands for tokens, places and queries."""


def linear(name: str, out_features: int, in_features: int) -> list[Shape]:
    """A linear's tensors."""
    return [(f"{name}.weight", (out_features, in_features)), (f"{name}.bias", (out_features,))]


def norm(name: str, width: int) -> list[Shape]:
    """A norm's tensors."""
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def qwen_token(token: str) -> int:
    """The id of one of QWEN_TOKENS."""
    return BYTE_LEVEL_VOCABULARY + QWEN_TOKENS.index(token)


def write_weights(
    folder: Path, shapes: Iterable[Shape], config: Mapping[str, Any], *, zeros: tuple[str, ...] = ()
) -> None:
    """Writes model.safetensors and config.json into a new folder.

    Args:
        zeros: endings of the names of tensors that are 0, beside biases: norms that are scaled by 1 + weight.
    """
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    drawn = {name: _drawn(name, shape, zeros) for name, shape in shapes}
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config)


def _drawn(name: str, shape: tuple[int, ...], zeros: tuple[str, ...]) -> Tensor:
    """Normal weights, which keep the size of what passes through; norms that do nothing yet; biases of 0."""
    if name.endswith(("bias", *zeros)):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    drawn = torch.randn(shape)
    return drawn * 0.1 if name.endswith(_TABLES) else drawn / drawn[0].numel() ** 0.5


def write_sentencepiece(folder: Path, texts: Iterable[str], added: tuple[str, ...]) -> None:
    """Writes a tokenizer of SENTENCEPIECE_VOCABULARY pieces that has read `texts`, with further tokens behind them."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=proto,
        model_type="bpe",
        vocab_size=SENTENCEPIECE_VOCABULARY,
        byte_fallback=True,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(proto.getvalue())
    tokens = dict(enumerate(("<unk>", "<s>", "</s>")))
    tokens |= {SENTENCEPIECE_VOCABULARY + at: token for at, token in enumerate(added)}
    decoder = {str(at): {"content": token, "special": True} for at, token in tokens.items()}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    write_json(folder / "tokenizer_config.json", {**names, "added_tokens_decoder": decoder})


def write_byte_level(
    folder: Path, texts: Iterable[str], *, added: tuple[str, ...] = (), image: str = QWEN_IMAGE
) -> None:
    """Writes a byte-level BPE of BYTE_LEVEL_VOCABULARY pieces that has read `texts`, with Qwen's tokens behind them.

    Args:
        added: further tokens behind these.
        image: what the chat template writes for an image.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BYTE_LEVEL_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pieces = [f"<|unused_{number}|>" for number in range(BYTE_LEVEL_VOCABULARY - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*pieces, *QWEN_TOKENS, *added])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": QWEN_TEMPLATE.replace(QWEN_IMAGE, image),
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(file: Path, values: Any) -> None:
    """Writes a file of JSON."""
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_as_asked(write: Callable[[Path], None], what: str) -> None:
    """Runs the command `make_small.py --out FOLDER`, which writes into a folder that is empty or not there.

    Args:
        write: writes `model`, and `train.json` and `validation.json` beside it.
        what: is written.
    """
    parser = argparse.ArgumentParser(description=f"Write {what}.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty: give another folder")
    write(out)
    print(f"the model is in {out / 'model'}, records in train.json and validation.json beside it")
