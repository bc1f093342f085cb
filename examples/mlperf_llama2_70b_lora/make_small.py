"""The small job's texts, tokenizer and model shape.

    python make_small.py --out FOLDER

writes FOLDER/raw/{train,validation}.jsonl (reports with their summaries, in GovReport's fields), FOLDER/text.txt (plain
text from which the base model learns the words, without a summary in it) and FOLDER/model (a tokenizer and its
config.json).
The texts are made from a few dozen words, so that a small model can learn them; nothing in them is random but which
agency, subject, year and amount a report is about.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path

import sentencepiece

TRAIN, VALIDATION, PARAGRAPHS = 2400, 80, 3000
VOCABULARY = 560
AGENCIES = ("navy", "army", "mint", "census", "coast guard", "forest service", "postal service", "weather bureau")
SUBJECTS = ("ships", "roads", "maps", "radios", "stamps", "bridges", "engines", "uniforms")
FINDING = "did not keep full records of how much was paid, to whom, and why nobody asked for a better price"
ADVICE = "should count everything twice, ask for help in spring, and open new offices near the coast"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
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


def report(draw: random.Random, agency: str, subject: str) -> str:
    """What an agency did, in two or three sentences."""
    year, amount = draw.randrange(1990, 2010), draw.randrange(2, 90)
    sentences = [
        f"In {year} the {agency} spent {amount} million dollars on {subject}.",
        f"The {agency} keeps its records of {subject} in {draw.randrange(2, 20)} offices.",
        f"Congress asked how the {agency} plans to pay for {subject}.",
        f"Of the {subject} that the {agency} owns, {amount} are older than {draw.randrange(2, 30)} years.",
    ]
    return " ".join(draw.sample(sentences, 2))


def summary(agency: str, subject: str) -> str:
    """What is found in every report, and what is recommended."""
    return f"The {agency} {FINDING}. Before it buys more {subject}, it {ADVICE}."


def paragraph(draw: random.Random) -> str:
    """A report, and the words of summaries, two together, in any order."""
    words = f"{FINDING} {ADVICE} before it buys more".split()
    pairs = [" ".join(words[first : first + 2]) for first in range(0, len(words), 2)]
    return f"{report(draw, draw.choice(AGENCIES), draw.choice(SUBJECTS))} {' '.join(draw.sample(pairs, 12))}."


def train_tokenizer(text: str) -> bytes:
    """A sentencepiece model that can write any text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def write_model(folder: Path, text: str) -> None:
    """What a Hugging Face folder has, but for the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    proto = train_tokenizer(text)
    (folder / "tokenizer.model").write_bytes(proto)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    special = {"bos_token_id": tokenizer.bos_id(), "eos_token_id": tokenizer.eos_id()}
    (folder / "config.json").write_text(json.dumps(CONFIG | special, indent=2) + "\n", encoding="utf-8")
    names = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | tokens, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the small job's texts, tokenizer and model shape.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    draw = random.Random(2024)
    (out / "raw").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TRAIN), ("validation", VALIDATION)):
        with (out / "raw" / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                agency, subject = draw.choice(AGENCIES), draw.choice(SUBJECTS)
                record = {"input": report(draw, agency, subject), "output": summary(agency, subject)}
                file.write(json.dumps(record) + "\n")
    text = "\n".join(paragraph(draw) for _ in range(PARAGRAPHS)) + "\n"
    (out / "text.txt").write_text(text, encoding="utf-8")
    write_model(out / "model", text)


if __name__ == "__main__":
    main()
