"""Learning rates that differ from module to module, from the keys of other trainers to optim.lr_pattern."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, number
from rankfold.migrating.given import Given

_RATE = "learning rate of "


def rate_of(*patterns: str) -> Rule:
    """Returns the rule of a key that is the learning rate of modules, by names as in optim.lr_pattern."""

    def rule(conversion: Conversion, given: Given) -> None:
        if given.value in (None, "", "None"):
            conversion.drop(given, "optim.lr is that of all")
        else:
            for pattern in patterns:
                know_rate(conversion, given, pattern, number(given))

    return Rule(rule, ("optim.lr_pattern",))


def know_rate(conversion: Conversion, given: Given, pattern: str, rate: float) -> None:
    """Records the learning rate of modules; the first that is recorded counts where several mean a module."""
    conversion.add_fact(given, f"{_RATE}{pattern}", rate, f"optim.lr_pattern: {rate:g} for {pattern}")


def multiple_of_lr(*patterns: str) -> Rule:
    """Returns the rule of a key that is such a learning rate as a multiple of the run's."""

    def rule(conversion: Conversion, given: Given) -> None:
        if given.value in (None, "", "None"):
            conversion.drop(given, "optim.lr is that of all")
            return
        for pattern in patterns:
            became = f"optim.lr_pattern: {number(given):g} x optim.lr for {pattern}"
            conversion.add_fact(given, f"multiple of {_RATE}{pattern}", number(given), became)

    return Rule(rule, ("optim.lr_pattern",))


def set_rates(conversion: Conversion) -> None:
    """Sets optim.lr_pattern, once all keys are read."""
    rates: dict[str, float] = {}
    rate = conversion.options.get("optim.lr")
    for fact, value in conversion.facts.items():
        kind, found, pattern = fact.partition(_RATE)
        if found and not kind:
            rates[pattern] = value
        elif found and rate is not None:
            rates[pattern] = value * rate
        elif found:
            conversion.to_fill.append(f"optim.lr_pattern: {value:g} times optim.lr for {pattern}")
    if rates:
        conversion.set_default("derived", "learning rates", "optim.lr_pattern", rates)
