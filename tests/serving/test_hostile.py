"""Clients that send what no client should, with a stand-in for the model: none is answered 500, learns of another's,
takes memory without bound, or keeps others from being served."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import UserError
from rankfold.serving import protobuf
from rankfold.serving.loss_request import head_of, read_forward_backward
from rankfold.serving.protobuf import WireError, decode, encode
from tests.serving.asgi import KEY, OTHER_KEY
from tests.serving.bodies import adam, datum, forward_backward, sample
from tests.support.sweeps import sampled

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from rankfold.serving import connections
from rankfold.serving.connections import Connections
from rankfold.serving.server import Address, _Server, listen
from tests.serving.stand_in import Served, served
from tests.serving.test_front import data

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**19, 1.5, -0.0, 1e308, 1e-320, "", "x", "\0",
    "a\0b", "\u00e9\U0001d11e",
    "..", "../../../etc/passwd", "/etc/passwd", "tinker://../weights/x", "tinker://a/weights/../../x", "tinker://",
    "tinker://%2e%2e/weights/a", "x" * 300, "x" * 5000, "adamw", "unnamed-x", "\u202e", [], [1], ["x"], [[]], [None],
    {},    {"type": "adamw"}, {"": {}}, {"rank": 10**18}, [{"type": "encoded_text", "tokens": [1]}], {"chunks": [{}]},
)  # fmt: skip
SILENT = ("cancel_future", "retrieve_futures", "sessions/search")
"""Requests that are answered with what is one's own, be it nothing."""
REFUSED = {400, 404, 405, 408, 410, 413, 415, 422, 429}


