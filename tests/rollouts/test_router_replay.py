"""Experts that a server says it chose for each token: read, checked, kept with their tokens, and given to routers."""

from __future__ import annotations

import base64
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, Routes
from engine.distillation.teacher_states import TeacherPasses, TeacherStates
from engine.errors import UserError
from engine.rollouts.buffer import Buffer
from engine.rollouts.data.routes import RouteShape, with_unknown
from engine.rollouts.sampler import Sampled
from engine.rollouts.servers.routes import read_int32, read_npy
from engine.rollouts.source import RolloutSource
from tests.distributed.cases import make_batch
from tests.support.agent_runs import agent_settings
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import prepared, stepped
from tests.support.served_runs import make_mixture, mixture_settings, served_settings
from tests.support.stock_routers import all_layers, as_int32, as_npy
from tests.support.sweeps import sampled
from tests.support.tool_runs import tool_settings

SHAPE = RouteShape(layers=(1, 3), num_layers=4, num_experts=6, per_token=2)
TOKENS = 3
ROUTES = np.array([[[0, 1], [5, 2]], [[3, 4], [4, 0]], [[2, 1], [1, 5]]])
WHOLE = all_layers(ROUTES, [1, 3], 4)
BOUND = 4e-6
"""Largest error of a log-probability, as transformers and the trainer see it: some units of fp32's last place at the
size of logits. With the trainer's own experts it is 0.6 here."""
KINDS = ("vllm", "sglang")
SMALL = {
    "train__global_batch_size": 8, "rollout__num_generations": 2, "optim__lr": 0.01, "rollout__show": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    mixture_settings(folder)
    return folder / "model"


def _settings(folder: Path, server: StandIn, **changes: object) -> dict[str, object]:
    given = mixture_settings(folder, server.url, **{**SMALL, "rollout__server_kind": server.kind, **changes})
    return given | {"model.path": server.model}


@pytest.mark.parametrize("kind", sampled(KINDS, ["vllm"]))
def test_the_trainer_agrees_with_routes_that_are_not_its_own(kind: str, model: Path, tmp_path: Path) -> None:
    """The server's routers choose by logits with noise. The second step is by adapters whose B is not 0."""
    with StandIn(model, kind, routes=True, noise=0.5) as server:
        steps = stepped(_settings(tmp_path, server, rollout__router_replay="auto"), 2)
        for step in steps:
            assert step["sampler_difference_max"] < BOUND
            assert 0.1 < step["sampler_routes"] < 0.9
        (without,) = stepped(_settings(tmp_path, server, rollout__router_replay="off"), 1)
    assert without["sampler_difference_max"] > 0.1 and "sampler_routes" not in without


def test_references_choose_for_themselves(model: Path, tmp_path: Path) -> None:
    """Before the first step, a reference that moves is the model without adapters, whose B is 0: with experts of its
    own both are as far from the policy, whose experts are the server's."""
    with StandIn(model, routes=True, noise=0.5) as server:
        settings = _settings(tmp_path, server, objective__beta=0.1)
        (base,) = stepped(settings, 1)
        (moving,) = stepped(settings | {"objective.reference_sync_steps": 5}, 1)
    assert base["kl"] > 1e-3 and moving["kl"] == pytest.approx(base["kl"], rel=1e-4)


def test_routes_of_the_same_choice_do_not_differ(model: Path, tmp_path: Path) -> None:
    with StandIn(model, routes=True) as server:
        (step,) = stepped(_settings(tmp_path, server), 1)
    assert step["sampler_routes"] == 0 and step["sampler_difference_max"] < BOUND


@pytest.mark.parametrize("kind", sampled(KINDS, ["vllm"]))
def test_a_server_without_routes(kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StandIn(model, kind) as server:
        (step,) = stepped(_settings(tmp_path, server), 1)
        assert step["sampler_difference_max"] < 5e-6 and "sampler_routes" not in step
        assert f"note: {server.url} returns no routed_experts" in capsys.readouterr().err
        asked = server.asked[-1].body
        assert "return_routed_experts" not in asked
        with pytest.raises(UserError, match="router_replay is on, and .* returns no routed_experts: start it with"):
            stepped(_settings(tmp_path, server, rollout__router_replay="on"), 1)


def test_teachers_choose_for_themselves() -> None:
    """A teacher that passes over the rows of a step may be a mixture too, with other layers and other experts."""
    batch = make_batch([(0, (6,))], row_length=6, seq_length=6, vocab_size=9, seed=1)
    routes = Routes(experts_MKBS=torch.zeros(1, 2, 1, 6, dtype=torch.uint8), layers=(0,))
    seen: list[Batch] = []

    def read(batches: list[Batch], head: object) -> list[torch.Tensor]:
        seen.extend(batches)
        return [torch.zeros(6, 4)]

    teacher: Any = SimpleNamespace(read_head=read, models=lambda: [None])
    (found,) = TeacherPasses([teacher], 9).taught([batch.with_parts(routes)])
    states = found.part(TeacherStates)
    assert found.part(Routes) is routes and states is not None
    assert seen[0].part(Routes) is None and states.batch.part(Routes) is None


@pytest.mark.slow
def test_a_server_that_refuses_to_be_asked(model: Path, tmp_path: Path) -> None:
    def fault(path: str, body: dict[str, Any], count: int) -> Any:
        return (400, {"error": {"message": "no routes"}}) if body.get("return_routed_experts") else None

    with StandIn(model, "sglang", routes=True, fault=fault) as server:
        (step,) = stepped(_settings(tmp_path, server), 1)
    assert "sampler_routes" not in step


def test_a_dense_model(tmp_path: Path) -> None:
    served_settings(tmp_path)
    with StandIn(tmp_path / "model") as server:
        settings = served_settings(tmp_path, server.url, **SMALL, rollout__router_replay="on")
        with pytest.raises(UserError, match="router_replay is on, and this llama model has no router"):
            stepped(settings, 1)


def test_an_answer_without_routes_while_others_had_them(model: Path, tmp_path: Path) -> None:
    def mangle(answer: dict[str, Any]) -> None:
        answer["choices"][0]["routed_experts"] = None

    words = r"^http.* cannot be sampled from: the answer has no routed_experts"
    with StandIn(model, routes=True, mangle=mangle) as server, pytest.raises(UserError, match=words):
        stepped(_settings(tmp_path, server), 1)


def test_inside_a_buffer_routes_are_read_again(model: Path, tmp_path: Path) -> None:
    """They lie in the checkpoint, and the second step is trained with them; those of other tokens are refused."""
    with StandIn(model, routes=True, noise=0.5) as server, ExitStack() as opened:
        settings = _settings(tmp_path, server) | {"rollout.steps_per_generation": 2}
        run = prepared(settings, opened)
        source = run.source
        assert isinstance(source, RolloutSource)
        with closing(source.stream(0, 0, 1)) as steps:
            next(steps)
        buffer = source.buffer
        assert buffer is not None and buffer.routes_differ
        again = Buffer.from_bytes(buffer.to_bytes(), Path("x"), generation=0, num_steps=2, iterations=1)
        assert again.routes_differ == buffer.routes_differ
        for one, other in zip(buffer.completions, again.completions, strict=True):
            assert one.routes is not None and one.routes.dtype == np.uint8
            np.testing.assert_array_equal(one.routes, other.routes)
        source._require_fits(again, Path("x"))
        first = buffer.completions[0]
        wrong = Sampled(tokens=first.tokens, logps=first.logps, truncated=first.truncated, routes=first.routes[1:])  # type: ignore[index]
        object.__setattr__(again, "completions", (wrong, *again.completions[1:]))
        with pytest.raises(UserError, match="experts of other tokens"):
            source._require_fits(again, Path("x"))


def test_conversations_have_the_routes_of_all_turns(tmp_path: Path) -> None:
    """Tokens of prompts, turns and results alike; the trainer agrees about the tokens of all turns."""
    settings = tool_settings(
        tmp_path, train__global_batch_size=16, rollout__slots=4, lora__targets="q_proj,k_proj,v_proj,o_proj"
    )
    make_mixture(tmp_path / "model")
    del settings["model.init"]
    with StandIn(tmp_path / "model", routes=True, noise=0.5) as server, ExitStack() as opened:
        run = prepared(settings | {"rollout.server": server.url}, opened)
        rows = next(iter(run.source.stream(0, 0, 1)))
        assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
        buffer = run.source.buffer
    assert rows.figures["turns/mean"] > 1.1 and rows.figures["sampler_routes"] > 0.1
    assert buffer.old_logps is not None
    for place, one in enumerate(buffer.completions):
        assert one.routes is not None and one.written is not None
        unknown = (one.routes == 255).all(axis=(1, 2))
        assert unknown[-1] and not unknown[:-1].any()
        np.testing.assert_allclose(buffer.old_logps[place][~one.written], one.logps[~one.written], atol=BOUND)


def test_an_agent_that_asks_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its completion failed, and has routes like the others; the log has what other agents asked for in vain."""
    settings = agent_settings(
        tmp_path, "silent", train__global_batch_size=16, rollout__slots=4, rollout__steps_per_generation=2,
        lora__targets="q_proj,k_proj,v_proj,o_proj",
    )  # fmt: skip
    make_mixture(tmp_path / "model")
    del settings["model.init"]
    with StandIn(tmp_path / "model", routes=True, noise=0.5) as server, ExitStack() as opened:
        run = prepared(settings | {"rollout.server": server.url}, opened)
        next(iter(run.source.stream(0, 0, 1)))
        assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
        buffer = run.source.buffer
        again = Buffer.from_bytes(buffer.to_bytes(), Path("x"), generation=0, num_steps=2, iterations=1)
        run.source._require_fits(again, Path("x"))
    assert {one.failed for one in buffer.completions} == {True, False}
    assert "note: rollout.agent asks for temperature 0.3, and gets 1.0" in capsys.readouterr().err


@pytest.mark.parametrize("routes", [WHOLE, ROUTES], ids=["all layers", "layers with a router"])
def test_both_forms_are_read(routes: np.ndarray) -> None:
    for dtype in (np.uint8, np.uint16, np.int32):
        np.testing.assert_array_equal(read_npy(as_npy(routes.astype(dtype)), SHAPE, TOKENS), ROUTES)
    found = read_int32(as_int32(routes), SHAPE, TOKENS)
    np.testing.assert_array_equal(found, ROUTES)
    assert found is not None and found.dtype == np.uint8
    assert read_npy(None, SHAPE, TOKENS) is None and read_int32(None, SHAPE, TOKENS) is None
    assert with_unknown(found, 4)[3].tolist() == [[255, 255], [255, 255]]


def test_many_experts_take_two_bytes() -> None:
    shape = RouteShape(layers=(0,), num_layers=1, num_experts=256, per_token=1)
    found = read_npy(as_npy(np.array([[[255]]], dtype=np.uint8)), shape, 1)
    assert found is not None and found.dtype == np.int16 and found.tolist() == [[[255]]]


def _with(place: tuple[int, int, int], expert: int) -> np.ndarray:
    found = WHOLE.copy()
    found[place] = expert
    return found


_NPY = base64.b64decode(as_npy(WHOLE.astype(np.uint8)))
WRONG: dict[str, tuple[Any, str]] = {
    "a number": (3, "no text in base64"),
    "no base64": ("!!", "no text in base64"),
    "no array": (base64.b64encode(b"hello").decode(), "no .npy file"),
    "floats": (as_npy(WHOLE.astype(np.float32)), "no .npy file"),
    "two dimensions": (as_npy(WHOLE[0].astype(np.uint8)), "no .npy file"),
    "cut off": (base64.b64encode(_NPY[:-1]).decode(), "other bytes than its header says"),
    "a header of 10^27 numbers": (
        base64.b64encode(_NPY.replace(b"(3, 4, 2)", b"(999999999, 999999999, 999999999)")).decode(),
        "no .npy|other bytes",
    ),
    "fewer tokens": (as_npy(WHOLE[1:].astype(np.uint8)), "is not of 3 tokens, 4 layers and 2 experts"),
    "other layers": (as_npy(WHOLE[:, 1:].astype(np.uint8)), "is not of 3 tokens"),
    "more experts of a token": (as_npy(np.repeat(WHOLE, 2, axis=2).astype(np.uint8)), "is not of 3 tokens"),
    "an expert too many": (as_npy(_with((0, 1, 0), 6).astype(np.uint8)), "outside of 0 to 5"),
    "an expert below 0": (as_npy(_with((0, 1, 0), -1).astype(np.int32)), "outside of 0 to 5"),
    "an expert twice": (as_npy(_with((0, 1, 0), 1).astype(np.uint8)), "twice for one token"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_routes_that_cannot_be(case: str) -> None:
    text, words = WRONG[case]
    with pytest.raises(UserError, match=words):
        read_npy(text, SHAPE, TOKENS)


def test_numbers_of_sglang_that_cannot_be() -> None:
    with pytest.raises(UserError, match="does not have int32 of 3 tokens, 4 layers and 2 experts"):
        read_int32(as_int32(WHOLE[1:]), SHAPE, TOKENS)
    with pytest.raises(UserError, match="outside of 0 to 5"):
        read_int32(as_int32(_with((2, 3, 1), 77)), SHAPE, TOKENS)
