"""A reward model as a reward of rollouts, by transformers, in the process that calls reward functions.

Texts are what TRL gives a reward model: prompt and completion one after the other, or, where prompts are messages, the
conversation by the chat template of the judge's own tokenizer. They are scored in batches, longest first, each padded
to its longest text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_TOKENS = 1 << 14
"""Maximum number of tokens of a batch, padding included; a longer text is a batch by itself."""


class JudgeReward:
    """Scores completions; see `engine.rollouts.rewards.worker` for what it is called with.

    Args:
        folder: of a model of one of transformers' classes for sequence classification, with one label; or of a PEFT
            adapter on one, which says where its base is.
        device: of the model, as torch names it; None is the first GPU where there is one, else the CPU.

    Raises:
        ValueError: the model is no reward model, or its tokenizer cannot tell where a text ends.
        Exception: transformers or PEFT cannot open it.
    """

    def __init__(self, folder: str, device: str | None = None) -> None:
        import torch
        from transformers import AutoTokenizer

        base = adapter_base(Path(folder))
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device or found)
        has_tokenizer = base is None or (Path(folder) / "tokenizer_config.json").is_file()
        tokenizer: Any = AutoTokenizer.from_pretrained(folder if has_tokenizer else base, local_files_only=True)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ValueError("its tokenizer has no padding token and no end token, by which the end of a text is found")
        self._tokenizer = tokenizer
        self._model = _opened(folder, base).to(self._device).eval()
        self._model.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    def __call__(self, *, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Returns the score of each completion after its prompt."""
        import torch

        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        found = [0.0] * len(ids)
        for places in batches([len(one) for one in ids]):
            rows = {"input_ids": [ids[place] for place in places]}
            padded = self._tokenizer.pad(rows, padding=True, padding_side="right", return_tensors="pt")
            with torch.inference_mode():
                scores = self._model(**padded.to(self._device)).logits[:, 0].float().tolist()
            for place, score in zip(places, scores, strict=True):
                found[place] = score
        return found

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        return str(self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))


def adapter_base(folder: Path) -> str | None:
    """Returns the base of the PEFT adapter in a folder; None where it has a model."""
    path = folder / "adapter_config.json"
    if not path.is_file() or (folder / "config.json").is_file():
        return None
    return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the places of texts that are scored together, the longest first.

    Args:
        lengths: of the texts, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    while order:
        count = max(1, _TOKENS // max(1, lengths[order[0]]))
        yield order[:count]
        order = order[count:]


def _opened(folder: str, base: str | None) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options: dict[str, Any] = {"local_files_only": True, "dtype": "auto", "num_labels": 1, "output_loading_info": True}
    if base is None:
        if (count := AutoConfig.from_pretrained(folder, local_files_only=True).num_labels) != 1:
            raise ValueError(f"it has {count} labels, and a reward model has one")
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, **options)
        _require_all(info, stored=())
        return model
    from peft import PeftModel, load_peft_weights

    model, info = AutoModelForSequenceClassification.from_pretrained(base, **options)
    _require_all(info, stored=load_peft_weights(folder, device="cpu"))
    return PeftModel.from_pretrained(model, folder)


def _require_all(info: Mapping[str, Any], stored: Collection[str]) -> None:
    """Refuses a model some of whose weights were drawn, which would score at random.

    Args:
        info: of transformers, on what a folder lacks.
        stored: names of an adapter's tensors.

    Raises:
        ValueError: neither has a weight.
    """
    lacking = [name for name in map(str, info["missing_keys"]) if not any(one.endswith(f".{name}") for one in stored)]
    if lacking:
        raise ValueError(f"it lacks {min(lacking)}, so that it is no reward model")
