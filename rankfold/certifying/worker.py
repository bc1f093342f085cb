"""One rank of a layout that is being certified, started only by rankfold/certifying/ranks.py.

It reads the configuration from the folder that is its only argument, and writes its results into it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.config.load import from_yaml
from engine.errors import UserError
from engine.runtime.launch import start, stop
from engine.telemetry.errors import run_command
from engine.telemetry.log import Log
from rankfold.certifying.certificate import record_run

RECIPE = "recipe.json"
REFUSED = "refused_{}.txt"
"""The file in which a rank leaves the sentence of a UserError, for its starter to print."""


def main(folder: Path) -> None:
    """Trains and records as the recipe in `folder` says.

    Raises:
        UserError: the run cannot work.
    """
    recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    launch = start()
    try:
        # rank 0's stdout is shown, with the layout as prefix; stderr is kept for failures
        record_run(from_yaml(recipe["config"]), launch, Log(launch.rank, sys.stdout), folder, recipe["steps"])
    except UserError as error:
        (folder / REFUSED.format(launch.rank)).write_text(str(error), encoding="utf-8")
        raise
    stop()


if __name__ == "__main__":
    run_command(lambda: main(Path(sys.argv[1])))
