"""The numbers that vLLM reads from models in few bits, by its own loader. Run by the Python of a vLLM for CPUs:

    python vllm_numbers.py FOLDER ...

writes FOLDER/vllm.pt for each: the parameters of vLLM's model as its loader leaves them, and, after its own
preparation, each linear's product with the identity, [inputs, outputs]. vLLM has kernels for a CPU for INT4 and INT8.
For NVFP4, MXFP8 and FP8 in blocks, whose kernels need a GPU or AMX, its own functions that decode take their place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.kernels.linear as kernels
import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as nvfp4
import vllm.model_executor.layers.quantization.modelopt as modelopt
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.layers.quantization.utils.quant_utils import scaled_dequantize
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import PlatformEnum
from vllm.utils.torch_utils import set_default_torch_dtype


class _Nvfp4(kernels.EmulationNvFp4LinearKernel):
    """Decodes weights, and leaves inputs as they are."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scales = layer.weight_scale.data, layer.weight_global_scale
        return torch.nn.functional.linear(
            x, dequantize_to_dtype(layer.weight.data, *scales, x.dtype, 16, swizzle=False)
        )


class _Blocks(kernels.CPUFp8BlockScaledMMKernel):
    """Decodes weights, and leaves inputs as they are."""

    def __init__(self, config: Any, *args: Any, **more: Any) -> None:
        self.config, self.block = config, config.weight_quant_key.scale.group_shape

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
        scales = layer.weight_scale_inv if hasattr(layer, "weight_scale_inv") else layer.weight_scale
        return torch.nn.functional.linear(x, scaled_dequantize(layer.weight.data, scales.data, self.block, x.dtype))


def _nvfp4_kernel(use_a16: bool = False) -> _Nvfp4:
    return _Nvfp4(kernels.NvFp4LinearLayerConfig())


def numbers(folder: Path) -> dict[str, Tensor]:
    """Returns parameters by their names, and products by `product.` and the module's name."""
    config = EngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = initialize_model(config)
        model.load_weights(DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model))
        found = {name: one.data.clone() for name, one in model.named_parameters() if ".attn." not in name}
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        for name, module in model.named_modules():
            if isinstance(module, LinearBase):
                identity = torch.eye(module.input_size)
                found[f"product.{name}"] = module.quant_method.apply(module, identity.to(torch.bfloat16))
    return found


if __name__ == "__main__":
    nvfp4.init_nvfp4_linear_kernel = modelopt.init_nvfp4_linear_kernel = _nvfp4_kernel
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [_Blocks]
    kernels._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [kernels.EmulationMxfp8LinearKernel]
    for given in sys.argv[1:]:
        torch.save(numbers(Path(given)), Path(given) / "vllm.pt")
