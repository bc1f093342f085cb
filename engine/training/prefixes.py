"""Whether a run computes the common beginnings of documents once: the option, the data and the model together.

How rows are made of such documents is in `engine.data.prefixes`, and how the model computes them in `engine.branches`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.distillation import BASE, is_server
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig

LEAST_SAVED = 0.05
"""Share of the tokens of a data set that data.share_prefixes auto wants to save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixSharing:
    """A run's choice.

    Args:
        shares: whether beginnings are shared where that saves enough.
        least_saved: the share of tokens that is enough.
        regroups: whether documents that begin alike come into the same rows.
        same_rows: whether rows do not depend on the number of data-parallel ranks: a token's dropout mask follows from
            its place in a row, and is the same in every layout.
        obstacle: why beginnings are not shared, where the option leaves that open, as a clause; None where they are, or
            where the data would hardly have any.
    """

    shares: bool
    least_saved: float = 0.0
    regroups: bool = True
    same_rows: bool = False
    obstacle: str | None = None

    def rows(self, dataset: TokenDataset, *, ranks: int = 1) -> TokenDataset:
        """Returns the data set in rows that share what they may.

        Args:
            ranks: data-parallel ranks, over which its rows are dealt out.
        """
        if not self.shares:
            return dataset
        from engine.data.prefixes import can_share, with_shared_prefixes

        if not can_share(dataset):
            return dataset
        ranks = 1 if self.same_rows else ranks
        return with_shared_prefixes(dataset, least_saved=self.least_saved, regroups=self.regroups, ranks=ranks)


def choose_sharing(config: RunConfig, decoder: DecoderConfig) -> PrefixSharing:
    """Chooses for a run.

    Raises:
        UserError: beginnings cannot be shared as data.share_prefixes asks for.
    """
    wanted, kind = config.data.share_prefixes, config.objective.kind
    if wanted is False:
        return PrefixSharing(shares=False)
    packed = config.data.packing is True
    # documents that begin alike, whatever they say
    alike = kind.samples or kind.group > 1
    why = _obstacle(config, decoder, has_others=packed or alike)
    if why is not None and wanted is True:
        raise UserError(f"data.share_prefixes is true, but {why}: set data.share_prefixes to auto or false.")
    return PrefixSharing(
        shares=why is None,
        least_saved=LEAST_SAVED if wanted == "auto" else 0.0,
        regroups=packed or kind.samples,
        same_rows=config.lora.dropout > 0,
        obstacle=why if alike else None,
    )


def _means_micro_batches(config: RunConfig) -> bool:
    """Returns whether the loss depends on the micro-batch that a completion is in."""
    options = config.objective
    return options.kind.samples and (options.loss_type == "bnpo" or options.top_entropy_quantile < 1.0)


def _obstacle(config: RunConfig, decoder: DecoderConfig, *, has_others: bool) -> str | None:
    """Returns why no document continues another in a run's rows, as a clause; None where one may.

    Args:
        has_others: whether rows hold several documents.
    """
    if config.data.packing == "concatenate":
        return "with data.packing concatenate a row is one document"
    if not has_others:
        return "with data.packing false a row holds one document"
    if config.objective.name == "distillation" and not config.distillation.teachers:
        return "records have a teacher's tokens at each of theirs"
    if _means_micro_batches(config):
        return "the loss is a mean over each micro-batch, whose completions would be others"
    # completions' teachers give single log-probabilities, of rows that share nothing
    passes_over_rows = config.distillation.whole or not config.objective.kind.samples
    if passes_over_rows and any(one != BASE and not is_server(one) for one in config.distillation.teachers):
        return "a teacher with layers of its own passes over the same rows"
    if config.memory.cuda_graph != "none":
        return f"the graphs of memory.cuda_graph {config.memory.cuda_graph} are captured for documents by themselves"
    return decoder.branch_obstacle()
