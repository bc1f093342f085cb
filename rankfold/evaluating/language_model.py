"""The interface that lm-evaluation-harness evaluates, on the engine's passes.

It is a subclass of the harness's own Hugging Face model, of which it keeps all that is done with text: special tokens,
the split of context and continuation, rolling windows, chat templates. In place of that class's model it has the
engine's, in any layout. Every rank answers all requests, so that for the harness there is one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    configure_pad_token,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from engine.errors import UserError
from engine.inference.generate import check_requests, context_limit
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Request
from engine.sentences import listed
from rankfold.evaluating.model import EvaluatedModel
from rankfold.evaluating.sampling import completions
from rankfold.evaluating.scoring import Continuation, scores
from rankfold.evaluating.watch import Watch

_LARGE = 1 << 40
"""The harness's batches: one of everything, which the engine divides by itself."""
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSizes:
    """How much of an evaluation is computed at a time.

    Args:
        rows: completions that are generated at a time.
        tokens: of a batch of rows that are scored, and of prompts that are prefilled together.
    """

    rows: int = 16
    tokens: int = 8192


class _Settings(NamedTuple):
    """What completions of one pass have in common."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling


class EngineLM(HFLM):
    """A model of the harness; see the module.

    Args:
        model: this rank's part.
        tokenizer: of the model, by transformers; its chat template is that of the prompts.
        folder: of the model, for the record of results and for generation_config.json.
        end_ids: tokens that end a completion.
        max_length: tokens of a row; None for the model's context.
        template_arguments: variables of the chat template.
        sizes: of the passes.
        watch: follows the requests.
        seed: of sampled completions.
    """

    def __init__(
        self,
        model: EvaluatedModel,
        tokenizer: Any,
        *,
        folder: Path,
        end_ids: frozenset[int],
        max_length: int | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        sizes: PassSizes | None = None,
        watch: Watch | None = None,
        seed: int = 0,
    ) -> None:
        TemplateLM.__init__(self)  # that of HFLM opens a model of transformers
        self._engine, self._end_ids, self._folder, self._seed = model, end_ids, folder, seed
        self._sizes, self.watch = sizes or PassSizes(), watch or Watch()
        # the fields that the inherited methods read
        self.tokenizer = configure_pad_token(tokenizer)
        self.backend, self.truncation, self.add_bos_token = "causal", False, None
        self.custom_prefix_token_id = self.think_end_token = self.enable_thinking = None
        self.chat_template_args = dict(template_arguments or {})
        self.pretrained, self.revision, self.peft, self.delta = str(folder), "main", None, None
        self.batch_size_per_gpu, self.batch_sizes = _LARGE, {}
        self._max_length = min(max_length or _LARGE, context_limit(model.config))
        self._device = model.device
        self._rank, self._world_size = 0, 1

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Returns the scores of (names, context, continuation), as token ids.

        Raises:
            UserError: a continuation has no tokens, or does not fit the model's context.
        """
        continuations = []
        for names, before, after in requests:
            if not 0 < len(after) <= self.max_length:
                shown = "" if names is None else f" {names[1]!r}"
                raise UserError(
                    f"a continuation{shown} has {len(after)} tokens, but from 1 to {self.max_length}, the model's "
                    "context, were expected: correct the task, or leave it out."
                )
            kept = self.max_length + 1 - len(after)  # what is too long is cut from the left
            continuations.append(Continuation(before[-kept:], after))
        with self.watch.over("scoring", len(continuations)):
            found = scores(self._engine, continuations, self._sizes.tokens, self.watch)
        return [(one.logp, one.is_greedy) for one in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns the text of each completion, up to its first stop text.

        Raises:
            UserError: settings that the engine's generation does not have, or no room for a completion.
        """
        groups: dict[_Settings, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(self._settings(request.args[1], request.task_name), []).append(place)
        texts = [""] * len(requests)
        with self.watch.over("generating", len(requests)):
            for settings, places in groups.items():
                found = self._complete(settings, [requests[place] for place in places])
                for place, text in zip(places, found, strict=True):
                    texts[place] = text
        return texts

    def _complete(self, settings: _Settings, requests: Sequence[Instance]) -> list[str]:
        prompts = [self._prompt_ids(one.args[0], self.max_length - settings.max_new_tokens) for one in requests]
        asked = [Request(row=place, ids=ids) for place, ids in enumerate(prompts)]
        check_requests(asked, self._engine.config, settings.max_new_tokens)
        limits = Limits(
            max_new_tokens=settings.max_new_tokens,
            stop_ids=self._end_ids,
            stop_texts=tuple(text for text in settings.until if text),
            slots=min(self._sizes.rows, len(prompts)),
            prefill_tokens=self._sizes.tokens,
        )
        found = completions(
            self._engine, prompts, limits=limits, sampling=settings.sampling, decoder=_Decoder(self), watch=self.watch
        )
        return [postprocess_generated_text(self.tok_decode(ids), list(settings.until), None) for ids in found]

    def _prompt_ids(self, text: str, room: int) -> tuple[int, ...]:
        ids, _ = self.tok_batch_encode([text], left_truncate_len=room)
        return tuple(ids[0].tolist())

    def _settings(self, given: Mapping[str, Any], task: str | None) -> _Settings:
        """Returns the settings of a task's generation_kwargs, and of the model's generation_config.json.

        Raises:
            UserError: the engine's generation does not have them.
        """
        kwargs = normalize_gen_kwargs(dict(given), self.max_gen_toks)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=self.tok_decode(self.eot_token_id, False))
        new, samples = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample", False)
        temperature = float(kwargs.pop("temperature", 0.0) or 0.0)
        if samples and not temperature:
            temperature = 1.0
        if new >= self.max_length:
            raise UserError(
                f"task {task} generates up to {new} tokens, but the model's context is {self.max_length}, the prompt "
                "included: set max_gen_toks to fewer in the task's generation_kwargs."
            )
        chosen = {name: kwargs.pop(name) for name in _SAMPLING if name in kwargs}
        chosen = self._defaults() | chosen
        if not samples:
            chosen = {name: value for name, value in chosen.items() if name == "repetition_penalty"}
        if kwargs:
            raise UserError(
                f"task {task} asks for generation with {listed(sorted(kwargs))}, which the engine does not have: "
                "change the task's generation_kwargs, or leave it out."
            )
        if not chosen.get("top_k", 1):
            del chosen["top_k"]  # transformers' 0 is no limit
        sampling = Sampling(temperature=temperature if samples else 0.0, seed=self._seed, **chosen)
        return _Settings(tuple(until), int(new), sampling)

    def _defaults(self) -> dict[str, Any]:
        """Returns the sampling settings of generation_config.json, which transformers' generation takes too."""
        from transformers import GenerationConfig

        if not (self._folder / "generation_config.json").is_file():
            return {}
        config = GenerationConfig.from_pretrained(self._folder)
        found = {name: getattr(config, name, None) for name in _SAMPLING}
        return {name: value for name, value in found.items() if value is not None}

    def get_model_info(self) -> dict[str, Any]:
        """Returns what results.json says of the model."""
        return {"model_num_parameters": -1, "model_dtype": "", "model_revision": "main", "model_sha": ""}


class _Decoder:
    """The decoding of a model's tokenizer, by which stop texts are found."""

    def __init__(self, model: EngineLM) -> None:
        self._model = model

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self._model.tok_decode(list(one)) for one in ids]
