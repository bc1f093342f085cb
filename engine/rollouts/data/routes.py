"""The experts that a server chose for each token of its completions: their shape in a model, and their column in a data
set of completions, which reaches routers as `engine.batch.Routes`.

Legend: T tokens, M layers with a router, K experts of a token, B rows, S columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, InputRank, Routes
from engine.conversion.expert_stacks import routed_layers
from engine.data.dataset import TokenDataset
from engine.data.extras import ExtraColumns
from engine.data.parts import CollatedRows, NumberedDocuments
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteShape:
    """The shape of a model's routes.

    Args:
        layers: numbers of those with a router, ascending.
        num_layers: of the model.
        num_experts: of each of them.
        per_token: experts that a token takes.
    """

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    per_token: int

    @classmethod
    def of(cls, decoder: DecoderConfig) -> RouteShape | None:
        """Returns that of a model; None where it has no routers of the engine's."""
        if not decoder.num_experts:
            return None
        return cls(
            layers=tuple(routed_layers(decoder)),
            num_layers=decoder.num_layers,
            num_experts=decoder.num_experts,
            per_token=decoder.experts_per_token,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest integers that hold an expert's number, and one more for none."""
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.int16)

    @property
    def of_token(self) -> tuple[int, int]:
        """[M, K], the shape of one token's."""
        return len(self.layers), self.per_token

    def fits(self, routes: NDArray[Any], count: int) -> bool:
        """Returns whether an array has the routes of so many tokens of such a model."""
        if routes.dtype != self.dtype or routes.shape != (count, *self.of_token):
            return False
        known = routes != np.iinfo(self.dtype).max
        return bool((routes[known] < self.num_experts).all() and (routes[known] >= 0).all())


def routes_fit(shape: RouteShape | None, routes: Iterable[tuple[NDArray[Any] | None, int]]) -> bool:
    """Returns whether the routes of some completions, where they have any, are of a model.

    Args:
        shape: of the model's; None where it has no routers.
        routes: of each completion, with the number of its tokens and its prompt's.
    """
    return all(one is None or (shape is not None and shape.fits(one, count)) for one, count in routes)


def with_unknown(known: NDArray[Any], count: int) -> NDArray[Any]:
    """Returns the routes of so many tokens, of which the first are known: [tokens, M, K]."""
    rest = (count - len(known), *known.shape[1:])
    return np.concatenate((known, np.full(rest, np.iinfo(known.dtype).max, dtype=known.dtype)))


def after_turn(known: NDArray[Any] | None, found: NDArray[Any] | None) -> NDArray[Any] | None:
    """Returns the routes of a conversation after a turn; earlier tokens keep those by which they were sampled.

    Args:
        known: before it; None before the first turn.
        found: of all tokens, the turn's included; None where they are not known.
    """
    return found if known is None or found is None else np.concatenate((known, found[len(known) :]))


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteColumns(ExtraColumns):
    """The column of routes in a data set of completions.

    Args:
        experts: [T, M, K], as of `Sampled.routes`.
        layers: int64 [M], their numbers in the model.
    """

    experts: NDArray[Any]
    layers: NDArray[np.int64]
    can_share: ClassVar[bool] = True
    """The beginning is routed as in the first document of the row that has it."""
    collector: ClassVar[str] = "engine.rollouts.data.routes:RowRoutes"

    @classmethod
    def of(cls, routes: Sequence[NDArray[Any]], shape: RouteShape) -> RouteColumns:
        """Returns the column of some documents.

        Args:
            routes: of each.
        """
        return cls(experts=np.concatenate(routes), layers=np.array(shape.layers, dtype=np.int64))

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"experts": self.experts, "layers": self.layers}

    def identity(self) -> Iterator[NDArray[Any]]:
        yield self.experts

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        return len(self.experts) == num_tokens


class DifferingRoutes:
    """Counts the choices of a pass whose routers would have chosen other experts than they are given."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    def counting(self, batches: Sequence[Batch]) -> list[Batch]:
        """Returns the micro-batches, whose passes are counted from now on."""
        found = []
        for batch in batches:
            routes = batch.part(Routes)
            found.append(batch.with_parts(None if routes is None else replace(routes, differing=self._counts)))
        return found

    def share(self, mesh: Mesh) -> float:
        """Returns the share of the pairs of a token and a layer whose set of experts is another. Collective; waits for
        the device."""
        for axis in (mesh.tp, mesh.dp_cp, mesh.pp):
            self._counts = all_reduce(self._counts, axis)
        differing, known = self._counts.tolist()
        return float(differing / max(known, 1))


class RowRoutes(NumberedDocuments):
    """Collects the routes of a micro-batch; see `engine.data.parts.PartCollector`. Padding has none."""

    def __init__(self, dataset: TokenDataset, input_rank: InputRank) -> None:
        super().__init__()
        self._dataset = dataset

    def finish(self, rows: CollatedRows) -> tuple[Routes]:
        """Returns the routes."""
        columns = self._dataset.extra(RouteColumns)
        assert columns is not None, "documents without routes"
        experts_TMK = columns.experts
        size = (*experts_TMK.shape[1:], *rows.labels_BS.shape)
        experts_MKBS = np.full(size, np.iinfo(experts_TMK.dtype).max, dtype=experts_TMK.dtype)
        for placed, held in self.spans():
            first = int(self._dataset.starts[placed.document]) + placed.skipped
            experts_MKBS[:, :, placed.row, held] = experts_TMK[first : first + placed.length].transpose(1, 2, 0)
        return (Routes(experts_MKBS=torch.from_numpy(experts_MKBS), layers=tuple(columns.layers.tolist())),)
