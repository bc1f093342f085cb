"""Machines in a few figures: memory, arithmetic and links.

Peaks are those of the vendors' data sheets: dense bf16 products with fp32 sums, memory, and one direction of the links
of a GPU; nodes are taken to have eight of them, with 400 Gbit/s each to other nodes. A program reaches a share of
that: on one H200, products of 8192 x 8192 matrices ran at 790 TFLOP/s and copies at 4.3 TB/s. The same shares are
assumed of the others, which were not measured, and of FP8 products and of the link to host memory.

Attention reaches less: published figures of an H100 with heads of 128 are 631 TFLOP/s for the forward of cuDNN and 329
for that of FlashAttention 2, which packed documents run with. Backward is taken to reach what brings forward and
backward together to 500 and 290.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import UserError

PRODUCT_SHARE = 790 / 989
COPY_SHARE = 4.3 / 4.8

LAUNCH = 2.5e-6
"""Seconds that the shortest kernel takes on a GPU."""

TILES = ((256, 128), (128, 256))
"""Rows and columns of a result that one multiprocessor computes at a time."""


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """Shares of the speed of products that attention reaches, forward and backward."""

    forward: float = 1.0
    backward: float = 1.0


CUDNN = AttentionSpeed(631 / 790, 458 / 790)
FLASH2 = AttentionSpeed(329 / 790, 275 / 790)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One kind of device and its links.

    Args:
        name: as a user asks for it.
        memory: GiB of a device, as it is sold.
        products: TFLOP/s that matrix products get.
        sheet: TFLOP/s that the data sheet names for them; 0 where there is none.
        products_fp8: the same of e4m3; 0 where the device has none.
        scales_rows: whether those may have a scale for each row.
        host: GB/s that a device gets from host memory, or sends there, each way.
        copies: GB/s read and written that memory gets.
        link: GB/s that a device sends to others of its node.
        network: GB/s that a device sends to other nodes.
        node_size: devices of a node.
        processors: multiprocessors of a device, over which a product's tiles are spread; 0 spreads them evenly.
        launch: seconds that the shortest kernel takes.
        attention, packed_attention: speed where a document fills a row, and where several share one.
    """

    name: str
    memory: float
    products: float
    copies: float
    link: float
    network: float = 50.0
    sheet: float = 0.0
    products_fp8: float = 0.0
    scales_rows: bool = True
    host: float = 57.0
    node_size: int = 8
    processors: int = 0
    launch: float = 0.0
    attention: AttentionSpeed = AttentionSpeed()
    packed_attention: AttentionSpeed = AttentionSpeed()

    def evenness(self, rows: int, columns: int, products: int = 1) -> float:
        """Returns how evenly a product's tiles fill the device, beside those of 8192 x 8192: 1 where as evenly.

        In the last wave some multiprocessors have no tile; of the two shapes of tiles the better counts.

        Args:
            rows, columns: of the result.
            products: how many of that size one launch computes.
        """
        return self._filled(rows, columns, products) / self._filled(8192, 8192, 1)

    def _filled(self, rows: int, columns: int, products: int) -> float:
        if not self.processors:
            return 1.0
        tiles = [products * -(-rows // height) * -(-columns // width) for height, width in TILES]
        area = [products * rows * columns / (height * width) for height, width in TILES]
        return max(
            used / (-(-count // self.processors) * self.processors) for used, count in zip(area, tiles, strict=True)
        )

    def wire(self, ranks: int) -> float:
        """Returns the GB/s between neighbours in a group of `ranks` ranks in a row."""
        return self.link if ranks <= self.node_size else self.network


def _card(
    name: str,
    memory: float,
    products: float,
    copies: float,
    link: float,
    *,
    products_fp8: float,
    host: float,
    processors: int,
    scales_rows: bool = False,
) -> Machine:
    return Machine(
        name=name,
        memory=memory,
        products=products * PRODUCT_SHARE,
        sheet=products,
        copies=copies * COPY_SHARE,
        link=link * COPY_SHARE,
        products_fp8=products_fp8 * PRODUCT_SHARE,
        scales_rows=scales_rows,
        host=host * COPY_SHARE,
        processors=processors,
        launch=LAUNCH,
        attention=CUDNN,
        packed_attention=FLASH2,
    )


MACHINES = {
    machine.name: machine
    for machine in (
        _card("h100-80", 80, 989, 3350, 450, products_fp8=1979, host=64, processors=132, scales_rows=True),
        _card("h200-141", 141, 989, 4800, 450, products_fp8=1979, host=64, processors=132, scales_rows=True),
        _card("a100-80", 80, 312, 2039, 300, products_fp8=0, host=32, processors=108),
        _card("a100-40", 40, 312, 1555, 300, products_fp8=0, host=32, processors=108),
        _card("rtx4090-24", 24, 165, 1008, 32, products_fp8=330, host=32, processors=128),
    )
}


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
