"""Packed rows in every layout against their documents, each alone on one process: the loss, and every gradient.

Documents have 1 to 700 tokens, and their borders lie inside the chunks of context ranks and exactly between them.
Adapters stand on every linear, their B drawn and with dropout by coordinates; or everything is trained. With -s it
prints a row for each layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from engine.distributed.ranks import RankGrid
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import assemble
from tests.hybrids.layouts import MODELS, Place, Seen, step, step_of_documents
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ROUNDING = 1e-5
"""Largest error of a gradient: models compute in fp64, but routers and sums of gradients are in fp32."""

ONE = RankGrid()
TP2, PP2, CP2, CP4, DP2 = RankGrid(tp=2), RankGrid(pp=2), RankGrid(cp=2), RankGrid(cp=4), RankGrid(dp=2)


def _of(model: str) -> dict[str, Place]:
    """The layouts of a model."""
    place = functools.partial(Place, model=model)
    halved = functools.partial(place, layers=(2, 2))
    found = {
        "packed": place(grid=ONE),
        "packed, at borders": place(grid=ONE, rows="at borders", dropout=0.0),
        "packed, short": place(grid=ONE, rows="short"),
        "recompute none": place(grid=ONE, rows="odd", recompute="none"),
        "recompute attention": place(grid=ONE, rows="odd", recompute="attention"),
        "recompute full": place(grid=ONE, rows="odd", recompute="full"),
        "offload": place(grid=ONE, rows="at borders", offload="both"),
        "tp2": place(grid=TP2),
        "tp2 odd": place(grid=TP2, rows="odd", dropout=0.0),
        "tp2 sequence": place(grid=TP2, sequence=True),
        "tp2 sequence, full": place(grid=TP2, sequence=True, recompute="full", rows="at borders"),
        "pp2": halved(grid=PP2),
        "pp2 zb_v": place(grid=PP2, layers=(1, 1, 1, 1), schedule="zb_v", rows="at borders"),
        "cp2": place(grid=CP2),
        "cp2 at borders": place(grid=CP2, rows="at borders"),
        "cp2 odd": place(grid=CP2, rows="odd", dropout=0.0),
        "cp2 short": place(grid=CP2, rows="short"),
        "cp2 full": place(grid=CP2, rows="odd", recompute="full"),
        "cp4": place(grid=CP4),
        "cp4 at borders": place(grid=CP4, rows="at borders"),
        "cp4 odd": place(grid=CP4, rows="odd"),
        "cp4 short": place(grid=CP4, rows="short"),
        "zero 3": place(grid=DP2, level="parameters"),
        "zero 2, offload": place(grid=DP2, level="gradients", offload="both", rows="at borders"),
        "zero 3, offload": place(grid=DP2, level="parameters", offload="optimizer", rows="short"),
        "cp2, zero 3": place(grid=CP2, level="parameters", rows="short"),
        "tp2 cp2": place(grid=RankGrid(tp=2, cp=2)),
        "tp2 sequence cp2": place(grid=RankGrid(tp=2, cp=2), sequence=True, rows="at borders"),
        "pp2 cp2": halved(grid=RankGrid(pp=2, cp=2), rows="odd"),
        "tp2 sequence pp2": halved(grid=RankGrid(tp=2, pp=2), sequence=True, rows="at borders"),
        "dp2 cp2, zero 3": place(grid=RankGrid(dp=2, cp=2), level="parameters", rows="short"),
    }
    found |= {
        f"{name}, everything": replace(found[name], trains="everything")
        for name in (
            "packed", "recompute full", "tp2", "tp2 sequence", "pp2", "cp2", "cp2 short", "cp4 short", "cp4 at borders",
            "zero 3", "tp2 cp2", "pp2 cp2",
        )
    }  # fmt: skip
    found |= {
        f"{name}, branches": replace(found[name], rows="branches")
        for name in (
            "packed", "packed, everything", "recompute none", "recompute attention", "recompute full", "offload",
            "tp2, everything", "tp2 sequence", "pp2", "pp2 zb_v", "cp2", "cp2, everything", "cp4", "cp2 full", "zero 3",
            "tp2 cp2", "pp2 cp2",
        )
    }  # fmt: skip
    if MODELS[model].num_experts:
        experts = {
            "ep2": place(grid=RankGrid(dp=2, ep=2)),
            "ep2, zero 3": place(grid=RankGrid(dp=2, ep=2), level="parameters", rows="odd"),
            "ep2 cp2": place(grid=RankGrid(cp=2, dp=1, ep=2), rows="short"),
            "ep2 of tp2, sequence": place(grid=RankGrid(tp=2, ep=2, shards_experts=False), sequence=True),
        }
        found |= experts | {"ep2, everything": replace(experts["ep2"], trains="everything")}
    return found


def _encoded() -> dict[str, Place]:
    """Layouts of encoded bases, whose linears two ranks cut between blocks. Those of fp8_row have short documents: it
    rounds inputs and gradients to 8 bits, and of many some lie where the last bit of a sum decides."""
    layouts: dict[str, dict[str, Any]] = {
        "packed": {"grid": ONE},
        "recompute full": {"grid": ONE, "recompute": "full", "rows": "short"},
        "cp2": {"grid": CP2},
        "cp2 short": {"grid": CP2, "rows": "short"},
        "pp2": {"grid": PP2, "layers": (2, 2)},
        "zero 3": {"grid": DP2, "level": "parameters"},
    }
    # ranks that multiply parts of a row would round its inputs by scales of their own
    cut = {
        "tp2": {"grid": TP2},
        "tp2 sequence": {"grid": TP2, "sequence": True, "rows": "short"},
        "tp2 cp2": {"grid": RankGrid(tp=2, cp=2), "rows": "short"},
    }
    place = functools.partial(Place, model="qwen3.5 wide")
    found = {
        f"{base}, {name}": place(base=base, **{"rows": "odd", **layout})
        for base in ("nf4", "int8")
        for name, layout in (layouts | cut).items()
    }
    rounded = {f"fp8_row, {name}": place(base="fp8_row", **{**one, "rows": "short"}) for name, one in layouts.items()}
    return found | rounded


WHOLE = ("qwen3.5", "qwen3 next", "granite hybrid", "falcon h1", "nemotron h", "kimi linear", "olmo hybrid", "lfm2")
"""Models that run in every layout."""
PLACES: dict[str, Place] = {
    **{f"{model}: {name}": one for model in WHOLE for name, one in _of(model).items()},
    **{f"qwen3.5 wide: {name}": one for name, one in _encoded().items()},
}
QUICK = (
    "qwen3 next: packed, short",
    "qwen3 next: cp2 short",
    "granite hybrid: packed, branches",
    "kimi linear: cp2, branches",
)
PLACES["qwen3 next: tp2 sequence cp2 short"] = replace(PLACES["qwen3 next: tp2 sequence cp2"], rows="short")


@functools.cache
def _expected(place: Place) -> tuple[float, dict[str, Tensor]]:
    """What the documents alone come to, whatever the layout of the packed ones."""
    seen = step_of_documents(place)
    return seen.loss.item(), assemble([seen.gradients])


def _one_process(place: Place) -> Place:
    """The place of which a layout is another one."""
    return Place(
        model=place.model, grid=ONE, rows=place.rows, trains=place.trains, dropout=place.dropout, base=place.base
    )


def _ranks(place: Place) -> list[Seen]:
    world = place.grid.world_size
    return [step(place)] if world == 1 else spawn(step, world=world, args=(place,), timeout=300)


def errors_of(place: Place) -> Iterator[tuple[str, float]]:
    """Yields the relative error of the loss, and of each gradient."""
    loss, expected = _expected(_one_process(place))
    ranks = _ranks(place)
    found = assemble([one.gradients for one in ranks])
    assert found.keys() == expected.keys()
    yield "loss", max(abs(one.loss.item() - loss) / loss for one in ranks)
    for name, value in expected.items():
        if value.any():
            yield name, relative_error(found[name], value)
        else:  # an expert without tokens
            assert ".experts." in name and not found[name].any(), name


@pytest.mark.parametrize("name", sampled(PLACES, QUICK))
def test_packed_rows_are_their_documents(name: str) -> None:
    errors = dict(errors_of(PLACES[name]))
    worst = max(errors, key=errors.__getitem__)
    print(f"\n{name:45} loss {errors['loss']:.1e}  {errors[worst]:.1e} {worst}")
    assert errors["loss"] < 1e-6 and errors[worst] < ROUNDING, worst
