"""Greedy generation as a user of transformers writes it: one call a line of input; prints the seconds."""

import sys
import time

import torch
from transformers import AutoModelForCausalLM

rows, prompt, new = map(int, sys.argv[2:5])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
for _ in sys.stdin:
    ids = torch.randint(model.config.vocab_size, (rows, prompt))
    begin = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    print(time.perf_counter() - begin, flush=True)