class Victim:
    """What the first key has."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.model = f"{session}:train:0"
        self.sampler = f"{session}:sample:0"
        self.path = f"tinker://{self.model}/weights/one"
        self.promise = f"{self.model}:0"

    def requests(self, own: str) -> list[tuple[str, str, dict[str, Any] | bytes | None]]:
        """Requests that name it: method, path and body; `own` is a session of who sends them."""
        model = {"model_id": self.model, "seq_id": 2}
        create = {"model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1}}
        sampler = {"sampling_session_seq_id": 5, "model_path": self.path}
        run = f"training_runs/{self.model}"
        one = f"{run}/checkpoints/weights/one"
        posts: list[tuple[str, dict[str, Any] | bytes]] = [
            ("session_heartbeat", {"session_id": self.session}),
            (f"sessions/{self.session}/finish", {}),
            ("create_model", {"session_id": self.session, **create}),
            ("create_sampling_session", {"session_id": own, **sampler}),
            ("join_sampling_session", {"session_id": own, "sampling_session_id": self.sampler}),
            ("get_info", {"model_id": self.model}),
            ("optim_step", adam(self.model, 2)),
            ("forward_backward", forward_backward(self.model, 2, data())),
            ("save_weights", {**model, "path": "two", "overwrite": True}),
            ("save_weights_for_sampler", {**model, "sampling_session_seq_id": 0}),
            ("save_weights_external", {**model, "path": "two"}),
            ("load_weights", {"session_id": own, "model_seq_id": 0, "path": self.path, "optimizer": True}),
            ("copy_weights", {"session_id": own, "tinker_path": self.path, "source_path": self.path, "path": "a"}),
            ("unload_model", {"model_id": self.model}),
            ("weights_info", {"tinker_path": self.path}),
            ("asample", sample(self.sampler, 0, [3])),
            ("retrieve_future", {"request_id": self.promise}),
            ("retrieve_futures", {"request_ids": [self.promise], "session_id": self.session}),
            ("cancel_future", {"request_id": self.promise}),
            ("create_custom_loss", {"model_id": self.model, "seq_id": 2, "graph": {}}),
            (f"{one}/publish", {}),
            ("sessions/search", {"query": self.session}),
        ]
        puts: list[tuple[str, dict[str, Any]]] = [
            (f"{one}/ttl", {"ttl_seconds": 3600}),
            (f"sessions/{self.session}/project", {"project_id": "x"}),
        ]
        gets = [
            f"samplers/{self.sampler}", run, f"{run}/checkpoints", f"{one}/archive", f"{one}/external_weights_urls",
            f"sessions/{self.session}", f"sessions/{self.session}/trace_export",
        ]  # fmt: skip
        return [
            *(("POST", path, body) for path, body in posts),
            *(("PUT", path, body) for path, body in puts),
            *(("GET", path, None) for path in gets),
            *(("DELETE", path, None) for path in (one, f"{one}/publish")),
        ]


async def made_victim(server: Served) -> Victim:
    found = Victim(await server.session())
    await server.create(found.session)
    await server.ask("save_weights", {"model_id": found.model, "seq_id": 1, "path": "one"})
    while (await server.result(f"{found.model}:1")).status == 408:
        pass
    body = {"session_id": found.session, "sampling_session_seq_id": 0, "model_path": found.path}
    assert (await server.ask("create_sampling_session", body)).status == 200
    return found


def belongings(server: Served) -> list[Any]:
    """All that the journal has, but commands, sessions, models and samplers of the second key."""
    base = server.journal._base
    owner = base.execute("SELECT owner FROM sessions ORDER BY rowid").fetchone()
    return [base.execute(f"SELECT * FROM {table} WHERE owner = ?", owner).fetchall() for table in (
        "sessions", "models", "commands", "samplers")]  # fmt: skip


def test_another_key_learns_nothing(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        victim = await made_victim(server)
        before = belongings(server)
        own = await server.session(key=OTHER_KEY)
        absent = Victim("0" * len(victim.session))
        pairs = zip(victim.requests(own), absent.requests(own), strict=True)
        for (method, path, body), (_, path_0, body_0) in pairs:
            found = await server.ask(path, body, key=OTHER_KEY, method=method)
            nothing = await server.ask(path_0, body_0, key=OTHER_KEY, method=method)
            assert found.status == nothing.status and (found.status in REFUSED or path in SILENT), (path, found)
            assert found.body.replace(victim.session.encode(), absent.session.encode()) == nothing.body, path
        for path in ("checkpoints", "training_runs", "sessions", f"sessions/{own}"):
            found = await server.ask(path, key=OTHER_KEY)
            assert found.status == 200 and victim.session.encode() not in found.body, found
        assert belongings(server) == before

    served(tmp_path, use)


def mutated(drawn: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A body with some fields, also inner ones, replaced, removed or added."""
    found = json.loads(json.dumps(body))
    for _ in range(drawn.randrange(1, 4)):
        place = found
        while (inner := [one for one in place.values() if isinstance(one, dict) and one]) and drawn.random() < 0.5:
            place = drawn.choice(inner)
        name = drawn.choice([*place, "path", "model_path", "seq_id", "adam_params", "optimizer_config"])
        if drawn.random() < 0.2:
            place.pop(name, None)
        else:
            place[name] = deepcopy(drawn.choice(VALUES))
    return dict(found)


@pytest.mark.parametrize("count", sampled([150, 6000], quick=[150]))
def test_random_requests_are_answered(tmp_path: Path, count: int) -> None:
    drawn = random.Random(count)

    async def use(server: Served) -> None:
        victim = await made_victim(server)
        before = belongings(server)
        own = await server.session(key=OTHER_KEY)
        await server.create(own, key=OTHER_KEY)
        mine = Victim(own)
        for _ in range(count):
            method, path, body = drawn.choice((victim if drawn.random() < 0.5 else mine).requests(own))
            if isinstance(body, bytes):
                body = {"seq_id": 1} if path == "forward_backward" else json.loads(body)
            sent = json.dumps(mutated(drawn, body or {})).encode()
            if drawn.random() < 0.2:
                sent = sent[: drawn.randrange(len(sent))] + drawn.randbytes(drawn.randrange(3))
            answer = await server.ask(path, sent, key=OTHER_KEY, method=method)
            assert answer.status == 200 or answer.status in REFUSED, (path, sent, answer)
            assert answer.status == 200 or answer.json.get("detail") or answer.status == 408, (path, sent, answer)
        assert belongings(server) == before and not server.lost
        assert (await server.result(victim.promise)).status == 200

    served(tmp_path, use, poll_seconds=0.001, models=1000)


