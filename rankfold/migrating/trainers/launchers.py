"""Rules for accelerate's and DeepSpeed's files alone: the script that they start decides what to train, and is
missing.
"""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion


def finish(conversion: Conversion) -> None:
    conversion.notes.append(
        "only the launcher's side was given: the script's own options, such as the learning rate and the steps, "
        "are not in it; give its command line with --flags"
    )
