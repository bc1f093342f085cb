"""Distillation options: teachers whose probabilities completions, or given texts, are compared with."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

from engine.choices import Remainder, ServerKind
from engine.config.checks import require, require_choices, require_positive
from engine.config.option import IGNORED, REPORTED, option
from engine.config.rollout import is_web_address

BASE = "base"
"""Names the trained model without its adapters as a teacher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationOptions:
    """Distillation: teachers of the completions that a run samples, where objective.name is grpo, or of given texts,
    where it is distillation.

    With grpo each token gets, beside its completion's advantage, the difference between a teacher's log-probability of
    it and the model's own, so that the gradient is that of the reverse divergence KL(model || teacher) at the sampled
    tokens (on-policy distillation, arXiv 2306.13649). With distillation the model's distribution at each target token
    is compared with the teachers' whole ones, or with the most likely tokens that the records have of one
    (docs/distillation.md).

    Args:
        teachers: Models that teach: folders of Hugging Face checkpoints, of PEFT adapters on model.path, or of runs,
            which are computed in the run's layout and precision; base is model.path without adapters. Or addresses of
            vLLM or SGLang servers, such as http://10.0.0.7:8000, which get the API key in RANKFOLD_SERVER_KEY. All
            have the tokenizer of the model. With teachers, rollout.rewards may be [].
        weights: Weights of distillation.teachers, in their order; [] weighs each with 1.
        discount: Share in a token's advantage of the difference of the token after it, and so on with powers of it; 0
            counts each token's own difference alone.
        server_kind: Kind of the servers among them, "vllm" or "sglang".
        server_timeout: Seconds that a call of a server, for one completion, may take with all its attempts.
        whole: With objective.name grpo, whether the loss of sampled tokens is the divergence from the teachers' whole
            distributions (GKD, arXiv 2306.13649), as that of given texts is, in place of policy gradients.
        beta: Divergence from the whole distributions of teachers: 0 is KL(teacher || model), 1 is KL(model || teacher),
            and between lies the generalised Jensen-Shannon divergence. For objective.name distillation, or whole, as
            the options below.
        temperature: Divisor of the logits of model and teachers in the divergence.
        label_share: Share of the usual next-token loss in the loss, from 0 to 1; the divergence has the rest.
        remainder: All but a teacher's most likely tokens, where records have these: "renormalize" leaves it out and
            scales the tokens' probabilities to a sum of 1, "bucket" counts it as one more token.
    """

    teachers: tuple[str, ...] = option((), REPORTED)
    weights: tuple[float, ...] = option((), REPORTED)
    discount: float = option(0.0, REPORTED)
    server_kind: ServerKind = option("vllm", IGNORED)
    server_timeout: float = option(600.0, IGNORED)
    whole: bool = option(False, REPORTED)
    beta: float = option(0.0, REPORTED)
    temperature: float = option(1.0, REPORTED)
    label_share: float = option(0.0, REPORTED)
    remainder: Remainder = option("renormalize", REPORTED)

    def __post_init__(self) -> None:
        require_choices("distillation", self)
        require_positive("distillation.server_timeout", self.server_timeout, "use for example 600")
        require_positive("distillation.temperature", self.temperature, "use for example 1.0")
        for name in ("beta", "label_share"):
            share = getattr(self, name)
            require(
                0 <= share <= 1,
                f"distillation.{name} is {share}, but a number from 0 to 1 is expected: use for example 0.5.",
            )
        teachers, weights = self.teachers, self.weights
        require(
            not isinstance(teachers, str) and all(teachers),
            f"distillation.teachers is {teachers!r}, but a list of folders is expected: write for example [teacher].",
        )
        wrong_url = next((one for one in teachers if is_server(one) and not is_web_address(one)), None)
        require(
            wrong_url is None,
            f"distillation.teachers has {wrong_url}, but the address of a server is expected: write for example "
            "http://10.0.0.7:8000.",
        )
        require(
            not any("@" in one for one in teachers if is_server(one)),
            "distillation.teachers has a user name or a password before an @, which would be in files and in the log: "
            "remove them, and export an API key as RANKFOLD_SERVER_KEY.",
        )
        twice = next((text for text, count in Counter(teachers).items() if count > 1), None)
        require(twice is None, f"distillation.teachers has {twice} twice: remove one, and raise the other's weight.")
        require(
            len(weights) in (0, len(teachers)),
            f"distillation.weights has {len(weights)} numbers and distillation.teachers {len(teachers)} models: give "
            "one for each, or [] for 1 each.",
        )
        wrong = next((weight for weight in weights if not math.isfinite(weight) or weight <= 0), None)
        require(wrong is None, f"distillation.weights has {wrong}, but numbers above 0 are expected: correct it.")
        require(
            0 <= self.discount <= 1,
            f"distillation.discount is {self.discount}, but a share from 0 to 1 is expected: use 0 for none.",
        )
        require(
            bool(teachers) or self.discount == 0,
            f"distillation.discount is {self.discount} and distillation.teachers is [], so that there is nothing to "
            "discount: name a teacher, or remove it.",
        )

    @property
    def factors(self) -> tuple[float, ...]:
        """The weight of each teacher."""
        return self.weights or (1.0,) * len(self.teachers)

    @property
    def names(self) -> tuple[str, ...]:
        """The teachers' names in reports: the last part of each path, and where several have the same, the path."""
        last = [PurePath(teacher).name or teacher for teacher in self.teachers]
        return tuple(name if last.count(name) == 1 else path for name, path in zip(last, self.teachers, strict=True))


def is_server(teacher: str) -> bool:
    """Returns whether an entry of distillation.teachers is meant as the address of a server."""
    return teacher.startswith(("http://", "https://"))
