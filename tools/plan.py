"""Plans a run before it is started, and certifies its layout: `rankfold plan` as a script."""

import installed  # noqa: F401 - before what needs it

from engine.telemetry.errors import run_command
from rankfold.plan import main

if __name__ == "__main__":
    run_command(main)
