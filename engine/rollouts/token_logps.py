"""Log-probabilities of a data set's targets under the current model, one number per token, without gradient.

Completions are compared with them in training: under the model that their generation batch began with, under the
model without adapters, and under teachers. They go through the same stages as training does, without dropout.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import IGNORE_LABEL
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.loader import EvalLoader, with_even_rows
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.layers.host_copies import HostCopy, sent
from engine.rollouts.data.routes import DifferingRoutes
from engine.training.evaluate import group_size, groups
from engine.training.rank_stages import Stages
from engine.training.row_shape import shape_on_mesh


def token_logps(
    config: RunConfig,
    mesh: Mesh,
    stages: Stages,
    dataset: TokenDataset,
    *,
    adapters: bool = True,
    differing: DifferingRoutes | None = None,
) -> NDArray[np.float32]:
    """Returns float32 [T], the log-probability of each token of the data set given those before it in its document, at
    the rollouts' temperature; 0 where it is no target. Equal on all ranks. Collective.

    Args:
        config: of the run, whose objective is a policy gradient.
        mesh, stages: of the model.
        dataset: the completions, in memory.
        adapters: False leaves them out: the reference.
        differing: counts routers' choices, where the data set has given ones; None for nothing.
    """
    device = stages.step.device
    length = dataset.seq_length
    loader = EvalLoader(
        dataset,
        with_even_rows(shape_on_mesh(config, device, mesh), dataset),
        num_workers=config.data.num_workers,
        pin_memory=device.type == "cuda",
    )
    found = torch.zeros(len(dataset) * length, dtype=torch.float32, device=device)
    for group in groups(loader, group_size(mesh)):
        group = group if differing is None else differing.counting(group)
        for batch, logps_T in zip(group, stages.references(group, adapters=adapters) or (), strict=False):
            held = (batch.labels_BS != IGNORE_LABEL).flatten().nonzero()[:, 0]
            # slots are rows here: the coordinate of a token is its row and its column
            places = batch.token_index_BS.flatten()[held]
            found[sent(places, device)] = logps_T[sent(held, device)].float()
    for axis in (mesh.dp_cp, mesh.pp):
        found = all_reduce(found, axis)
    # the rows of the steps that follow are made of them on the host
    return _of_tokens(dataset, HostCopy(found).read().numpy().reshape(len(dataset), length))


def _of_tokens(dataset: TokenDataset, of_columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the numbers in the order of the data set's tokens, each of which stood in the column before its own."""
    known = np.zeros(len(dataset.tokens), dtype=np.float32)
    for row in range(len(dataset)):
        column = 0
        for document, reused in zip(dataset.rows.row(row).tolist(), dataset.rows.reused_in(row).tolist(), strict=True):
            first, length = int(dataset.starts[document]) + reused, int(dataset.lengths[document]) - reused
            known[first + 1 : first + length] = of_columns[row, column : column + length - 1]
            column += length
    return known
