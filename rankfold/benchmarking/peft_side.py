"""The step of transformers and PEFT, with their fastest settings: plain, with gradient
checkpointing, with padding, with Liger's kernels in the model, on a base that bitsandbytes stores, and without PEFT."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from engine.batch import IGNORE_LABEL
from engine.errors import UserError
from engine.models.dtypes import TORCH_DTYPES
from rankfold.benchmarking.model import (
    ADAMW,
    ATTENTION,
    CLIP_GRAD_NORM,
    LORA_ALPHA_OVER_RANK,
    Outcome,
    document_lengths,
    draw,
    hf_config,
    learning_rate,
    padded_documents,
)
from rankfold.benchmarking.options import ExpertsOptions, ModelOptions, method_of

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
    from transformers.models.llama import modeling_llama
except ImportError as error:
    raise UserError(f"this section compares with transformers and PEFT, but: {error}; pip install peft.") from None


class PeftSide:
    """The training step of transformers and PEFT; see `model.Side`.

    With bfloat16 the adapters are fp32 and the forward runs under autocast, as transformers' Trainer does it.
    """

    def __init__(self, options: ModelOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        with torch.device(device):
            base = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**hf_config(options)), dtype=self._weight_dtype(), attn_implementation="sdpa"
            )
            self._change_base(base)
            self.model = self._adapted(base)
        for name, parameter in self.model.named_parameters():
            self._draw(name.removeprefix("base_model.model."), parameter)
        self.model.train()

    def _weight_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self._options.dtype]

    def _adapted(self, base: PreTrainedModel) -> nn.Module:
        """Returns the model that is trained."""
        options = self._options
        lora = LoraConfig(
            r=options.rank,
            lora_alpha=options.rank * LORA_ALPHA_OVER_RANK,
            lora_dropout=options.dropout,
            use_dora=method_of(options) == "dora",
            task_type="CAUSAL_LM",
            **self._targets(),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's own use of transformers
            return get_peft_model(base, lora)

    def _targets(self) -> dict[str, str | list[str]]:
        """Returns the adapted modules, as PEFT's options."""
        return {"target_modules": "all-linear"}

    def _draw(self, name: str, parameter: Tensor) -> None:
        draw(name.replace(".base_layer.", ".").removesuffix(".default.weight"), parameter)

    def _change_base(self, base: PreTrainedModel) -> None:
        """Changes the base before the adapters are added; does nothing here."""

    def prepare(self) -> None:
        named = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        self._trained = [parameter for _, parameter in named]
        groups = [
            {"params": [each for name, each in named if "norm" not in name]},
            # as in transformers' Trainer
            {"params": [each for name, each in named if "norm" in name], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, **{"lr": learning_rate(self._options), **ADAMW}, fused=True)

    def _autocast(self) -> AbstractContextManager:
        if self._options.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, TORCH_DTYPES[self._options.dtype])

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor:
        return self._loss(ids_BS, dropout, labels=ids_BS)

    def _loss(self, ids_BS: Tensor, dropout: bool, **inputs: Tensor) -> Tensor:
        if not dropout:
            self.model.eval()
        with self._autocast():
            loss = self.model(input_ids=ids_BS, **inputs).loss
        if not dropout:
            self.model.train()
        return loss

    def step(self, ids_BS: Tensor) -> Outcome:
        loss = self._backward(ids_BS)
        norm = torch.nn.utils.clip_grad_norm_(self._trained, CLIP_GRAD_NORM)
        self._optimizer.step()
        return Outcome(loss, norm)

    def checked_step(self, ids_BS: Tensor) -> Outcome:
        """Runs a step as `step`, and returns the norm in float64.

        On a CPU torch adds up squares in fp32, and its norm of 8 million numbers is 3e-4 too small.
        """
        loss = self._backward(ids_BS)
        norms = [each.grad.double().norm() for each in self._trained if each.grad is not None]
        torch.nn.utils.clip_grad_norm_(self._trained, CLIP_GRAD_NORM)
        self._optimizer.step()
        return Outcome(loss, torch.stack(norms).norm())

    def _backward(self, ids_BS: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss(ids_BS)
        loss.backward()
        return loss.detach()


class BitsandbytesSide(PeftSide):
    """PEFT on a base whose linears bitsandbytes stores in NF4 with double quantisation, as QLoRA's users load it.

    The engine's encoding of these weights has the same bits.
    """

    def _change_base(self, base: PreTrainedModel) -> None:
        from bitsandbytes.nn import Linear4bit, Params4bit

        dtype = TORCH_DTYPES[self._options.dtype]
        for name, module in list(base.named_modules()):
            if not isinstance(module, nn.Linear) or name == "lm_head":
                continue
            self._draw(f"{name}.weight", module.weight)
            encoded = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
            encoded.weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=encoded)
            base.set_submodule(name, encoded.to(self._device))
        # which transformers sets on a model that it loads so; PEFT's layers read it
        base.is_loaded_in_4bit = True

    def _draw(self, name: str, parameter: Tensor) -> None:
        if parameter.is_floating_point():  # codes were made from what was drawn
            super()._draw(name, parameter)


