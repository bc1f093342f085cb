"""Makes what run.sh trains on: pairs in MiniMind's form, a tenth of them held out, and a model folder of its shape.

    python examples/minimind_dpo/prepare.py --data PAIRS.json --tokenizer DIR --out DIR [--layers 8 --hidden 768 ...]

It is not the training: that is tools/pretrain_lora.py. Without weights of one's own there is a folder with a
config.json and the tokenizer alone, for model.init random.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from engine.data.formats import ChatSample
from engine.data.record_files import expand_paths, read_records
from engine.errors import UserError
from engine.preferences.data.preference_pairs import Pair, parse_pair

HELD_OUT = 10
"""Every so many-th pair is not trained on."""
ROPE_THETA, VOCABULARY = 1e6, 6400


def minimind_config(hidden: int, layers: int) -> dict[str, Any]:
    """config.json of MiniMind's shape: a Qwen3 with tied embeddings; other widths keep its proportions."""
    heads = 8
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads, "intermediate_size": hidden * 2432 // 768, "max_position_embeddings": 32768,
        "rope_theta": ROPE_THETA, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32",
    }  # fmt: skip


def turns(side: Any) -> list[dict[str, Any]]:
    """One side of a pair as a conversation."""
    if isinstance(side, ChatSample):
        return list(side.messages)
    return [{"role": "user", "content": side.prompt}, {"role": "assistant", "content": side.completion}]


def as_minimind(pair: Pair) -> dict[str, Any]:
    """The record that MiniMind reads."""
    return {"chosen": turns(pair.chosen), "rejected": turns(pair.rejected)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Pairs in MiniMind's form and a model folder of its shape.")
    parser.add_argument("--data", required=True, help="preference records, JSON or JSONL, of any form")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer; makes OUT/model")
    parser.add_argument("--pairs", type=int, help="take only the first so many")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    try:
        pairs = [
            as_minimind(parse_pair(place, record))
            for path in expand_paths(arguments.data)
            for place, record in read_records(path)[1]
        ]
        pairs = pairs[: arguments.pairs]
        if len(pairs) < HELD_OUT:
            raise UserError(f"{arguments.data} has {len(pairs)} pairs, expected at least {HELD_OUT}: give more.")
        if arguments.tokenizer is not None and not arguments.tokenizer.is_dir():
            raise UserError(f"--tokenizer is {arguments.tokenizer}, which is not a folder: give that of a tokenizer.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", False), ("held_out", True)):
        lines = [json.dumps(pair) for index, pair in enumerate(pairs) if (index % HELD_OUT == 0) == chosen]
        (arguments.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arguments.tokenizer is not None:
        model = arguments.out / "model"
        model.mkdir(exist_ok=True)
        for file in arguments.tokenizer.iterdir():
            if file.name != "config.json":
                shutil.copyfile(file, model / file.name)
        config = minimind_config(arguments.hidden, arguments.layers)
        (model / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
