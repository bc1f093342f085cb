"""Writes a report of one run, or of several side by side: one HTML file that opens in any browser, without a network.

rankfold report RUN_DIR
rankfold report RUN_DIR OTHER_RUN_DIR --out compared.html

It shows the trained parameters, loss, throughput, parts of a step, memory of each rank, bandwidth (with
log.communication), the pipeline's timeline, options and environment; for several runs their differences, and their
speed against the number of devices where they do the same work.
"""

from __future__ import annotations

from pathlib import Path

from engine.config.command_line import CommandLine
from engine.config.run_files import REPORT
from engine.files.durable import write_durably
from engine.files.refusals import writing


def build_parser() -> CommandLine:
    """Returns the parser with all options."""
    parser = CommandLine(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--out", type=Path, help="HTML file (default: report.html in the first run's folder)")
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    # imported after the help, which draws nothing
    from rankfold.reporting.page import page
    from rankfold.reporting.reading import read_runs

    out = arguments.out or arguments.runs[0] / REPORT
    text = page(read_runs(arguments.runs))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_durably(out, text.encode(errors="replace"))  # a log can name half a character
    print(f"wrote {out}")