class FullSide(PeftSide):
    """All parameters of transformers' model trained; with bfloat16 they are fp32 under autocast."""

    def _weight_dtype(self) -> torch.dtype:
        return torch.float32

    def _adapted(self, base: PreTrainedModel) -> nn.Module:
        return base


class PaddedSide(PeftSide):
    """PEFT on the documents of packed rows, one in a row each, padded on the right to the longest."""

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor:
        ids_DL, mask_DL = padded_documents(ids_BS, document_lengths(self._options))
        return self._loss(
            ids_DL, dropout, attention_mask=mask_DL, labels=ids_DL.masked_fill(mask_DL == 0, IGNORE_LABEL)
        )


class CheckpointingSide(PeftSide):
    """PEFT with gradient checkpointing: each layer keeps only its input and is recomputed in backward."""

    def _change_base(self, base: PreTrainedModel) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its name changes in transformers 6
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


_EXPERT_FACTOR = re.compile(r"(.*\.experts)\.(base_layer\.)?(lora_[AB])\.default\.weight")


class ExpertsSide(PeftSide):
    """PEFT on a mixture of experts: attention's linears, and the experts' stacked weights as `target_parameters`.

    transformers chooses the implementation of experts.
    """

    def _targets(self) -> dict[str, str | list[str]]:
        return {
            "target_modules": list(ATTENTION),
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        }

    def _draw(self, name: str, parameter: Tensor) -> None:
        if match := _EXPERT_FACTOR.fullmatch(name):
            leaf, count = "gate_up_proj" if match[2] else "down_proj", self._count()
            parts = parameter.chunk(count) if match[3] == "lora_A" else [parameter[:, e::count] for e in range(count)]
            for expert, part in enumerate(parts):
                draw(f"{match[1]}.{expert}.{leaf}.{match[3]}", part)
        elif parameter.dim() == 3:
            experts, _, leaf = name.replace(".base_layer", "").rpartition(".")
            for expert, weight in enumerate(parameter):
                halves = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
                for own, part in halves if leaf == "gate_up_proj" else ((leaf, weight),):
                    draw(f"{experts}.{expert}.{own}.weight", part)
        else:
            super()._draw(name, parameter)

    def _count(self) -> int:
        assert isinstance(self._options, ExpertsOptions)
        return self._options.experts


class ExpertLoopSide(ExpertsSide):
    """The same with transformers' loop over experts."""

    def _change_base(self, base: PreTrainedModel) -> None:
        base.set_experts_implementation("eager")


_REPLACED = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")
"""The names that Liger replaces in transformers' Llama for the whole process."""


class LigerSide(PeftSide):
    """PEFT with `apply_liger_kernel_to_llama`: norms, SwiGLU, rotary embedding, and head and loss in one.

    It replaces names in transformers' module, which would affect plain PEFT too. So the module is restored, and the
    rotary embedding, which is looked up there at each forward, is Liger's only while this side computes.
    """

    def _change_base(self, base: PreTrainedModel) -> None:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        before = {name: vars(modeling_llama)[name] for name in _REPLACED}
        apply_liger_kernel_to_llama(model=base)
        self._rotate = modeling_llama.apply_rotary_pos_emb
        vars(modeling_llama).update(before)

    @contextmanager
    def _own_rotation(self) -> Iterator[None]:
        before = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb = self._rotate
        try:
            yield
        finally:
            modeling_llama.apply_rotary_pos_emb = before

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor:
        with self._own_rotation():
            return super().loss(ids_BS, dropout=dropout)
