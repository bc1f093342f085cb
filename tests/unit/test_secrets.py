"""The key of a server, which no process that a run starts may read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UserError
from engine.runtime.secrets import secret, take_secret

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-0123456789abcdef"
SPARE_PAGE = 65534
PROGRAM = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
from engine.runtime.secrets import secret, take_secret

key = sys.argv[3][::-1]
if sys.argv[2] == "ordinary" and os.geteuid() == 0:
    os.setgroups([])
    os.setgid(SPARE_PAGE)
    os.setuid(SPARE_PAGE)
    ctypes.CDLL(None).prctl(4, 1)  # as any program begins that this user starts
if sys.argv[4] == "takes":
    take_secret("A_KEY")
    assert secret("A_KEY") == key
    assert b"\\n" in open("/proc/self/maps", "rb").read() and os.readlink("/proc/self/ns/pid")  # what the engine reads
own = os.getpid()
if os.fork() == 0:
    for name in ("environ", "mem"):
        try:
            with open(f"/proc/{own}/{name}", "rb") as file:
                print(name, name == "mem" or key.encode() in file.read())
        except PermissionError:
            print(name, "closed")
    print("variable", "A_KEY" in os.environ, flush=True)
    os._exit(0)
os.wait()
""".replace("SPARE_PAGE", str(SPARE_PAGE))


def seen_by_a_child(user: str, how: str) -> dict[str, str]:
    """What a child of a process with a key finds of it. Arguments have it reversed, to be no copy of it."""
    command = [sys.executable, "-c", PROGRAM, str(ROOT), user, KEY[::-1], how]
    found = subprocess.run(command, env=os.environ | {"A_KEY": KEY}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return dict(line.split() for line in found.stdout.splitlines())


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_child_finds_no_key() -> None:
    left = seen_by_a_child("ordinary", "leaves")
    assert (left["environ"], left["variable"]) == ("True", "True")
    assert seen_by_a_child("ordinary", "takes") == {"environ": "closed", "mem": "closed", "variable": "False"}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_environment_that_root_sees_has_no_key() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to whom the process is open")
    assert seen_by_a_child("root", "leaves")["environ"] == "True"
    assert seen_by_a_child("root", "takes")["environ"] == "False"


@pytest.mark.parametrize(("value", "found"), [("", None), ("  ", None), (" key\n", "key")])
def test_what_is_taken(value: str, found: str | None, no_secrets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANOTHER_KEY", value)
    take_secret("ANOTHER_KEY")
    assert secret("ANOTHER_KEY") == found and "ANOTHER_KEY" not in os.environ
    take_secret("ANOTHER_KEY")
    assert secret("ANOTHER_KEY") == found


def test_what_is_no_key_is_not_repeated(no_secrets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANOTHER_KEY", "a key")
    with pytest.raises(UserError, match="^ANOTHER_KEY has spaces"):
        take_secret("ANOTHER_KEY")
    assert "ANOTHER_KEY" not in os.environ