def test_json_that_takes_more_than_its_bytes(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        model = (await server.create(await server.session())).json["model_id"]
        for body, status in (
            (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
            (b'{"a": [' + b"[]," * 100_000 + b"[]]}", 400),
            (b'{"a": ' + b'{"b":' * 10_000 + b"1" + b"}" * 10_001, 400),
            (b'{"model_id": 1, "model_id": 2}', 400),
            (b'{"seq_id": ' + b"9" * 100_000 + b"}", 400),
            (b'{"model_id": "\\ud800"}', 400),
            (b'{"model_id": NaN}', 400),
            (b"[]", 400),
            (b"", 400),
            (b'"' + b"x" * (9 << 20) + b'"', 413),
        ):
            answer = await server.ask("optim_step", body, headers={"content-length": str(len(body))})
            assert answer.status == status and ("connection" in answer.headers) == bool(body), (body[:40], answer)
        chunks = [b"x" * (1 << 20)] * 9
        assert (await server.ask("optim_step", chunks)).status == 413
        much = await server.ask("optim_step", adam(model, 1), headers={"content-length": "9" * 30})
        assert much.status == 200, "the server that counts the bytes refuses a wrong number"
        for encoding in ("gzip", "zstd", "br", "gzip, gzip"):
            assert (await server.ask("optim_step", b"x", headers={"content-encoding": encoding})).status in (400, 415)

    served(tmp_path, use)


def test_a_key_waits_for_room_for_its_own_bodies_alone(tmp_path: Path) -> None:
    async def use(server: Served) -> None:
        room = server.service._room
        async with room.taken("one", 90 << 20), room.taken("other", 90 << 20), room.taken("one", 1000):
            waits = asyncio.ensure_future(room.taken("one", 90 << 20).__aenter__())
            await asyncio.sleep(0.01)
            assert not waits.done()
        await asyncio.wait_for(waits, 1)

    served(tmp_path, use)


def random_message(drawn: random.Random, depth: int = 0) -> bytes:
    """Fields with random numbers, wire types and lengths, some of them messages."""
    out = bytearray()
    for _ in range(drawn.randrange(6)):
        number, wire = drawn.choice([0, 1, 2, 3, 4, 5, 7, 8, 2**29]), drawn.choice([0, 1, 2, 2, 2, 2, 3, 5, 7])
        out += _varint(number << 3 | wire)
        if wire == 2:
            inner = random_message(drawn, depth + 1) if depth < 6 else drawn.randbytes(drawn.randrange(9))
            out += _varint(len(inner) if drawn.random() < 0.9 else drawn.choice([2**63, 2**64, len(inner) + 1, 0]))
            out += inner
        else:
            out += drawn.randbytes({0: 1, 1: 8, 5: 4}.get(wire, 2))
    return bytes(out[: drawn.randrange(len(out) + 1)]) if drawn.random() < 0.2 else bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@pytest.mark.parametrize("count", sampled([500, 100_000], quick=[500]))
def test_random_messages_are_read_or_refused(count: int) -> None:
    drawn = random.Random(count)
    good = encode("ForwardBackwardRequest", {"model_id": "m", "seq_id": 1, "loss_fn": "cross_entropy"})
    for _ in range(count):
        body = good + random_message(drawn)
        with suppress(UserError):
            head_of(body)
        with suppress(UserError):
            read_forward_backward(body, vocab_size=90, limit=64)


def test_a_message_of_small_fields_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "MOST_PIECES", 1000)
    for body in (
        b"\x1a\x00" * 1001,  # data without fields
        b"\x1a\x08\x12\x06\x12\x04\x18\x01\x18\x01" * 300,  # fields of a tensor
        b"\x1a\x82\x08\x12\xff\x07\x12\xfc\x07\x22\xf9\x07" + b"\x01" * 1017,  # a shape of many numbers
    ):
        with pytest.raises(WireError, match="more than 1000 fields"):
            decode("ForwardBackwardRequest", body)
    deep = b""
    for _ in range(3000):
        deep = b"\x1a" + _varint(len(deep)) + deep
    with suppress(WireError):
        decode("ForwardBackwardRequest", deep)
    head = encode("ForwardBackwardRequest", {"model_id": "m", "seq_id": 1})
    with pytest.raises(UserError, match="more than 20000 fields"):
        head_of(head + b"\x1a\x00" * 20_000)
    began = time.perf_counter()
    assert head_of(head + b"\x1a\x80\x80\x80\x04" + bytes(8 << 20)) == ("m", 1), "its data are not read"
    assert time.perf_counter() - began < 1.0


def test_sparse_tensors_that_say_they_are_large() -> None:
    large = {"sparse_csr": {"crow_indices": bytes(16)}, "dtype": 2, "shape": [1, 1 << 22]}
    one = datum([3], [4])
    one["loss_fn_inputs"]["target_tokens"] = large
    body = forward_backward("m", 1, [one] * 1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="targets, as many as are read at a time"):
        read_forward_backward(body, vocab_size=90, limit=64)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "in KiB: below 1 GiB"


@contextmanager
def listening(folder: Path, **limits: Any) -> Iterator[tuple[Served, Callable[[], socket.socket]]]:
    """A front that listens, and a function that connects to it."""
    made = Served(folder, **limits)
    made.start()
    socket_ = listen(Address(host="127.0.0.1", port=0))
    server = _Server(made.front)
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([socket_])))
    thread.start()
    address = socket_.getsockname()
    try:
        yield made, lambda: socket.create_connection(address, timeout=20)
    finally:
        server.should_exit = True
        thread.join(20)
        made.close()
        assert not thread.is_alive()


