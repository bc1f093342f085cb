"""Makes the pictures of docs/assets from what the product prints and writes.

python -m tools.docs_site.pictures terminal --out docs/assets/plan.svg --until Alternatives -- rankfold plan memory ...
python -m tools.docs_site.pictures report RUN_DIR --out docs/assets/report.png

The first executes a command and draws the lines that it prints, up to the one that begins with a word. The second takes
the top of a run's report as Chromium shows it (Debian's package chromium), and needs Pillow. Both are narrow, so that a
phone can show them at a size that can be read.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import tempfile
import textwrap
from html import escape
from pathlib import Path

from engine.config.command_line import CommandLine
from engine.errors import UserError
from engine.telemetry.errors import run_command

COLUMNS = 54
"""Characters of a line; a longer one continues on the next."""
_CHARACTER, _LINE, _EDGE = 8.43, 20, 16
"""Widths and heights of a terminal's text in a font of 14 pixels."""
_WIDTH, _SCALE, _COLOURS = 520, 1.5, 64
"""Pixels of the report's window, of the picture for each of them, and different colours in it."""


def main() -> None:
    parser = CommandLine(prog="python -m tools.docs_site.pictures", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    terminal = kinds.add_parser("terminal", help="what a command prints, as SVG")
    terminal.add_argument("--until", default="", help="beginning of the first line that is left out")
    terminal.add_argument("command", nargs=argparse.REMAINDER, help="behind --")
    report = kinds.add_parser("report", help="the top of a report, as PNG")
    report.add_argument("run", type=Path, help="folder of a run")
    report.add_argument("--height", type=int, default=900, help="pixels of the page (default 900)")
    for kind in (terminal, report):
        kind.add_argument("--out", type=Path, required=True, help="the picture")
    arguments = parser.parse_args()
    if arguments.kind == "terminal":
        words = arguments.command[arguments.command[:1] == ["--"] :]
        arguments.out.write_text(terminal_picture(words, arguments.until), encoding="utf-8")
    else:
        report_picture(arguments.run, arguments.out, arguments.height)
    print(f"wrote {arguments.out}")


def terminal_picture(command: list[str], until: str = "") -> str:
    """Executes a command and returns its lines on a terminal as SVG, whose text can be searched and selected.

    Args:
        until: beginning of the first line that is left out; "" for none.

    Raises:
        UserError: the command fails.
    """
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
    shown = [f"$ {shlex.join(command)}", ""]
    for line in done.stdout.splitlines():
        if until and line.startswith(until):
            break
        shown.append(line)
    lines = [part for line in shown for part in _wrapped(line)]
    while not lines[-1]:
        lines.pop()
    return _svg(lines)


def report_picture(run: Path, out: Path, height: int) -> None:
    """Writes the top of a run's report as a PNG of few colours.

    Args:
        run: folder of the run.
        out: the picture.
        height: pixels of the page that are shown.

    Raises:
        UserError: Chromium or Pillow is missing, or one of the commands fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        page, shot = Path(temporary, "report.html"), Path(temporary, "shot.png")
        _execute("rankfold", "report", run, "--out", page)
        _execute(
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--hide-scrollbars", f"--user-data-dir={temporary}/profile", f"--force-device-scale-factor={_SCALE}",
            f"--window-size={_WIDTH},{height}", f"--screenshot={shot}", page.as_uri(),
        )  # fmt: skip
        try:
            from PIL import Image
        except ImportError:
            raise UserError("Pillow is missing, which makes the picture small: pip install pillow.") from None
        picture = Image.open(shot).convert("RGB")
        picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)


def _execute(*command: object) -> None:
    words = [*map(str, command)]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"{words[0]} is not found: install it, or add its folder to PATH.") from None
    if done.returncode:
        raise UserError(f"{shlex.join(words)} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False) or [""]


def _svg(lines: list[str]) -> str:
    """Lines of text on a dark ground, in the reader's own font of fixed width, stretched to the width counted on."""
    width, height = round(COLUMNS * _CHARACTER) + 2 * _EDGE, len(lines) * _LINE + 2 * _EDGE
    rows = "\n".join(_row(number, line) for number, line in enumerate(lines) if line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        "<style>text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#e6e6e6;"
        "white-space:pre}.c{fill:#8ab4f8}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#1d1f23"/>\n{rows}\n</svg>\n'
    )


def _row(number: int, line: str) -> str:
    place = f'x="{_EDGE}" y="{_EDGE + 15 + number * _LINE}" textLength="{len(line) * _CHARACTER:.0f}"'
    kind = ' class="c"' if line.startswith("$") else ""
    return f"<text {place}{kind}>{escape(line)}</text>"


if __name__ == "__main__":
    run_command(main)
