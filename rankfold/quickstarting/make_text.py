"""The text, a tokenizer trained on it, and the configuration of a small Llama.

    python -m rankfold.quickstarting.make_text --out FOLDER

writes FOLDER/text.txt and FOLDER/model with tokenizer.model, tokenizer_config.json and config.json: what a Hugging
Face folder has, but for the weights.
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import sentencepiece

from engine.config.command_line import CommandLine
from rankfold.quickstarting.reference_text import read_sections, read_topics

VOCABULARY = 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.06,
    "torch_dtype": "float32",
}


def train_tokenizer(text: str) -> bytes:
    """A sentencepiece model that can write any text: what it has not seen it spells in bytes."""
    model = io.BytesIO()  # a file would carry its own path, and so differ from folder to folder
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    parser = CommandLine(description="Write the text, its tokenizer and the model's configuration.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    started = time.monotonic()
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    sections = read_sections(read_topics())
    text = "\n".join(section.text() for section in sections)
    (out / "text.txt").write_text(text, encoding="utf-8")
    print(f"text: {len(sections)} sections, {len(text):,} characters of the Python language reference", flush=True)
    proto = train_tokenizer(text)
    (model / "tokenizer.model").write_bytes(proto)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    special = {"bos_token_id": tokenizer.bos_id(), "eos_token_id": tokenizer.eos_id()}
    (model / "config.json").write_text(json.dumps(CONFIG | special, indent=2) + "\n", encoding="utf-8")
    names = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    (model / "tokenizer_config.json").write_text(json.dumps(names | tokens, indent=2) + "\n", encoding="utf-8")
    count = len(tokenizer.encode(text))
    print(
        f"tokenizer: {tokenizer.vocab_size()} pieces, {count:,} tokens, {len(text) / count:.2f} characters a token, "
        f"{time.monotonic() - started:.1f} s"
    )


if __name__ == "__main__":
    main()
