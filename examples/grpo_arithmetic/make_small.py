"""A tiny Llama that reads single characters, a careless teacher's sums, and sums to do.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json and tokenizer), FOLDER/taught.jsonl (every sum with three answers, of which one is
right, for the supervised start) and FOLDER/prompts.jsonl (every sum; the right answer is a column for the reward, which
the model never sees).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END = "<end>"
CHARACTERS = [END, *"0123456789", "+", "=", " "]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 16,
    "bos_token_id": None,
    "eos_token_id": 0,
}
LARGEST = 5


def write_model(folder: Path) -> None:
    """config.json, and a tokenizer whose tokens are characters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({one: number for number, one in enumerate(CHARACTERS)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def write_sums(folder: Path) -> None:
    """Every sum as a prompt, and with the answers of a teacher who is off by one two times out of three."""
    sums = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    taught = [{"prompt": f"{a}+{b}=", "completion": str(abs(a + b + wrong))} for a, b in sums for wrong in (-1, 0, 1)]
    for name, records in (("taught", taught), ("prompts", prompts)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_model(arguments.out / "model")
    write_sums(arguments.out)