def head(method: str, path: str, **headers: object) -> bytes:
    lines = [f"{method} /api/v1/{path} HTTP/1.1", "Host: localhost", f"X-API-Key: {KEY}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the other side ends, or nothing comes for a while."""
    found = b""
    connection.settimeout(2)
    with suppress(OSError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def healthy(connect: Callable[[], socket.socket]) -> float:
    """Seconds until a request is answered."""
    began = time.monotonic()
    with closing(connect()) as other:
        other.sendall(head("GET", "healthz", Connection="close"))
        assert answer_of(other).startswith(b"HTTP/1.1 200")
    return time.monotonic() - began


def test_streams_without_end_are_cut(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    part = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    with listening(tmp_path, body_bytes=4 << 20, body_seconds=1.0) as (_, connect):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for path, key in (("forward_backward", KEY), ("forward_backward", "tml-nobody-has-this-one"), ("nothing", KEY)):
            with closing(connect()) as stream:
                stream.sendall(head("POST", path, Transfer_Encoding="chunked").replace(KEY.encode(), key.encode()))
                sent = 0
                with suppress(OSError):
                    while sent < 64:
                        stream.sendall(part)
                        sent += 1
                assert sent < 40, f"{path}: {sent} MiB were taken"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "in KiB"
        with closing(connect()) as stream:  # says that much comes, and sends little
            stream.sendall(head("POST", "forward_backward", Content_Length=1 << 40) + b"x")
            assert answer_of(stream).startswith(b"HTTP/1.1 413")
        with closing(connect()) as slow:
            slow.sendall(head("POST", "forward_backward", Content_Length=1000) + b"x")
            assert answer_of(slow).startswith(b"HTTP/1.1 408")
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out


def test_http_that_is_odd(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with listening(tmp_path) as (_, connect):
        get = head("GET", "get_server_capabilities")
        end = head("GET", "get_server_capabilities", Connection="close")
        for sent, expected, count in (
            (get + end, b"HTTP/1.1 200", 2),  # pipelined
            (head("HEAD", "healthz", Connection="close"), b"HTTP/1.1 200", 1),
            (head("OPTIONS", "optim_step", Origin="http://evil.example", Connection="close",
                  Access_Control_Request_Headers="x-api-key"), b"HTTP/1.1 405", 1),
            (end.replace(b"/api", b"/api" + b"x" * 100_000), b"HTTP/1.1 4", 1),
            (head("GET", "samplers/%00%ff%2e%2e%2f", Connection="close"), b"HTTP/1.1 404", 1),
            (head("GET", "../../etc/passwd", Connection="close"), b"HTTP/1.1 404", 1),
            (head("GET", "healthz", Upgrade="websocket", Connection="Upgrade, close"), b"HTTP/1.1 200", 1),
            (head("POST", "optim_step", Content_Length="-1"), b"HTTP/1.1 400", 1),
            (head("POST", "optim_step", Content_Length=1, Transfer_Encoding="chunked") + b"0\r\n\r\n", b"HTTP/1.1 400",
             1),
            (head("POST", "optim_step", Transfer_Encoding="chunked") + b"zz\r\n", b"HTTP/1.1 400", 1),
            (b"\x16\x03\x01\x02\x00", b"HTTP/1.1 400", 1),  # TLS
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.1 404", 2),
        ):  # fmt: skip
            with closing(connect()) as connection:
                connection.sendall(sent)
                found = answer_of(connection)
                assert found.startswith(expected) and found.count(b"HTTP/1.1") == count, (sent[:80], found[:200])
                assert b"access-control" not in found.lower()
        for number in range(20):
            with closing(connect()) as connection:
                connection.sendall(random.Random(number).randbytes(500) + b"\r\n\r\n")
                assert answer_of(connection).startswith(b"HTTP/1.1 4")
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out


@pytest.mark.slow
def test_connections_that_send_nothing_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_SECONDS", 1.0)
    with listening(tmp_path) as (_, connect):
        idle = [connect() for _ in range(300)]
        for number, one in enumerate(idle):
            one.sendall(b"POST /api/v1/optim_step HTTP/1.1\r\nHost: a\r\nX-" + b"x" * (number % 7))
        assert healthy(connect) < 1.0
        ends = time.monotonic() + 10
        for one in idle:
            one.settimeout(max(0.1, ends - time.monotonic()))
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
            one.close()


def test_connections_beyond_a_number_are_ended() -> None:
    ended: list[int] = []

    def made(number: int, *, to_read: int = 0, rests: bool = True) -> Any:
        transport = SimpleNamespace(get_write_buffer_size=lambda: to_read, abort=lambda: ended.append(number))
        return Protocol(transport, SimpleNamespace(response_complete=rests))

    class Protocol:
        def __init__(self, transport: object, cycle: object) -> None:
            self.transport, self.cycle = transport, cycle

    watched = Connections()
    some = [made(0, to_read=9), made(1, rests=False), made(2)]
    watched.look(some, 0.0)
    watched.look(some, connections.READ_SECONDS + 1)
    assert ended == [0], "who reads nothing"
    watched.look(some[1:], connections.NEXT_SECONDS + 1)
    assert ended == [0, 2], "who asks for nothing"
    ended.clear()
    many = [made(number, rests=number != 1) for number in range(connections.MOST)]
    watched.look(many, 1000.0)
    more = [made(-number) for number in range(1, 3)]
    watched.look(many + more, 1001.0)
    assert ended == [0, 2]


def test_a_server_that_ends_answers_who_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfold.serving.server._ENDING_SECONDS", 0.3)
    with listening(tmp_path, poll_seconds=30.0) as (made, connect):
        made.backend.goes.clear()
        session = asyncio.run(made.session())
        asyncio.run(made.create(session))
        body = json.dumps({"request_id": f"{session}:train:0:0"}).encode()
        poll = connect()
        poll.sendall(head("POST", "retrieve_future", Content_Length=len(body)) + body)
        slow = connect()
        slow.sendall(head("POST", "optim_step", Content_Length=1000) + b"x")
        time.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert answer_of(poll).startswith(b"HTTP/1.1 408")
    poll.close()
    slow.close()
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
