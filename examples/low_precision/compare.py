"""Has transformers read two checkpoints in few bits, and compares them: their size, their codes and their losses.

python compare.py --before MODEL --after MERGED --data validation.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

CODES = "weight_packed"


def answer_loss(folder: Path, data: Path) -> float:
    """Returns the mean loss of the answers' tokens, by transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for record in json.loads(data.read_text(encoding="utf-8")):
        question = tokenizer.apply_chat_template(record["messages"][:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        start = len(tokenizer(question, add_special_tokens=False)["input_ids"])
        ids = torch.tensor([tokenizer(whole, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits.float()[0, start - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum"))
        count += ids.shape[1] - start
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("before", "after", "data"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    before, after = (load_file(folder / "model.safetensors") for folder in (given.before, given.after))
    same = {name: (tensor.dtype, tensor.shape) for name, tensor in before.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in after.items()
    }
    print(f"tensors: {'the same names, dtypes and shapes' if same else 'they differ'} in both")
    names = [name for name in before if name.endswith(CODES)]
    changed = sum(int((before[name] != after[name]).sum()) for name in names)
    print(f"bytes of codes that training changed: {changed / sum(before[name].numel() for name in names):.1%}")
    losses = (answer_loss(folder, given.data) for folder in (given.before, given.after))
    print("loss of the answers, by transformers: {:.4f} before, {:.4f} after".format(*losses))


if __name__ == "__main__":
    main()
