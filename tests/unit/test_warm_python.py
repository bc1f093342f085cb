"""The server of warm processes outlives those who ask and are killed meanwhile, as tests of limits kill them."""

from __future__ import annotations

import array
import json
import socket
import subprocess

import pytest

from tests.support.warm_python import warm_python

REQUEST = json.dumps([["-c", "import time; time.sleep(60)"], "/", {}]).encode()


@pytest.mark.parametrize("sent", [None, b"", REQUEST[:5], REQUEST], ids=["nothing", "no text", "a part", "all"])
def test_one_that_asks_and_is_gone(sent: bytes | None) -> None:
    program = warm_python()
    with socket.socket(socket.AF_UNIX) as asks:
        asks.connect(str(program.with_name("socket")))
        if sent is not None:
            streams = array.array("i", [0, 1, 2])
            asks.sendmsg([len(REQUEST).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            asks.sendall(sent)
    done = subprocess.run([program, "-c", "print(7)"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr
