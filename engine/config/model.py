"""Model options: which model is trained, and in which precision."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal, get_args

from engine.choices import BaseDType, BaseProducts, Implementation
from engine.config.checks import require, require_choices
from engine.config.option import IGNORED, REPORTED, option

DType = Literal["float32", "bfloat16", "float16"]
Init = Literal["checkpoint", "random"]
Kernels = Literal["auto", "reference", "native", "triton", "apex"]
DTYPES: tuple[DType, ...] = get_args(DType)
Attention = Literal["auto", "flash2", "flash3", "flash4"]
KERNELS: tuple[Kernels, ...] = get_args(Kernels)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Model: which checkpoint, in which precision.

    Args:
        path: Folder of the model, either a Hugging Face checkpoint or a partitioned one made by rankfold convert, or
            its name on the hub (OWNER/NAME).
        dtype: Precision of the forward and backward pass; masters, gradients and optimizer state are always float32.
            float16 needs a loss scale, which is adjusted automatically (optim.loss_scale).
        base_dtype: How the frozen linear weights of the layers are stored; null for model.dtype. "stored" keeps those
            of a checkpoint in few bits as they are, each in its own format; see docs/low-precision.md. With the others
            weights are encoded while they are read: "nf4" is 4 bits per weight with one scale per 64, as in QLoRA
            (arXiv 2305.14314); "nvfp4" is e2m1 with one scale per 16, "mxfp4" with one per 32, and "int4" integers with
            one per 128; "int8" is 8 bits with one scale per row, "mxfp8" e4m3 with one per 32, and "fp8_block" with one
            per 128 rows and columns; "fp8" is e4m3 with one scale per matrix and "fp8_row" with one per row, and both
            also round the inputs of these linears to 8 bits. Embedding, head, norms and everything trained stay in
            model.dtype; an export has the base as it was read.
        base_products: How linears multiply with a base in few bits. "decoded" decodes its numbers first. "codes" rounds
            the inputs of linears in fp8_block, mxfp8 and nvfp4 in groups to the same format, as servers do, and
            multiplies codes: on a Hopper GPU fp8_block, forward and for the input's gradient, on a Blackwell GPU mxfp8
            and nvfp4, forward; a CPU computes the same rounded numbers in float32. Linears in other formats, and
            experts, are decoded. Not with lora.merge_aware. See docs/low-precision.md.
        kernels: Implementation of the layers' ops. "auto" takes the fastest that can run here and logs which.
            "reference" is plain torch. "native" are the compiled CPU kernels, in float32 and bfloat16. "triton" are the
            GPU kernels,
            on a CPU only for tests: in float32 with TRITON_INTERPRET=1 set. "apex" is "auto" with the norms of NVIDIA
            apex, on a GPU. A backend named here that cannot run is an error.
        attention: Attention on a GPU. "auto" computes packed documents in one call by the newest FlashAttention that
            is installed for the GPU, rows of one document by the kernel that torch prefers, and logs which. "flash2" is
            torch's own; "flash3" (package flash_attn_interface, Hopper) and "flash4" (package flash_attn.cute,
            Blackwell and Hopper) have to be installed. One that is named is taken for all rows; one that cannot run is
            an error.
        implementation: Whose layers the model has. "native" are the engine's own, for families that it has; "adopted"
            are transformers' modules with the engine's linears, attention, head and loss in them, for every causal
            language model that the installed transformers has. "auto" takes native where there is one, and the log says
            which. See docs/models.md.
        proof: Whether a run of an adopted model first compares what it asks for (packed rows, pipeline stages, tensor
            ranks, gradients of what it trains) with transformers' model, on a small one of its make, and stops where
            they differ. It takes seconds and reads no weights; false leaves it out, and the log warns.
        init: "checkpoint" reads the weights of model.path; "random" draws new ones for the config.json found there.
    """

    path: str = option(MISSING, IGNORED)  # the base is compared by fingerprint
    dtype: DType = option("float32", REPORTED)
    base_dtype: BaseDType | None = option(None, REPORTED)
    base_products: BaseProducts = option("decoded", REPORTED)
    init: Init = option("checkpoint", IGNORED)  # weights are not drawn again
    implementation: Implementation = option("auto", IGNORED)  # the checkpoint records which it was
    proof: bool = option(True, IGNORED)
    kernels: Kernels = option("auto", IGNORED)  # they agree to rounding
    attention: Attention = option("auto", IGNORED)  # they agree to rounding

    def __post_init__(self) -> None:
        require_choices("model", self)
        require(bool(self.path), "model.path is empty, but the folder of a model is expected: set model.path.")
