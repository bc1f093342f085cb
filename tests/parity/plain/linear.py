"""One linear of PEFT's, forward and backward, as a user writes it: once a line of input; prints the seconds."""

import sys
import time

import torch
from peft import LoraConfig, inject_adapter_in_model

tokens, inputs, outputs, rank = map(int, sys.argv[1:5])
model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False))
lora = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=float(sys.argv[5]), target_modules=["0"])
model = inject_adapter_in_model(lora, model).train()
x, dy = torch.randn(tokens, inputs, requires_grad=True), torch.randn(tokens, outputs)
trained = [x, *(each for each in model.parameters() if each.requires_grad)]
for _ in sys.stdin:
    begin = time.perf_counter()
    torch.autograd.grad(model(x), trained, dy)
    print(time.perf_counter() - begin, flush=True)
