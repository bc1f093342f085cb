"""The tables of trainers: entries that are known, and no key in two of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rankfold.migrating import table as reader
from rankfold.migrating.conversion import Conversion, Rule
from rankfold.migrating.given import Given
from rankfold.migrating.recognition import sources
from rankfold.migrating.table import RULE_ENTRIES, read_table, table_rules, trainer

FOLDER = Path(reader.__file__).parent / "tables"
TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "sources")
OTHERS = {
    "name", "read", "from", "defaults from", "without", "blocks", "empty is absent", "ignored", "installed", "defaults",
    "ours", "adapters", "finish", "dropout with answers",
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_entries_are_known_and_keys_are_unique(name: str) -> None:
    """An entry that is misspelt would say nothing, and the later of two rows for a key would win."""
    data = read_table(name)
    assert data.keys() <= {*RULE_ENTRIES, *OTHERS} and data["read"]
    counts = Counter(key for entry in RULE_ENTRIES for keys in data.get(entry, {}).values() for key in keys.split())
    counts += Counter(data.get("ignored", "").split())
    assert [key for key, count in counts.items() if count > 1] == []


def test_every_table_is_a_source_or_part_of_one() -> None:
    named = {table for tables in sources().values() for table in tables}
    bases = {base for name in TABLES for base in read_table(name).get("from", ())}
    assert set(TABLES) == named | bases | {"launcher"}


def _applied(rule: Rule, value: Any) -> str:
    conversion = Conversion()
    rule.apply(conversion, Given(source="file", key="key", value=value))
    return conversion.rows[-1].became


@pytest.mark.parametrize(
    ("name", "key", "value", "became"),
    [
        ("hugging_face", "learning_rate", "1e-4", "optim.lr: 0.0001"),
        ("hugging_face", "train_on_source", True, "data.mask_prompt: false"),
        ("hugging_face", "max_steps", -1, "dropped: not a number of steps; epochs end the run"),
        ("hugging_face", "bits", 4, "model.base_dtype: nf4"),
        ("hugging_face", "bits", 3, "dropped: no counterpart, model.base_dtype is nf4 (4 bits), int8 or fp8 (8 bits)"),
        ("megatron", "recompute_granularity", "block", "dropped: switched off"),
        ("axolotl", "sequence_len", "", "dropped: left empty"),
        ("axolotl", "trl.temperature", 0.5, "rollout.temperature: 0.5"),
        ("deepspeed", "steps_per_print", "auto", "dropped: auto: the command line sets it"),
    ],
)
def test_rows_of_a_table(name: str, key: str, value: Any, became: str) -> None:
    assert _applied(table_rules(name)[key], value) == became


def test_fields_of_the_installed_package_are_known() -> None:
    """Where no table names them: whoever upgrades transformers is not told that its new fields are unknown."""
    rule = trainer("trl").field_of_package("ddp_broadcast_buffers")
    assert rule is not None and _applied(rule, True) == f"dropped: {reader.IGNORED}"
    assert trainer("trl").field_of_package("no_such_field") is None
