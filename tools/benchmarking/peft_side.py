"""The step as transformers and PEFT take it, with the settings that serve them best."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from engine.errors import UserError

from .model import (
    BETAS,
    CLIP_GRAD_NORM,
    EPS,
    LEARNING_RATE,
    LORA_ALPHA_OVER_RANK,
    TARGETS,
    TORCH_DTYPES,
    WEIGHT_DECAY,
    Outcome,
    draw,
    hf_config,
)
from .options import StepOptions

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig
except ImportError as error:
    raise UserError(f"the step section compares with transformers and PEFT, but: {error}; pip install peft.") from None


class PeftSide:
    """See `model.Side`.

    With bfloat16 the adapters are fp32 and the forward runs under autocast, as transformers' Trainer does it.
    """

    def __init__(self, options: StepOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        dtype = TORCH_DTYPES[options.dtype]
        with torch.device(device):
            base = AutoModelForCausalLM.from_config(
                LlamaConfig(**hf_config(options)), dtype=dtype, attn_implementation="sdpa"
            )
            lora = LoraConfig(
                r=options.rank,
                lora_alpha=options.rank * LORA_ALPHA_OVER_RANK,
                lora_dropout=options.dropout,
                target_modules=list(TARGETS),
                task_type="CAUSAL_LM",
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # PEFT's own use of transformers
                self.model = get_peft_model(base, lora)
        for name, parameter in self.model.named_parameters():
            place = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            draw(place.removesuffix(".default.weight"), parameter)
        self.model.train()

    def prepare(self) -> None:
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def _autocast(self) -> AbstractContextManager:
        if self._options.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, TORCH_DTYPES[self._options.dtype])

    def loss(self, ids_BS: Tensor) -> Tensor:
        with self._autocast():
            return self.model(input_ids=ids_BS, labels=ids_BS).loss

    def step(self, ids_BS: Tensor) -> Outcome:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss(ids_BS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, CLIP_GRAD_NORM)
        self._optimizer.step()
        return Outcome(loss.detach(), norm)
