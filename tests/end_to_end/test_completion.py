"""`rankfold completion`: lines typed into real shells on a terminal of their own, and the words that a command gets."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from engine.config.option_names import option_types
from engine.config.paths import PATH_OPTIONS
from engine.errors import UserError
from rankfold import completion
from rankfold.__main__ import COMMANDS

STARTS = {
    "bash": ["--norc", "--noprofile"],
    "zsh": ["-f"],
    "fish": ["--no-config"],
}
_PRINTED = "rankfold() { printf '<%s>' \"$@\" END; }"
SETUPS = {
    "bash": f"source bash; {_PRINTED}",
    "zsh": f"autoload -Uz compinit; fpath=($PWD/functions $fpath); compinit -u -D; {_PRINTED}",
    "fish": "source fish; function rankfold; printf '<%s>' $argv END; end",
}
"""Shell -> a line that loads its script, and puts a function that prints its words in place of the command."""
LINES = (
    ("quick\t", "quickstart"),
    ("train --parallel.ten\t 2", "train --parallel.tensor 2"),
    ("train --model.dtype bfl\t", "train --model.dtype bfloat16"),
    ("train --model.dtype=bfl\t", "train --model.dtype=bfloat16"),
    ("train --lora.dora tr\t", "train --lora.dora true"),
    ("train --config run.y\t", "train --config run.yaml"),
    ("train --config=run.y\t", "train --config=run.yaml"),
    ("train --npr\t 2 --model.path my-m\t", "train --nproc 2 --model.path my-model"),
    ("convert exp\t --form\t pe\t", "convert export --format peft"),
    ("plan mem\t --gpu-mem\t 80", "plan memory --gpu-memory 80"),
    ("generate --model my-m\t --kern\t tri\t", "generate --model my-model --kernels triton"),
    ("chat my-m\t", "chat my-model"),
    ("launch sl\t --nodes 2 --parallel.pipel\t 2", "launch slurm --nodes 2 --parallel.pipeline 2"),
    ("benchmark lora\t", "benchmark lora-tax"),
)
"""What is typed behind `rankfold ` -> the words of the command line."""
FILES = ["bash", "fish", "functions", "home", "my-model", "programs", "run.yaml", "zsh"]
"""In the folder where the shells run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    folder = tmp_path_factory.mktemp("completion")
    (folder / "run.yaml").touch()
    (folder / "my-model").mkdir()
    for made in ("functions", "home", "programs"):
        (folder / made).mkdir()
    (folder / "programs" / "ls").symlink_to(shutil.which("ls") or "/bin/ls")  # fish lists files by it
    for shell in completion.SHELLS:
        (folder / shell).write_text(completion.script(shell), encoding="utf-8")
    shutil.copy(folder / "zsh", folder / "functions" / "_rankfold")
    return folder


class _Shell:
    """An interactive shell that finds no program but ls: TAB can start no Python."""

    def __init__(self, name: str, folder: Path) -> None:
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"{name} is not installed")
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.chdir(folder)
            places = {"HOME": str(folder / "home"), "PATH": str(folder / "programs")}
            os.execve(path, [name, *STARTS[name]], {**places, "TERM": "dumb", "LC_ALL": "C.UTF-8"})
        self.run(f"{SETUPS[name]}; printf 'LOAD%s' END")

    def run(self, typed: str) -> str:
        """Types a line and returns the terminal from its last word on END."""
        os.write(self._terminal, f"{typed}\n".encode())
        shown, ends = "", time.monotonic() + 20
        while not re.search(r"(LOAD|<)END", shown):
            assert time.monotonic() < ends, f"nothing ran after {typed!r}: {shown[-2000:]!r}"
            if select.select([self._terminal], [], [], 0.2)[0]:
                shown += os.read(self._terminal, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        os.close(self._terminal)  # hangs up
        os.waitpid(self._process, 0)


@pytest.fixture(scope="module", params=completion.SHELLS)
def shell(request: pytest.FixtureRequest, folder: Path) -> Iterator[_Shell]:
    opened = _Shell(request.param, folder)
    yield opened
    opened.close()


@pytest.mark.parametrize(("typed", "words"), LINES, ids=[words for _, words in LINES])
def test_a_line_with_tabs_becomes_the_words(shell: _Shell, typed: str, words: str) -> None:
    shown = shell.run(f"rankfold {typed}")
    found = re.search(r"((?:<[^<>]*>)+)<END>", shown)
    assert found is not None and found[1].replace("/>", ">") == "".join(f"<{word}>" for word in words.split()), shown


def _in_bash(folder: Path, *lines: str) -> list[list[str]]:
    """Returns the completions of the last word of each line, which may be empty, without a terminal."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    calls = []
    for line in lines:
        words = line.split(" ")
        calls.append(f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}")
        calls.append('_rankfold_completion 2> /dev/null; echo "${COMPREPLY[*]}"')  # compopt is for a terminal
    script = "\n".join([(folder / "bash").read_text(encoding="utf-8"), *calls])
    done = subprocess.run(["bash", "--norc"], input=script, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [found.split() for found in done.stdout.split("\n")[: len(lines)]]


def test_all_commands_and_sections_are_offered(folder: Path) -> None:
    commands, sections, options = _in_bash(folder, "rankfold ", "rankfold plan ", "rankfold train --")
    assert commands == [*COMMANDS] and sections == ["schedule", "memory", "adapters", "certify"]
    assert {f"--{name}" for name in option_types()} < {*options}
    assert {"--config", "--nproc", "--profile", "--reward", "--print_config", "--help"} < {*options}


def test_values_of_options_are_offered(folder: Path) -> None:
    """A choice gets its words, a switch true and false, a path files, a number nothing."""
    wanted = {
        name: list(map(str, get_args(kind))) if get_origin(kind) is Literal else ["true", "false"] if kind is bool else
        FILES if name in PATH_OPTIONS else []
        for name, kind in option_types().items()
        if kind in (bool, int, float) or get_origin(kind) is Literal or name in PATH_OPTIONS
    }  # fmt: skip
    assert len(wanted) > 60 and {"parallel.tensor", "data.train"} < wanted.keys()
    found = _in_bash(folder, *(f"rankfold train --{name} " for name in wanted))
    given = dict(zip(wanted, found, strict=True))
    assert {name: sorted(words) for name, words in given.items()} == {name: sorted(wanted[name]) for name in wanted}


def test_no_two_options_share_a_name_in_the_script() -> None:
    """Characters that a variable of a shell cannot have become underscores."""
    for parser in [completion.described_parser()]:
        commands = next(action for action in parser._actions if action.dest == "command")
        assert commands.choices is not None and [*commands.choices] == [*COMMANDS]
        for command in commands.choices.values():  # type: ignore[attr-defined]
            flags = [flag for flag in command._option_string_actions if flag.startswith("--")]
            assert len({re.sub(r"\W", "_", flag) for flag in flags}) == len(flags)


def test_without_shtab_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rankfold completion", "bash"])
    monkeypatch.setattr(completion, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^rankfold completion needs shtab, which is not installed: pip install "):
        completion.main()


def test_an_unknown_shell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rankfold completion", "fihs"])
    with pytest.raises(UserError, match="has no shell 'fihs', but bash, zsh, fish: did you mean fish"):
        completion.main()


def test_printing_the_script_loads_no_torch() -> None:
    pytest.importorskip("shtab")
    code = "import sys; from rankfold import completion; completion.script('bash'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
