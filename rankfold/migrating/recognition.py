"""Recognises which trainer an input is for, by tables/sources.yaml; refuses those that are not converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import UserError
from engine.sentences import listed
from rankfold.migrating import launcher_rules
from rankfold.migrating.conversion import NOT_GIVEN, Conversion, Rule, other_objective
from rankfold.migrating.given import OWN_LOOP, PROGRAM, Given
from rankfold.migrating.table import Trainer, read_table, trainer


def sources() -> dict[str, tuple[str, ...]]:
    """Returns the names of the sources for the command line -> their tables."""
    return {name: tuple(tables.split()) for name, tables in _table()["sources"].items()}


def trainers() -> tuple[Trainer, ...]:
    """Returns all trainers, in the order in which a key is looked up for a hint."""
    return tuple(trainer(table) for table in _table()["hints"].split())


def recognise(given: Iterable[Given], source: str | None = None) -> Trainer:
    """Returns the trainer whose files and flags these are; that of the launchers where there are their keys alone.

    Args:
        given: all keys.
        source: one of `sources`, if given.

    Raises:
        UserError: they are of none that is converted.
    """
    everything = list(given)
    if source is None:
        _refuse([one for one in everything if not one.idle])
    table = _recognised(everything)
    if source is not None:
        return trainer(table if table in sources()[source] else sources()[source][0])
    loop = next((one for one in everything if one.key == OWN_LOOP), None)
    if table == "hugging_face" and loop is not None:
        raise UserError(
            f"{loop.source} trains in a loop of its own, not with a Trainer whose defaults are known: write the run's "
            f"file from docs/coming-from.md, or give a script of one of {_known()}."
        )
    if table is None:
        place = next((one.source for one in everything), "the input")
        raise UserError(
            f"{place} has no key or program by which its source is recognised: name it with --from SOURCE, one of "
            f"{_known()}, or write the run's file from docs/coming-from.md."
        )
    return trainer(table)


def check_known(conversion: Conversion) -> None:
    """Refuses a conversion most of whose keys the trainer does not have.

    Raises:
        UserError: more than half of them are unknown.
    """
    rows = [
        row
        for row in conversion.rows
        if row.given.value != NOT_GIVEN and not row.given.key.startswith("(") and row.given.key != row.given.key.upper()
    ]
    unknown = [row.given for row in rows if row.kind == "unknown"]
    if 2 * len(unknown) > len(rows):
        few = listed((one.key for one in unknown), most=4)
        raise UserError(
            f"{unknown[0].source} was read as {conversion.trainer}, which does not have {len(unknown)} of its "
            f"{len(rows)} keys ({few}): name its source with --from SOURCE, one of {_known()}, or write the run's "
            "file from docs/coming-from.md."
        )


def names_objective(key: str) -> bool:
    """Returns whether a key that no table has, or its last part, is one by which trainers name the trained
    parameters."""
    leaf = key.rpartition(".")[2].lower()
    names = str(_table()["objective keys"]).split()
    return any(leaf.startswith(name[:-1]) if name.endswith("*") else leaf == name for name in names)


def _table() -> dict[str, Any]:
    return read_table("sources")


def _known() -> str:
    return ", ".join(sorted(sources()))


def _refuse(everything: list[Given]) -> None:
    """Refuses programs that do not train, other objectives, and sources that are not converted."""
    idle = tuple(_table()["not training"].split(", "))
    objectives = {name: what for what, names in _table()["objectives"].items() for name in names.split()}
    for one in everything:
        if one.key != PROGRAM:
            continue
        program = str(one.value)
        if program.rpartition(" ")[2].startswith(idle):
            raise UserError(f"{one.source} starts {program}, which does not train: give the script that does.")
        name = program.removeprefix("trl ").removesuffix(".py").removesuffix("_vlm").removesuffix("_no_trainer")
        if program.startswith(("trl ", name)) and name in objectives:
            raise other_objective(one, objectives[name])
    for source in _table()["refused"]:
        programs, keys = _programs(source), source.get("keys", "").split()
        for one in everything:
            if one.key == PROGRAM:
                tells = bool(programs) and f"{one.value}.".startswith(programs)
            else:
                tells = any(_is_key(key, one.key) for key in keys)
            if tells:
                place = f"{one.value} in {one.source}" if one.key == PROGRAM else f"{one.key} in {one.source}"
                raise UserError(
                    f"{place} belongs to {source['name']}, whose configurations are not converted: write the run's "
                    f"file from docs/coming-from.md, which names the options here. Sources that are converted: "
                    f"{_known()}."
                )


def _is_key(key: str, found: str) -> bool:
    if key.endswith("."):
        return found.startswith(key)
    return found.endswith(key) if key.startswith(".") else found == key


def _programs(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row["programs"].split(", ")) if "programs" in row else ()


def _recognised(everything: list[Given]) -> str | None:
    """Returns the table of the first row that applies; else that of Hugging Face's Trainer, where one of the keys names
    the trained parameters, or that of the launchers.
    """
    keys = {part for one in everything for part in (one.key, one.key.partition(".")[0]) if not one.idle}
    script = {one.key for one in everything if one.idle and one.key != one.key.upper()}
    programs = [str(one.value) for one in everything if one.key == PROGRAM]
    for row in _table()["recognised"]:
        if _applies(row, keys, script, programs):
            table: str | None = row["table"]
            return table
    flags = [one.key for one in everything if launcher_rules.rule_for(one.key) is None and not one.idle]
    if any(_trains(trainer("hugging_face").rule(key)) for key in flags):
        return "hugging_face"
    launched = keys & set(_table()["launched"].split())
    return "launchers" if launched and not (programs and _has_own_flags(flags)) else None


def _applies(row: Mapping[str, Any], keys: set[str], script: set[str], programs: list[str]) -> bool:
    if "programs" in row and not any(name.startswith(_programs(row)) for name in programs):
        return False
    if "keys" in row and not (keys | script if row.get("script") else keys) & set(row["keys"].split()):
        return False
    if any(name in row and not keys & set(row[name].split()) for name in ("with", "also")):
        return False
    return not keys & set(row.get("without", "").split())


def _has_own_flags(flags: list[str]) -> bool:
    """Returns whether a script has its own options, none of which configures training."""
    return any(not key.startswith("(") and key != key.upper() for key in flags)


def _trains(rule: Rule | None) -> bool:
    """Returns whether a key names the trained parameters or configures their training; data, or a folder for the
    results, alone do not."""
    return rule is not None and any(not option.startswith(("checkpoint.", "log.", "data.")) for option in rule.options)
