"""The flash kernels that may compute packed documents on a GPU, and which of them torch's flash ops run.

torch has FlashAttention-2 built in. FlashAttention-3 and -4 are separate packages, which torch uses in place
of its own on request (`torch.nn.attention.activate_flash_attention_impl`): its ops, and the code that
differentiates them, stay the same, so this module has only the choice.

cuDNN, which torch prefers for documents of one length, is not a candidate: up to torch 2.13 the path of
`_cudnn_attention_forward` for cumulative lengths looks a plan up, but never stores one, and so builds it in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from torch.nn import attention

from engine.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashKernel:
    """A version of FlashAttention.

    Args:
        name: as a user asks for it.
        title: as it is printed.
        implementation: its name in torch's registry; None for the one built into torch.
        package: the package it needs; None for none.
        generations: major compute capabilities it runs on.
        preferred: those where it is taken without being asked for.
        largest_head: features of a head that it takes, forward and backward.
    """

    name: str
    title: str
    implementation: str | None
    package: str | None
    generations: tuple[int, ...]
    preferred: tuple[int, ...]
    largest_head: int

    def why_not(self, *, head_dim: int, capability: tuple[int, int]) -> str | None:
        """Returns why it cannot compute heads of `head_dim` on a GPU of `capability`; None where it can."""
        if capability[0] not in self.generations:
            wanted = " or ".join(f"{generation}.x" for generation in self.generations)
            return f"{self.title} wants compute capability {wanted}, not {capability[0]}.{capability[1]}"
        if head_dim % 8 or head_dim > self.largest_head:
            return f"{self.title} wants a head size that is a multiple of 8 up to {self.largest_head}, not {head_dim}"
        # consumer GPUs have too little shared memory for the backward of these heads
        if self is FLASH2 and 192 < head_dim <= 224 and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)):
            found = f"{capability[0]}.{capability[1]}"
            return f"{self.title} has no backward for heads of {head_dim} on a GPU of compute capability {found}"
        if self.package is not None and not _is_installed(self.package):
            return f"{self.title} needs the package {self.package}, which is not installed"
        return None


FLASH2 = FlashKernel(
    name="flash2",
    title="FlashAttention-2",
    implementation=None,
    package=None,
    generations=(8, 9, 10, 11, 12),
    preferred=(8, 9, 10, 11, 12),
    largest_head=256,
)
FLASH3 = FlashKernel(
    name="flash3",
    title="FlashAttention-3",
    implementation="FA3",
    package="flash_attn_interface",
    generations=(9,),
    preferred=(9,),
    largest_head=256,
)
# made for Blackwell; on Hopper it runs where it is asked for
FLASH4 = FlashKernel(
    name="flash4",
    title="FlashAttention-4",
    implementation="FA4",
    package="flash_attn.cute",
    generations=(9, 10),
    preferred=(10,),
    largest_head=128,
)

FLASH_KERNELS = (FLASH4, FLASH3, FLASH2)
"""In the order in which they are tried."""


def _is_installed(package: str) -> bool:
    parent = package.rpartition(".")[0]
    if parent and not _is_installed(parent):
        return False
    try:
        return find_spec(package) is not None
    except (ImportError, OSError):  # of the parent, which is imported to look into it; `activate` reports the error
        return True


def activate(kernel: FlashKernel) -> str | None:
    """Makes torch's flash ops run `kernel` in this process, also those of ring attention; returns why they cannot."""
    if attention.current_flash_attention_impl() == kernel.implementation:
        return None
    if kernel.implementation is None:
        attention.restore_flash_attention_impl()
        return None
    try:
        attention.activate_flash_attention_impl(kernel.implementation)
    except (ImportError, OSError, RuntimeError) as error:  # a package that was built for another torch or CUDA
        return f"{kernel.title} does not load from {kernel.package} ({error})"
    return None


def choose_flash(wanted: str, *, head_dim: int, capability: tuple[int, int]) -> tuple[FlashKernel | None, str]:
    """Chooses a flash kernel and makes torch run it.

    Args:
        wanted: "auto" (the newest that was made for this GPU and is installed) or a kernel's name.
        head_dim: features of a head.
        capability: the GPU's compute capability.

    Returns:
        The kernel and its name, with why it is not a newer one; or None and why there is none.

    Raises:
        UserError: a kernel was asked for by name that cannot run here.
    """
    missed = []
    for kernel in FLASH_KERNELS:
        if wanted != kernel.name and not (wanted == "auto" and capability[0] in kernel.preferred):
            continue
        why = kernel.why_not(head_dim=head_dim, capability=capability) or activate(kernel)
        if why is None:
            return kernel, "; ".join((kernel.title, *missed))
        missed.append(why)
    if wanted != "auto":
        raise UserError(f"model.attention is {wanted}, but {missed[0]}: set model.attention to auto.")
    return None, "; ".join(missed) or f"no flash kernel runs on compute capability {capability[0]}.{capability[1]}"
