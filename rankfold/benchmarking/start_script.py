"""A training of adapters with transformers and PEFT: python -m rankfold.benchmarking.start_script FOLDER

The peer of the section `start`. It imports nothing of this repository, takes one step on the first record of
FOLDER/train.jsonl, and prints the step's loss. Under torchrun its ranks are data-parallel.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> None:
    """Takes one step."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).to(device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    if ranks > 1:
        model = DistributedDataParallel(model)
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    row = torch.tensor(rows[:1], device=device)
    loss = model(input_ids=row, labels=row).loss
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
