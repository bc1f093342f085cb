"""Reward models on the disk: transformers' classes for sequence classification with one label.

Such a folder is a language model's with `score.weight` [1, hidden] in the place of a head of tokens. A run makes one
of a language model, whose head it leaves out for a score head that is drawn from the seed, or trains one further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content
from engine.checkpoint.copying.stored_tensors import StoredTensors
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.reshard import Box
from engine.checkpoint.rows import ReadRows, Rows
from engine.checkpoint.weight_source import SHARED, TIED_HEAD, WeightSource, WrappedSource
from engine.distributed.sharding import NamedShard, ShardSpec, replicated_spec
from engine.errors import UserError
from engine.judges.decoder import JudgeConfig
from engine.kernels.formats import Format
from engine.models.decoder_config import DecoderConfig
from engine.models.initialise import fill_normal
from engine.models.names import NameMap

SCORE = "score"
"""The head's name in transformers' classes."""
ENDING = "ForSequenceClassification"
CLASSES = {
    "arcee": "Arcee", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "exaone4": "Exaone4",
    "gemma2": "Gemma2", "gemma3_text": "Gemma3Text", "glm": "Glm", "glm4": "Glm4", "gpt_oss": "GptOss",
    "hunyuan_v1_dense": "HunYuanDenseV1", "hunyuan_v1_moe": "HunYuanMoEV1", "llama": "Llama",
    "ministral3": "Ministral3", "mistral": "Mistral", "mixtral": "Mixtral", "olmo2": "Olmo2", "olmo3": "Olmo3",
    "phi3": "Phi3", "qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_5_text": "Qwen3_5Text",
    "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next", "seed_oss": "SeedOss", "smollm3": "SmolLM3",
}  # fmt: skip
"""model_type -> the beginning of its class of transformers 5.23."""


def judge_config(decoder: DecoderConfig) -> JudgeConfig:
    """Returns the decoder with a head that scores.

    Raises:
        UserError: transformers has no class for such a model, its layers are not the engine's, or it sees images.
    """
    if decoder.family not in CLASSES:
        raise UserError(
            f"a {decoder.family} model has no class for sequence classification in transformers, so that nothing could "
            "read a reward model made of it: train one of another type, such as llama, mistral, gemma2 or qwen3."
        )
    if type(decoder) is not DecoderConfig or decoder.fronts:
        raise UserError(
            f"a reward model of this {decoder.family} model is not supported, because its layers are not the engine's "
            "own or it sees images: use a model of text alone, and leave model.implementation out."
        )
    same: dict[str, Any] = {field.name: getattr(decoder, field.name) for field in fields(DecoderConfig)}
    return JudgeConfig(**same | {"tied_embeddings": False, "logits_softcap": None})


def read_judge(hf_config: dict[str, Any], decoder: DecoderConfig, names: NameMap) -> tuple[JudgeConfig, NameMap]:
    """Returns the description of a model whose config.json names a class for sequence classification.

    Raises:
        UserError: it has more labels than one, or as `judge_config`.
    """
    labels = hf_config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else hf_config.get("num_labels", 2)
    if count != 1:
        raise UserError(
            f"config.json says {hf_config['architectures'][0]} with {count} labels, and a reward model has one: use a "
            "model with num_labels 1."
        )
    return judge_config(decoder), replace(names, head=SCORE)


def judging(model: ModelFolder, padding_id: int | None = None) -> ModelFolder:
    """Returns the description of a language model with a head that scores; of a reward model the same.

    Args:
        padding_id: of the tokenizer that it is trained with, for config.json; None leaves what that has.

    Raises:
        UserError: as `judge_config`.
    """
    config = model.hf_config if padding_id is None else {**model.hf_config, "pad_token_id": padding_id}
    if model.decoder.scores:
        return replace(model, hf_config=config)
    decoder = judge_config(model.decoder)
    name = CLASSES[decoder.family] + ENDING
    config = {**config, "architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return replace(model, hf_config=config, decoder=decoder, names=replace(model.names, head=SCORE))


class JudgeSource(WrappedSource):
    """The weights of a reward model: those of another source, and a head that is drawn where that has none.

    Args:
        base: a language model, or a reward model.
        seed: of the head.
        padding_id: as of `judging`.
    """

    def __init__(self, base: WeightSource, *, seed: int, padding_id: int | None = None) -> None:
        super().__init__(base, judging(base.model, padding_id), has_tied_head=False)
        self._seed, self._head = seed, cast(Tensor | None, None)
        if not base.model.decoder.scores:
            shape = self.model.decoder.head_shape
            drawn = torch.empty(shape)
            std = float(self.model.hf_config.get("initializer_range", 0.02))
            fill_normal(NamedShard(TIED_HEAD, drawn, replicated_spec(shape, rank=0, size=1)), std, seed)
            self._head = drawn.to(base.dtype(SHARED))

    def _draws(self, name: str) -> Tensor | None:
        return self._head if name == TIED_HEAD else None

    @property
    def head_note(self) -> str | None:
        if self._head is None:
            return None
        return f"note: the head of tokens is left out, and a score head is drawn (train.seed {self._seed})"

    @property
    def changed_config(self) -> dict[str, Any]:
        return self.model.hf_config

    def format(self, name: str) -> Format | None:
        return super().format(name) if self._draws(name) is None else None

    def dtype(self, name: str) -> torch.dtype:
        return super().dtype(name) if (head := self._draws(name)) is None else head.dtype

    def boxes(self, name: str) -> Sequence[Box]:
        return super().boxes(name) if self._draws(name) is None else (Box(),)

    def view(self, name: str, index: int) -> Tensor:
        return super().view(name, index) if (head := self._draws(name)) is None else head

    def read(self, name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        read = super().read if self._draws(name) is None else super(WrappedSource, self).read
        return read(name, spec, out)

    def stored_at(self, name: str, index: int) -> tuple[Path, int] | None:
        return super().stored_at(name, index) if self._draws(name) is None else None

    def recorded_sum(self, name: str, index: int) -> str | None:
        return super().recorded_sum(name, index) if self._draws(name) is None else None

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        assert self._draws(name) is None, "what is in no file has no checksum"
        super().refuse_piece(name, index, found, expected)

    def contents(self, name: str, wanted: Sequence[Box]) -> list[Content]:
        return (
            super().contents(name, wanted) if self._draws(name) is None else StoredTensors.contents(self, name, wanted)
        )

    def rows(self, name: str) -> Rows:
        return super().rows(name) if self._draws(name) is None else ReadRows(self, name)


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Gives models a head that scores; see `engine.checkpoint.heads.HeadChange`."""

    def decoder(self, decoder: DecoderConfig) -> DecoderConfig:
        return decoder if decoder.scores else judge_config(decoder)

    def folder(self, model: ModelFolder, *, padding_id: int | None = None) -> ModelFolder:
        return judging(model, padding_id)

    def weights(self, weights: WeightSource, *, seed: int, padding_id: int | None = None) -> WeightSource:
        return JudgeSource(weights, seed=seed, padding_id=padding_id)


SCORE_HEAD = ScoreHead()
