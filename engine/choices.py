"""Names that an option offers and the code behind it goes by: written once, for the configuration and for lower layers.

A layer that is given one of these knows what to do, and not where it was asked for.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

VISION = "vision."
"""Prefix of the names of a vision model's modules, and of their parameters."""

Implementation = Literal["auto", "native", "adopted"]
"""Whose layers a model has: the engine's own, or transformers' modules; "auto" takes the engine's own where it has the
family."""
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

STORED: Final = "stored"
"""The `BaseDType` of a checkpoint in few bits that stays as it is."""
Encoded = Literal["nf4", "int8", "fp8", "fp8_row", "nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4"]
ENCODED: tuple[Encoded, ...] = get_args(Encoded)
"""Encodings that weights are given while they are read."""
BaseDType = Literal["stored", Encoded]
"""How frozen linears are stored."""
BASE_DTYPES: tuple[BaseDType, ...] = (STORED, *ENCODED)
MULTIPLIED_AS_CODES: tuple[Encoded, ...] = ("fp8", "fp8_row")
"""Those whose products read codes, and round inputs too; linears in the others are decoded first."""

BaseProducts = Literal["decoded", "codes"]
BASE_PRODUCTS: tuple[BaseProducts, ...] = get_args(BaseProducts)
"""Whether products with a base in few bits are of numbers, or of codes with rounded inputs."""
SCALED_DTYPES = ("stored", "nvfp4", "mxfp8", "fp8_block")
"""Those in which weights may have products of codes."""

MERGED_DTYPES = ("stored", "nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4", "int8")
"""Those in which a model can be merged while it trains, and a merged checkpoint written."""
ExportDType = Literal["nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4", "int8", "stored"]
EXPORT_DTYPES: tuple[ExportDType, ...] = get_args(ExportDType)
"""How an export stores the linears of a merged model; "stored" is as the base has them."""
QuantMethod = Literal["compressed-tensors", "fp8"]
QUANT_METHODS: tuple[QuantMethod, ...] = get_args(QuantMethod)
"""Whose names such tensors have: config.json's quant_method."""

Recompute = Literal["none", "selective", "attention", "full"]
RECOMPUTE_LEVELS: tuple[Recompute, ...] = get_args(Recompute)
"""Each keeps less than the one before it."""

LearningRateSchedule = Literal["constant", "linear", "cosine"]

PipelineSchedule = Literal["1f1b", "interleaved", "zb_h1", "zb_v", "lora"]
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)

ExpertFactors = Literal["per_expert", "shared_outer", "shared"]
"""Which factors of their adapters the experts of a layer have of their own; see
`engine.experts.layers.expert_adapters`."""

AdapterForm = Literal["per_expert", "stacked", "shared_outer"]
ADAPTER_FORMS: tuple[AdapterForm, ...] = get_args(AdapterForm)
"""How an exported adapter has the experts' factors; see `engine.conversion.peft_experts`."""
AdapterReader = Literal["peft", "vllm", "sglang"]
ADAPTER_READERS: tuple[AdapterReader, ...] = get_args(AdapterReader)

ShardLevel = Literal["none", "optimizer", "gradients", "parameters"]
"""What is spread over data-parallel ranks; each spreads more than the one before it."""

EntropyUse = Literal["none", "values", "gradient"]
"""What an objective takes of the entropies of the tokens' distributions: nothing, numbers, or these with gradients."""
PolicyLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "luspo", "vespo"]
"""How the losses of a completion's tokens become one number."""
RatioLevel = Literal["token", "sequence"]
"""What has an importance ratio: each token, or a completion as a whole."""

RewardScale = Literal["group", "batch", "none"]
"""Whose standard deviation rewards are divided by."""

RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
"""Whether rewards of several functions are added up, or the advantages of each."""

ImportanceCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""What is done where the sampler's probabilities are not the trainer's."""

DecodeGraph = Literal["auto", "none"]
"""Whether passes that generate a token of each row are replayed: "auto" where they can be, as CUDA graphs on a GPU."""
DECODE_GRAPHS: tuple[DecodeGraph, ...] = get_args(DecodeGraph)

Remainder = Literal["renormalize", "bucket"]
ServerKind = Literal["vllm", "sglang"]
"""Whose server samples completions."""
RouterReplay = Literal["auto", "on", "off"]
Mismatch = Literal["warn", "correct", "stop"]
ToolFormat = Literal["hermes", "qwen_xml", "llama", "mistral", "harmony"]
"""How a model writes calls of tools."""
"""What is done where a server's log-probabilities are not the trainer's."""
