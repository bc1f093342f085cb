"""Machines in a few figures: memory, arithmetic, links, and what launches cost.

Data sheets name peaks: dense bf16 products with fp32 sums, memory, and one direction of the links of a GPU; nodes are
taken to have eight of them, with 400 Gbit/s each to other nodes. A program reaches a share of that, which is not known
before it runs. So each card has three sets of speeds: the likely ones, and bounds on both sides of them. Nothing here
was measured with this engine but for two figures of one H200, a burst of products at 790 TFLOP/s and copies at 4.3
TB/s; `measured` puts those of `rankfold benchmark machine-speed` in their place. The shares, and where they come from:

| what | slow | likely | fast | source |
|---|---:|---:|---:|---|
| products, Hopper | 0.62 | 0.69 | 0.80 | a burst of ten on one H200, and 780 TFLOP/s of one tuned shape on an |
| | | | | H100 [1]; likely are 650 to 700 under 700 W |
| products, A100 | 0.75 | 0.82 | 0.83 | 257 of 312 with normal numbers [2] |
| products, L40S, B200 | 0.62 | 0.69 | 0.80 | assumed to be Hopper's |
| products in FP8 | 0.52 | 0.62 | 0.75 | as in 16 bits, with the power limit reached sooner |
| products of experts | 0.28 | 0.62 | 0.75 | 524 to 545 TFLOP/s of torch on an H100 [3], and 160 and 242 of small |
| | | | | experts [4, 5] |
| attention | 0.85 | 1.00 | 1.10 | of the published speeds in `attention_speeds.py` |
| arithmetic outside matrix units | 0.45 | 0.60 | 0.80 | assumed |
| memory | 0.72 | 0.79 | 0.87 | kernels reach 80 to 97% of a copy, and that 90% of the data sheet |
| links | 0.62 | 0.75 | 0.90 | assumed |

[1] gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405, [2] thonking.ai/p/strangely-matrix-multiplications,
[3] github.com/pytorch/ao/pull/2490, [4] github.com/tgale96/grouped_gemm/pull/37,
[5] github.com/ByteDance-Seed/VeOmni/pull/460

Between two kernels a GPU idles for 1 to 2 microseconds, in a graph for less, and the host takes 15 to 40 to launch one
from Python; these are estimates, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.errors import UserError
from engine.planning.attention_speeds import CUDNN_ON_HOPPER, FLASH2_ON_HOPPER, AttentionSpeeds, flash2_elsewhere

MEASURED_PRODUCTS, MEASURED_COPIES = 790 / 989, 4.3 / 4.8
"""Shares of the data sheet that one H200 reached: ten products in a row, and a copy."""

MEASURED_SPEEDS = ("products", "products_fp8", "copies", "launch", "host_launch")
"""Fields of a machine that `rankfold benchmark machine-speed` measures."""
LAUNCH = 2.5e-6
"""Seconds that the shortest kernel takes on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One kind of device and its links, at one set of speeds.

    Args:
        name: as a user asks for it.
        memory: GiB of a device, as it is sold.
        products: TFLOP/s that a large matrix product gets, one after the other.
        sheet, sheet_copies: TFLOP/s and GB/s that the data sheet names for products and memory; 0 where there is none.
        products_fp8: the same of e4m3; 0 where the device has none.
        scales_rows: whether those may have a scale for each row.
        major: first number of a GPU's compute capability; None where it is not known, and for a CPU.
        vectors: TFLOP/s of float32 outside the matrix units, a fused product and addition being two; 0 for that of
            products.
        grouped: TFLOP/s that products of many experts in one launch tend to as they grow; 0 for those of others.
        host: GB/s that a device gets from host memory, or sends there, each way.
        copies: GB/s read and written that memory gets.
        link: GB/s that a device sends to others of its node.
        network: GB/s that a device sends to other nodes.
        node_size: devices of a node.
        processors: multiprocessors of a device, over which a product's tiles are spread; 0 spreads them evenly.
        launch: seconds that the shortest kernel takes.
        gap: seconds between two kernels that the host launched in time.
        graph_gap: the same in a graph.
        host_launch: seconds that the host takes to launch a kernel.
        attention, packed_attention: speeds where a document fills a row, and where several share one; None for those
            of products.
        attention_share: of these speeds.
        measured: the figures above that were measured on such a machine, which have no bounds.
    """

    name: str
    memory: float
    products: float
    copies: float
    link: float
    network: float = 50.0
    sheet: float = 0.0
    sheet_copies: float = 0.0
    products_fp8: float = 0.0
    scales_rows: bool = True
    major: int | None = None
    vectors: float = 0.0
    grouped: float = 0.0
    host: float = 57.0
    node_size: int = 8
    processors: int = 0
    launch: float = 0.0
    gap: float = 0.0
    graph_gap: float = 0.0
    host_launch: float = 0.0
    attention: AttentionSpeeds | None = None
    packed_attention: AttentionSpeeds | None = None
    attention_share: float = 1.0
    measured: tuple[tuple[str, float], ...] = ()

    def wire(self, ranks: int) -> float:
        """Returns the GB/s between neighbours in a group of `ranks` ranks in a row."""
        return self.link if ranks <= self.node_size else self.network

    def graphed(self) -> Machine:
        """Returns the machine where launches are replayed from a graph."""
        return replace(self, gap=self.graph_gap, host_launch=0.0)

    def with_measured(self, figures: Mapping[str, float]) -> Machine:
        """Returns the machine with figures that were measured, by their names here, in place of assumed ones."""
        measured = dict(self.measured) | dict(figures)
        return replace(self, measured=tuple(sorted(measured.items())), **measured)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shares:
    """What a program reaches of a data sheet, and seconds; see the table above."""

    products: float
    products_fp8: float
    grouped: float
    attention: float
    vectors: float
    copies: float
    links: float
    host: float
    network: float
    gap: float
    graph_gap: float
    host_launch: float


_LIKELY = _Shares(
    products=0.69, products_fp8=0.62, grouped=0.62, attention=1.0, vectors=0.60, copies=0.79, links=0.75, host=0.86,
    network=0.9, gap=1.5e-6, graph_gap=1.0e-6, host_launch=28e-6,
)  # fmt: skip
_SLOW = _Shares(
    products=0.62, products_fp8=0.52, grouped=0.28, attention=0.85, vectors=0.45, copies=0.72, links=0.62, host=0.78,
    network=0.75, gap=2.0e-6, graph_gap=1.5e-6, host_launch=40e-6,
)  # fmt: skip
_FAST = _Shares(
    products=MEASURED_PRODUCTS, products_fp8=0.75, grouped=0.75, attention=1.1, vectors=0.80, copies=0.87, links=0.90,
    host=0.90, network=0.97, gap=1.0e-6, graph_gap=0.6e-6, host_launch=15e-6,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    """A data sheet.

    Args:
        major: first number of the compute capability.
        own_products: shares that its products reach, slow, likely and fast, where they are not Hopper's.
        own_attention: where it is neither Hopper's nor FlashAttention-2's at an A100's shares: where a document fills a
            row, and where several share one.
    """

    name: str
    memory: float
    products: float
    copies: float
    link: float
    products_fp8: float
    vectors: float
    host: float
    processors: int
    major: int
    own_products: tuple[float, float, float] | None = None
    own_attention: tuple[AttentionSpeeds, AttentionSpeeds] | None = None

    def machine(self, shares: _Shares) -> Machine:
        hopper = self.major == 9
        packed = FLASH2_ON_HOPPER if hopper else flash2_elsewhere(self.products)
        alone = CUDNN_ON_HOPPER if hopper else packed
        if self.own_attention is not None:
            alone, packed = self.own_attention
        return Machine(
            name=self.name,
            memory=self.memory,
            products=self.products * shares.products,
            sheet=self.products,
            sheet_copies=self.copies,
            copies=self.copies * shares.copies,
            link=self.link * shares.links,
            network=50.0 * shares.network,
            products_fp8=self.products_fp8 * shares.products_fp8,
            scales_rows=hopper,
            major=self.major,
            vectors=self.vectors * shares.vectors,
            grouped=self.products * shares.grouped,
            host=self.host * shares.host,
            processors=self.processors,
            launch=LAUNCH,
            gap=shares.gap,
            graph_gap=shares.graph_gap,
            host_launch=shares.host_launch,
            attention=alone,
            packed_attention=packed,
            attention_share=shares.attention,
        )

    def machines(self) -> tuple[Machine, Machine, Machine]:
        """Returns it slow, likely and fast."""
        sets = (_SLOW, _LIKELY, _FAST)
        if self.own_products is not None:
            sets = tuple(replace(shares, products=own) for shares, own in zip(sets, self.own_products, strict=True))  # type: ignore[assignment]
        slow, likely, fast = (self.machine(shares) for shares in sets)
        return slow, likely, fast


_CARDS = {
    card.name: card.machines()
    for card in (
        _Card(name="h100-80", memory=80, products=989, copies=3350, link=450, products_fp8=1979, vectors=67, host=64,
              processors=132, major=9),
        _Card(name="h200-141", memory=141, products=989, copies=4800, link=450, products_fp8=1979, vectors=67, host=64,
              processors=132, major=9),
        _Card(name="a100-80", memory=80, products=312, copies=2039, link=300, products_fp8=0, vectors=19.5, host=32,
              processors=108, major=8, own_products=(0.75, 0.82, 0.83)),
        _Card(name="a100-40", memory=40, products=312, copies=1555, link=300, products_fp8=0, vectors=19.5, host=32,
              processors=108, major=8, own_products=(0.75, 0.82, 0.83)),
        _Card(name="rtx4090-24", memory=24, products=165, copies=1008, link=32, products_fp8=330, vectors=82.6, host=32,
              processors=128, major=8, own_products=(0.75, 0.85, 0.95)),
        _Card(name="l40s-48", memory=48, products=362, copies=864, link=32, products_fp8=733, vectors=91.6, host=32,
              processors=142, major=8),
        # FlashAttention-2 has none of the instructions that are new in it, and is taken to be as fast as on an H100
        _Card(name="b200-180", memory=180, products=2250, copies=8000, link=900, products_fp8=4500, vectors=75, host=64,
              processors=148, major=10, own_attention=(flash2_elsewhere(2250), FLASH2_ON_HOPPER)),
    )
}  # fmt: skip
MACHINES = {name: likely for name, (_, likely, _) in _CARDS.items()}


def bounds(machine: Machine) -> tuple[Machine, Machine]:
    """Returns a machine at the slowest and at the fastest that it may be: itself, where nothing of it is assumed.
    What was measured is the same in both."""
    if machine.name not in _CARDS:
        return machine, machine
    slow, _, fast = (one.with_measured(dict(machine.measured)) for one in _CARDS[machine.name])
    return slow, fast


def check_encoding(machine: Machine, base_dtype: str | None) -> None:
    """Refuses an encoding whose products a machine does not have.

    Raises:
        UserError: it has none.
    """
    if base_dtype not in ("fp8", "fp8_row"):
        return
    if not machine.products_fp8 or (base_dtype == "fp8_row" and not machine.scales_rows):
        raise UserError(
            f"model.base_dtype is {base_dtype}, for which {machine.name} has no products: set model.base_dtype to int8 "
            "or nf4."
        )


def machine_for(name: str | None, gpu_memory: float) -> Machine:
    """Returns the preset of that name, or the smallest with at least so much memory.

    Args:
        name: a key of MACHINES, or None.
        gpu_memory: GiB.

    Raises:
        UserError: there is no such preset.
    """
    if name is not None:
        if name not in MACHINES:
            raise UserError(f"--machine is {name}, which is not known: choose one of {', '.join(MACHINES)}.")
        return MACHINES[name]
    gpus = sorted(MACHINES.values(), key=lambda machine: machine.memory)
    fitting = [machine for machine in gpus if machine.memory >= gpu_memory]
    if not fitting:
        return gpus[-1]
    # of cards with equal memory the faster one
    return max((m for m in fitting if m.memory == fitting[0].memory), key=lambda m: m.products)
