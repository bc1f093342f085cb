"""What is taken for a lost rank, what it is called, and how long the groups of a mesh wait for one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from engine.distributed.collectives import all_reduce, all_to_all, reduce_scatter
from engine.distributed.failures import CommunicationError, communicating, raise_if_lost
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from tests.support.fake_world import fake_world
from tests.support.spawning import spawn

CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2462. This is "
    "typically caused by a remote worker crashing. Check the logs."
)
TIMED_OUT = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"


def test_words_for_many_ranks() -> None:
    with fake_world(3, 8), pytest.raises(CommunicationError) as caught:
        raise_if_lost(RuntimeError(CLOSED), "all_reduce", axis="dp_cp")
    assert str(caught.value) == (
        "rank 3 lost one of ranks 0 to 2, 4 to 7 in all_reduce on axis dp_cp "
        "(Connection closed by peer [127.0.0.1]:2462)"
    )
    assert not caught.value.timed_out


def test_words_for_a_peer() -> None:
    """Its number in the run, not on the axis: rank 5 of tensor 2 x pipeline 4 is at place 2 of the ranks 1, 3, 5, 7."""
    with fake_world(5, 8):
        axis = build_mesh(RankGrid(tp=2, pp=4), device_type="cpu", num_kv_heads=2).pp
        assert dist.get_process_group_ranks(axis.group) == [1, 3, 5, 7]
        with pytest.raises(CommunicationError, match=r"^rank 5 lost rank 7 in send on axis pp \(Timed out"):
            raise_if_lost(RuntimeError(TIMED_OUT), "send", axis=axis.name, group=axis.group, peer=3)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), RuntimeError("CUDA error: out of memory")])
def test_other_errors_are_left_alone(error: RuntimeError) -> None:
    raise_if_lost(error, "all_reduce")
    with pytest.raises(RuntimeError) as caught, communicating("barrier"):
        raise error
    assert caught.value is error


def test_wrong_sizes_stay_a_defect() -> None:
    with fake_world(1, 4):
        axis = build_mesh(RankGrid(tp=4), device_type="cpu", num_kv_heads=4).tp
        if not _checks_sizes():
            pytest.skip("the fake backend of torch 2.11 checks no sizes, which real ones do")
        for collective in (
            lambda: reduce_scatter(torch.ones(7), axis),
            lambda: all_to_all(torch.ones(4), axis, sent=[1, 1, 1, 9], received=[1, 1, 1, 1]),
        ):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                collective()
            assert not isinstance(caught.value, CommunicationError)


def _checks_sizes() -> bool:
    """Returns whether torch's own call is refused in a world of four that does not exist."""
    try:
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(7))
    except RuntimeError:
        return True
    return False


def _timeouts() -> dict[str, float]:
    """Seconds, by group; after each has been used."""
    mesh = build_mesh(RankGrid(tp=2, pp=2), device_type="cpu", num_kv_heads=1)
    axes = {"tp": mesh.tp, "pp": mesh.pp, "kv_replica": mesh.kv_replica, "pp_ends": mesh.pp_ends}
    for axis in axes.values():
        assert all_reduce(torch.ones(1), axis).item() == 2
    axes["world"] = build_mesh(RankGrid(dp=4), device_type="cpu", num_kv_heads=1).dp_cp
    device = torch.device("cpu")
    return {name: axis.group._get_backend(device).options._timeout.total_seconds() for name, axis in axes.items()}


@pytest.mark.distributed
def test_groups_have_the_runs_timeout() -> None:
    """torch gives a group half an hour of its own."""
    for found in spawn(_timeouts, world=4, timeout=77):
        assert found == dict.fromkeys(("tp", "pp", "kv_replica", "pp_ends", "world"), 77.0)
