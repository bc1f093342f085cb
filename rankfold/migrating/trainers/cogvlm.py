"""Rules for CogVLM2's own script of PEFT, finetune_demo/peft_lora.py, which trains in a loop of its own."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, number, sets
from rankfold.migrating.given import Given

_SPLIT = "data.validation_split"


@sets("data.train")
def dataset(conversion: Conversion, given: Given) -> None:
    conversion.add_fact(
        given,
        "data.train of the hub",
        f"{given.value} (a folder of images and labels_en)",
        "data.train: write its records",
    )


@sets(_SPLIT)
def rate(conversion: Conversion, given: Given) -> None:
    share = number(given)
    if share < 1:
        conversion.take(given, _SPLIT, round(1 - share, 6), "1 less this")
    else:
        conversion.drop(given, "all of the data is trained on")


def finish(conversion: Conversion) -> None:
    facts = conversion.facts
    length = facts.get("input_length", 128) + facts.get("output_length", 128) + 2303
    conversion.set_default("derived", "max_input_len + max_output_len + 2303", "data.seq_length", length)
    conversion.notes.append(
        "the script draws one round of each record at random, and pads; here each answer of a record is a sample"
    )
