"""Builds the documentation's site, or serves it while one writes.

python -m tools.docs_site build    # into build/docs/site, from which it opens without a server
python -m tools.docs_site serve    # at http://127.0.0.1:8000, again after each change of a page
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from engine.config.command_line import CommandLine
from tools.docs_site.navigation import navigation
from tools.docs_site.pages import repository_files, site_pages

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Path(__file__).with_name("site.yml")
_PAGES, _SITE = "pages", "site"


def main() -> None:
    parser = CommandLine(prog="python -m tools.docs_site", description=__doc__)
    parser.add_argument("command", choices=("build", "serve"))
    parser.add_argument("--out", type=Path, default=ROOT / "build/docs", help="folder for it (default build/docs)")
    arguments = parser.parse_args()
    if arguments.command == "serve":
        serve(arguments.out)
    else:
        sys.exit(build(arguments.out))


def build(out: Path) -> int:
    """Builds the site in `out`/site. A link or an anchor that leads nowhere is an error.

    Returns:
        The status of the builder: 0 where it had nothing to warn of.
    """
    shutil.rmtree(out / _SITE, ignore_errors=True)
    settings = write_sources(out)
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", settings]).returncode


def serve(out: Path) -> None:
    """Serves the site until Ctrl-C; pages that change are made again within a second."""
    settings = write_sources(out)
    seen = _changed()
    with subprocess.Popen([sys.executable, "-m", "zensical", "serve", "-f", settings]) as server:
        try:
            while server.poll() is None:
                time.sleep(1)
                if (now := _changed()) != seen:
                    write_sources(out)
                    seen = now
        except KeyboardInterrupt:
            server.terminate()


def write_sources(out: Path) -> Path:
    """Writes what the builder reads, the pages and its settings, and returns the file of the settings."""
    written = {out / _PAGES / uri: text.encode() for uri, text in site_pages(ROOT).items()}
    for file in (ROOT / "docs").rglob("*"):
        if file.is_file() and file.suffix != ".md":
            written[out / _PAGES / file.relative_to(ROOT / "docs")] = file.read_bytes()
    settings = out / "mkdocs.yml"
    given = yaml.safe_dump({"site_dir": _SITE, "nav": navigation(ROOT)}, sort_keys=False, allow_unicode=True)
    text = SETTINGS.read_text(encoding="utf-8").replace("python:\n", f"python:\n          paths: ['{ROOT}']\n", 1)
    written[settings] = f"{text}\n{given}".encode()
    for old in {*(out / _PAGES).rglob("*")} - written.keys():
        if old.is_file():
            old.unlink()
    for file, content in written.items():
        if not file.exists() or file.read_bytes() != content:  # the builder makes again what was written
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return settings


def _changed() -> dict[Path, float]:
    files = [SETTINGS, *(ROOT / path for path in repository_files(ROOT)), *(ROOT / "docs").rglob("*")]
    return {file: file.stat().st_mtime for file in files if file.is_file()}


if __name__ == "__main__":
    main()
