"""A training step as a user of transformers and PEFT writes it: one a line of input; prints seconds and page faults."""

import resource
import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

hidden, intermediate, layers, heads, kv_heads, vocab, rows, length, rank = map(int, sys.argv[1:10])
config = LlamaConfig(
    hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
    num_key_value_heads=kv_heads, vocab_size=vocab,
)  # fmt: skip
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
lora = LoraConfig(
    r=rank, lora_alpha=2 * rank, lora_dropout=float(sys.argv[10]), target_modules=targets, task_type="CAUSAL_LM"
)
model = get_peft_model(AutoModelForCausalLM.from_config(config), lora).train()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3, fused=True)
for _ in sys.stdin:
    ids, faults, begin = torch.randint(vocab, (rows, length)), resource.getrusage(0).ru_minflt, time.perf_counter()
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(time.perf_counter() - begin, resource.getrusage(0).ru_minflt - faults, flush=True)
