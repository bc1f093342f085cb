"""Small random vision-language models that stock transformers has, saved as it saves them, and what is asked of them.

Shapes are awkward on purpose. transformers takes seconds to import, so that happens inside the functions: ranks import
this module and need none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from engine.batch import IGNORE_LABEL, Batch, Images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT = {
    "vocab_size": 67, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 21,
    "patch_size": 7,
}  # fmt: skip
IMAGE = 66
"""The token that stands for a feature."""


def _llava(text: str, **changes: Any) -> PreTrainedModel:
    import transformers

    more = {"image_token_index": IMAGE, "image_seq_length": 9, **changes}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER), text_config=_text(text), **more
    )
    return transformers.LlavaForConditionalGeneration(config)


def _text(kind: str) -> Any:
    import transformers

    more = {"Qwen3": {"head_dim": 6}, "Mistral": {"sliding_window": 7}}.get(kind, {})
    return getattr(transformers, f"{kind}Config")(**TEXT, **more)


MODELS = {
    "llava": lambda: _llava("Llama"),
    "llava mistral": lambda: _llava("Mistral", vision_feature_layer=-1, multimodal_projector_bias=False),
    "llava qwen2": lambda: _llava("Qwen2", vision_feature_layer=[-3, 2, 0], projector_hidden_act="gelu_pytorch_tanh"),
    "llava qwen3": lambda: _llava("Qwen3", vision_feature_select_strategy="full"),
}
"""Model -> makes it."""


def make_model(name: str, folder: Path | None = None) -> PreTrainedModel:
    """The model, every parameter drawn, and saved in `folder`."""
    torch.manual_seed(len(name))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=1.0 if "norm" in key and "bias" not in key else 0.0, std=0.2)
            else:
                nn.init.normal_(parameter, std=0.8 * parameter[0].numel() ** -0.5)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def pixels(count: int, side: int = 21, seed: int = 0) -> Tensor:
    """Normalised pictures [count, 3, side, side]."""
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def patches(pixels_NCHW: Tensor, patch: int = 7) -> Tensor:
    """Patches [P, 3 * patch ** 2] of pictures, as towers read them."""
    return rearrange(pixels_NCHW, "n c (h p) (w q) -> (n h w) (c p q)", p=patch, q=patch)


def batch_of(ids_BS: Tensor, images: Images, *, lengths: tuple[int, ...] | None = None) -> Batch:
    """Whole rows, packed with documents of these lengths; every next token is a target that is no picture's."""
    rows, length = ids_BS.shape
    lengths = lengths or (length,) * rows
    labels = torch.cat([ids_BS[:, 1:], torch.full((rows, 1), IGNORE_LABEL)], dim=1)
    ends = torch.tensor(lengths).cumsum(0) - 1
    labels.view(-1)[ends] = IGNORE_LABEL
    labels[labels == IMAGE] = IGNORE_LABEL
    return Batch(
        tokens_BS=ids_BS,
        labels_BS=labels,
        positions_BS=torch.cat([torch.arange(count) for count in lengths]).view_as(ids_BS),
        token_index_BS=torch.arange(ids_BS.numel()).view_as(ids_BS),
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        document_lengths=lengths,
        images=images,
    )
