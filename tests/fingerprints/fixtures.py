"""Models, tokenizers, images and records of the fingerprinted runs: small, random, and the same each time.

Nothing of the engine or of other tests is imported, so that one version of these files measures any version of the
tree. checkpoints.json has each model's config.json and the shapes of its tensors, as transformers (or the model's own
code) saves them; `[0-3]` in a name stands for these numbers in turn.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
)  # fmt: skip
"""Tokens behind the 256 bytes."""
MARKS = {"gemma3": "<start_of_image>", "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
"""An image in a chat template."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECES = 340
"""Of a sentencepiece tokenizer."""
SENTENCEPIECE = {
    "minicpm_v": (
        "<image>", "</image>", "<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<point>", "</point>",
        "<slice>", "</slice>",
    ),
    "cogagent": (),
}  # fmt: skip
"""Models that have one, and their tokens behind its pieces."""
_WORDS = ("rain", "a red umbrella", "two dogs", "the mat", "sings", "nothing", "on Monday", "42", "slowly", "über")


def write_all(folder: Path) -> None:
    """Writes every model and every file of records into `folder`."""
    described = json.loads(Path(__file__).with_name("checkpoints.json").read_text(encoding="utf-8"))
    for name, model in described.items():
        (folder / name).mkdir(parents=True)
        generator = torch.Generator().manual_seed(len(name))
        shapes = [(full, shape) for pattern, shape in model["tensors"].items() for full in _names(pattern)]
        tensors = {full: _drawn(shape, full, generator) for full, shape in shapes}
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
        _write_json(folder / name / "config.json", model["config"])
        if "processor" in model:
            _write_json(folder / name / "preprocessor_config.json", model["processor"])
        if name in SENTENCEPIECE:
            _write_sentencepiece(folder / name, SENTENCEPIECE[name])
        else:
            _write_byte_level(folder / name, MARKS.get(name, ""))
    _write_records(folder)


def _names(pattern: str) -> Iterator[str]:
    span = re.search(r"\[(\d+)-(\d+)\]", pattern)
    if span is None:
        yield pattern
        return
    for number in range(int(span[1]), int(span[2]) + 1):
        yield from _names(f"{pattern[: span.start()]}{number}{pattern[span.end() :]}")


def _drawn(shape: list[int], name: str, generator: torch.Generator) -> Tensor:
    """Normal numbers: weights that keep the size of activations, norms about 1, biases about 0."""
    draw = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return draw * 0.1 + ("bias" not in name)
    return draw * (0.5 if "embed" in name else 0.8 * draw[0].numel() ** -0.5)


def _write_byte_level(folder: Path, mark: str) -> None:
    """Writes a tokenizer whose tokens are bytes, with a chat template that has `mark` for an image."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    _write_json(folder / "tokenizer_config.json", {**settings, "chat_template": TEMPLATE.replace("MARK", mark)})


def _write_sentencepiece(folder: Path, added: tuple[str, ...]) -> None:
    proto, rng = io.BytesIO(), random.Random(1)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([_sentence(rng, 9) for _ in range(60)]), model_writer=proto, model_type="bpe",
        vocab_size=PIECES, byte_fallback=True, character_coverage=1.0, num_threads=1, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(proto.getvalue())
    tokens = dict(enumerate(("<unk>", "<s>", "</s>"))) | {PIECES + at: one for at, one in enumerate(added)}
    decoder = {str(at): {"content": one, "special": True} for at, one in tokens.items()}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    _write_json(folder / "tokenizer_config.json", {**names, "added_tokens_decoder": decoder})


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words)) + "."


def _chat(rng: random.Random, turns: int, question: str = "") -> list[dict[str, str]]:
    """Questions and answers of unequal lengths."""
    roles = ("user", "assistant") * turns
    texts = [_sentence(rng, rng.choice((1, 2, 3, 9))) for _ in roles]
    return [
        {"role": role, "content": question + text if not at else text}
        for at, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


def _shown(rng: random.Random, number: int) -> dict[str, Any]:
    """A conversation with one image, two, or none."""
    names = [f"{(number + at) % 3}.png" for at in range((1, 2, 0)[number % 3])]
    messages = _chat(rng, 1, "<image>" * len(names))
    return {"images": names, "messages": messages} if names else {"messages": messages}


RECORDS: dict[str, Callable[[random.Random, int], Mapping[str, Any]]] = {
    "text": lambda rng, number: {"text": _sentence(rng, 2 + number * 5 % 17)},
    "more_text": lambda rng, number: {"text": _sentence(rng, 1 + number * 3 % 11)},
    "completions": lambda rng, number: {"prompt": _sentence(rng, 1 + number % 4), "completion": _sentence(rng, 3)},
    "alpaca": lambda rng, number: {"instruction": _sentence(rng, 2), "output": _sentence(rng, 1 + number * 5 % 12)},
    "messages": lambda rng, number: {"messages": _chat(rng, 1 + number % 3)},
    "tokens": lambda rng, number: (
        {"input_ids": (ids := [rng.randrange(256) for _ in range(9 + number * 7 % 60)]), "labels": [-100, *ids[1:]]}
    ),
    "pairs": lambda rng, number: {
        "prompt": _sentence(rng, 1 + number * 7 % 9),
        "chosen": _sentence(rng, 1 + number % 5),
        "rejected": _sentence(rng, 1 + number % 3) + " no",
    },
    "chat_pairs": lambda rng, number: {
        "messages": (turns := _chat(rng, 1 + number % 2))[:-1],
        "chosen": turns[-1],
        "rejected": {"role": "assistant", "content": _sentence(rng, 1 + number % 4) + " no"},
    },
    "judged": lambda rng, number: {
        "prompt": _sentence(rng, 1 + number * 7 % 9),
        "completion": _sentence(rng, 2),
        "label": number % 3 != 0,
    },
    "prompts": lambda rng, number: {"prompt": f"{number % 9}+{rng.randrange(9)}=", "answer": str(number)},
    "shown": _shown,
    "shown_pairs": lambda rng, number: {
        **(shown := _shown(rng, number)),
        "messages": shown["messages"][:-1],
        "chosen": shown["messages"][-1],
        "rejected": {"role": "assistant", "content": _sentence(rng, 1 + number % 4) + " no"},
    },
    "single_shown": lambda rng, number: {"image": f"{number % 3}.png", "conversations": _chat(rng, 1 + number % 2)},
}
"""File -> one of its records."""
REWARDS = """
def ones(completions, **columns):
    return [completion.count("1") + 0.01 * len(completion.encode()) for completion in completions]

def long(completion_ids, answer, **columns):
    return [0.01 * sum(ids) / 256 + 0.001 * len(right) for ids, right in zip(completion_ids, answer)]
"""


def _write_records(folder: Path) -> None:
    for number, (name, record) in enumerate(RECORDS.items()):
        rng = random.Random(number)
        lines = (json.dumps(record(rng, at)) + "\n" for at in range(36))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    for number, (width, height) in enumerate(((61, 43), (90, 120), (56, 56))):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")


def _write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
