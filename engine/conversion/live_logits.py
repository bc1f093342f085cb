"""Computes a model's logits with the engine's own decoder, on the CPU in fp32, with one layer in memory at a time; with
all of them where layers need more of others than the residual stream.

Exports are compared with them: the weights as they are stored and the adapters beside them, nothing merged, read by
the same loader that training uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.reader import Renamed, TensorReader
from engine.checkpoint.reshard import Box
from engine.conversion.lora_scales import Scale, scale_of
from engine.conversion.merged_model import LORA_A, LORA_B, LORA_BIAS, LORA_MAGNITUDE, adapted_modules
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder, Part, build_decoder
from engine.models.decoder_config import DecoderConfig

NUM_ROWS, ROW_LENGTH = 2, 16


class Overlay(TensorReader):
    """A reader that has one reader's tensors in front of another's.

    Args:
        front: wins where both have a name.
        back: None where `front` has all there is.
    """

    def __init__(self, front: TensorReader, back: TensorReader | None) -> None:
        self._front, self._back = front, back

    @property
    def label(self) -> str:
        return self._front.label

    def tensor_names(self) -> list[str]:
        names = self._front.tensor_names()
        back = [] if self._back is None else self._back.tensor_names()
        return [*names, *(name for name in back if name not in self._front)]

    def __contains__(self, name: str) -> bool:
        return name in self._front or (self._back is not None and name in self._back)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def boxes(self, name: str) -> Sequence[Box]:
        return self._of(name).boxes(name)

    def view(self, name: str, index: int) -> Tensor:
        return self._of(name).view(name, index)

    def _of(self, name: str) -> TensorReader:
        return self._front if self._back is None or name in self._front else self._back


class RoundedFactors(Renamed):
    """A run's trained values with the factors A and B as its products had them, in the dtype of its model: a
    merge-aware run rounds codes from these, and not from the fp32 that its checkpoint has.

    Args:
        trained: has the values.
        dtype: of the run's model.
    """

    def __init__(self, trained: TensorReader, dtype: torch.dtype) -> None:
        super().__init__(trained, {name: name for name in trained.tensor_names()})
        self._factors = dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._factors if _is_factor(name) else super().dtype(name)

    def view(self, name: str, index: int) -> Tensor:
        stored = super().view(name, index)
        return stored.to(self._factors) if _is_factor(name) else stored


def _is_factor(name: str) -> bool:
    return name.rpartition(".")[2] in (LORA_A, LORA_B)


def adapter_plan(trained: TensorReader, scale: Scale) -> TrainingPlan:
    """Returns the plan of a model with the adapters that `trained` has; without dropout."""
    settings = {
        module: AdapterSettings(
            rank=trained.shape(f"{module}.{LORA_A}")[0],
            scale=scale_of(scale, module),
            dropout=0.0,
            dora=f"{module}.{LORA_MAGNITUDE}" in trained,
            bias=f"{module}.{LORA_BIAS}" in trained,
        )
        for module in adapted_modules(trained.tensor_names())
    }
    return TrainingPlan(adapter=settings.get, fused=settings.__contains__)


def proof_tokens(vocab_size: int) -> Tensor:
    """Returns int64 [NUM_ROWS, ROW_LENGTH] token ids, always the same, from all over the vocabulary."""
    generator = torch.Generator().manual_seed(20)
    return torch.randint(vocab_size, (NUM_ROWS, ROW_LENGTH), generator=generator)


def live_logits(
    config: DecoderConfig, tensors: TensorReader, tokens_BS: Tensor, plan: TrainingPlan | None = None
) -> Tensor:
    """Returns fp32 [B, S, V] logits.

    Args:
        config: of the model.
        tensors: its parameters, adapters included, by logical name.
        tokens_BS: int64 [B, S]; each row is a document.
        plan: the adapters.
    """
    batch, step, x = _batch(tokens_BS), torch.zeros((), dtype=torch.int64), torch.empty(0)
    with torch.no_grad():
        for part in parts_of(config):
            model = loaded(config, part, tensors, plan)
            context = model.context(batch, step, training=False)
            x = model.embed(batch) if part.embedding else x
            x = model.run_layers(x, context) if part.last > part.first else x
            x = model.logits(x, context) if part.head else x
    return x[:, : config.vocab_size].float().view(*tokens_BS.shape, -1)


def parts_of(config: DecoderConfig) -> list[Part]:
    """Returns the parts to be computed one after another, as small as the model allows."""
    last = config.num_layers
    if not config.layers_stand_alone:
        return [Part(first=0, last=last, embedding=True, head=True)]
    parts = [Part(first=0, last=0, embedding=True, head=False)]
    parts += [Part(first=index, last=index + 1, embedding=False, head=False) for index in range(last)]
    return [*parts, Part(first=last, last=last, embedding=False, head=True)]


def loaded(config: DecoderConfig, part: Part, tensors: TensorReader, plan: TrainingPlan | None) -> Decoder:
    """Returns a part of the model on the CPU in fp32, with its parameters."""
    device = torch.device("cpu")
    plan = plan or TrainingPlan()
    model = build_decoder(config, layout=TensorLayout(), plan=plan, device=device, dtype=torch.float32, part=part)
    load_parameters((entry.shard for entry in shard_entries(model)), tensors)
    return model


def _batch(tokens_BS: Tensor) -> Batch:
    rows, length = tokens_BS.shape
    places = torch.arange(rows * length).view(rows, length)
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=torch.full_like(tokens_BS, IGNORE_LABEL),
        positions_BS=places % length,
        token_index_BS=places,
        loss_weights_BS=torch.zeros(rows, length),
        document_offsets=torch.arange(rows + 1, dtype=torch.int32) * length,
        document_lengths=(length,) * rows,
    )
