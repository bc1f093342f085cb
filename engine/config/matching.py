"""Matches a user's names and patterns with modules: pure functions over names, no model needed.

A module has one name in the engine (`layers.3.attention.q_proj`) and may have others, its aliases, such as the name
in the Hugging Face checkpoint (`model.layers.3.self_attn.q_proj`). A pattern matches a module when it matches any of
these.

Short names mean the language model's modules. Those of a vision model (`vision.resampler.kv_proj`) are matched from
their beginning on, by either name, or from the component behind `vision.`. A pattern that begins with `vision` means
these alone, also where a layer has an expert of that name (`layers.3.attention.vision.q_proj`).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence

from engine.choices import VISION
from engine.config.patterns import name_pattern
from engine.errors import UserError
from engine.sentences import listed

BLOCK_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear of a decoder block."""
_LATENT_LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
"""Those of a block with latent attention, beside the others."""
_EXPERT_STREAM_LINEARS = ("fc1_latent_proj", "fc2_latent_proj")
"""Those around experts of a narrower stream."""
_CROSS_LINEARS = tuple(f"cross_attention.{name}" for name in ("query", "key", "value", "dense"))
"""Those of a block that attends to encoded images, beside the others."""
ALL_LINEARS = "all-linear"
"""PEFT's word for all linears but the head."""
_EVERY_LINEAR = BLOCK_LINEARS + _LATENT_LINEARS + _EXPERT_STREAM_LINEARS + _CROSS_LINEARS
_LONGEST_PATTERN = 1000
"""Maximum length of a pattern with wildcards: compiling it takes time that grows with the square."""
Matcher = Callable[[str, Sequence[str], Sequence[str]], bool]


def matches_target(module: str, targets: Sequence[str], aliases: Sequence[str] = ()) -> bool:
    """Returns whether one of `targets` matches `module`.

    A target is a name or a regular expression. It must match a whole name, or the end of one that starts at a
    component: `q_proj`, `attention.q_proj` and `.*layers\\.3\\..*` all match `layers.3.attention.q_proj`;
    `proj` does not. "all-linear" means every linear of the layers, as in PEFT.

    Args:
        module: full name of the module in the engine.
        targets: names or regular expressions.
        aliases: further full names of the same module.
    """
    expressions = [name for target in targets for name in (_EVERY_LINEAR if target == ALL_LINEARS else (target,))]
    return any(
        name_pattern(target).matches(end)
        for name in (module, *aliases)
        for end in _endings(name, whole=module.startswith(VISION))
        for target in expressions
    )


def matches_trainable(module: str, patterns: Sequence[str], aliases: Sequence[str] = ()) -> bool:
    """Returns whether one of `patterns` matches `module`.

    A pattern has the wildcards of a shell (*, ?, [...]) and must match the whole name or a run of whole components:
    `lm_head`, `mlp`, `layers.0` and `layers.*.mlp.*` do, where the module has them; `layers.1` does not match
    `layers.10.mlp`. A parameter's name may stand for the module's, so `norm.weight` works as well.

    Args:
        module: full name of the module (or parameter) in the engine.
        patterns: names with wildcards.
        aliases: further full names of the same module.

    Raises:
        UserError: a pattern is longer than any name.
    """
    for pattern in patterns:
        if len(pattern) > _LONGEST_PATTERN:
            raise UserError(
                f"trainable contains a pattern of {len(pattern):,} characters, which no name has: write names such as "
                "lm_head."
            )
    return any(
        fnmatch.fnmatchcase(run, pattern)
        for name in (module, *aliases)
        for run in _runs(name, whole=module.startswith(VISION))
        for pattern in patterns
    )


def unmatched_patterns(patterns: Sequence[str], modules: Mapping[str, Sequence[str]], matches: Matcher) -> list[str]:
    """Returns the patterns that match no module at all, in the order given.

    Args:
        patterns: as the user wrote them.
        modules: each candidate module's name -> its aliases.
        matches: `matches_target` or `matches_trainable`.
    """
    return [
        pattern
        for pattern in patterns
        if not any(matches(module, (pattern,), aliases) for module, aliases in modules.items())
    ]


def require_matched(
    option: str, patterns: Sequence[str], modules: Mapping[str, Sequence[str]], matches: Matcher
) -> None:
    """Refuses patterns that match no module.

    Args:
        option: where the patterns came from, "lora.targets" or "trainable".
        patterns, modules, matches: as in `unmatched_patterns`.

    Raises:
        UserError: names the first such pattern, and suggests names of this model.
    """
    missing = unmatched_patterns(patterns, modules, matches)
    if not missing:
        return
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    close = difflib.get_close_matches(missing[0].rpartition(".")[2], known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use names such as {listed(known, most=10)}."
    raise UserError(f"{option} contains {missing[0]!r}, which matches no module of this model: {hint}")


def _beginnings(name: str, *, whole: bool) -> list[int]:
    """Returns the components of a name at which a pattern may begin: of `whole` names only the first, of others each
    that is not named as a vision model is."""
    if whole:
        return [0, 1] if name.startswith(VISION) else [0]
    return [start for start, part in enumerate(name.split(".")) if f"{part}." != VISION]


def _endings(name: str, *, whole: bool) -> list[str]:
    """Returns the name and every end of it that a pattern may match."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in _beginnings(name, whole=whole)]


def _runs(name: str, *, whole: bool) -> list[str]:
    """Returns every run of whole components of the name that a pattern may match."""
    parts = name.split(".")
    size = len(parts)
    return [
        ".".join(parts[start:end]) for start in _beginnings(name, whole=whole) for end in range(start + 1, size + 1)
    ]
