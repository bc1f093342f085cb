"""The `quantization_config` of a checkpoint: which spelling each module's weight has.

Libraries name modules as the checkpoint does, by class, by regular expression or by wildcard, and their names may be
those of another release of a model. So what a config says decides where it has to, before any tensor is known; where
tensors are known, they decide whether a weight is in few bits, and the config says what its codes mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format
from engine.quantization.shipped.compressed_tensors import scheme_spelling
from engine.quantization.shipped.entries import Entries
from engine.quantization.shipped.floats import Floats
from engine.quantization.shipped.integers import Awq, Gptq
from engine.quantization.shipped.spelling import Spelling
from engine.sentences import listed

KEY = "quantization_config"
KNOWN_KEYS: dict[str, frozenset[str]] = {
    method: frozenset(keys.split())
    for method, keys in {
        "compressed-tensors": """
            format config_groups ignore sparsity_config transform_config
            quantization_status kv_cache_scheme global_compression_ratio version run_compressed dequantize
            use_optimized_inference""",
        "modelopt": """
            quantization quant_algo exclude_modules ignore quantized_layers config_groups group_size
            kv_cache_quant_algo kv_cache_scheme producer quant_library has_zero_point pre_quant_scale""",
        "fp8": """
            fmt expert_dtype scale_fmt weight_block_size modules_to_not_convert ignored_layers
            activation_scheme modules_to_convert dequantize kv_cache_scheme""",
        "mxfp4": "modules_to_not_convert dequantize",
        "gptq": """
            bits group_size checkpoint_format format lm_head dynamic sym is_marlin_format
            modules_to_not_convert ignored_layers
            desc_act static_groups true_sequential damp_percent damp_auto_increment act_group_aware mse
            model_name_or_path model_file_base_name model_seqlen quantizer meta version pack_dtype backend
            block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize batch_size
            pad_token_id max_input_length cache_block_outputs tokenizer dataset use_exllama disable_exllama
            exllama_config use_cuda_fp16""",
        "awq": """
            w_bit bits version zero_point q_group_size group_size modules_to_not_convert ignored_layers
            backend do_fuse modules_to_fuse fuse_max_seq_len exllama_config""",
    }.items()
}
"""Keys of each quant_method that are read, and then those that no number depends on: about activations and caches, how
codes were found, and how libraries compute with them. Which modules are in few bits the tensors say."""
GROUP_KEYS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
"""Keys of a group of modules in `config_groups`."""
GROUP_WEIGHT_KEYS = frozenset(
    (
        "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "actorder", "scale_dtype",
        "zp_dtype", "dynamic", "observer", "observer_kwargs",
    )
)  # fmt: skip
"""Keys of a group's weights: those that are read or that no stored number depends on."""
_TEXTS = ("text_config", "llm_config")
"""Where a config may have the language model's, which may have the encoding."""
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings")
_STACKS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Modules and their spelling.

    Args:
        fits: whether a module is one of them.
        spelling: None where their weights are as they are without an encoding.
    """

    fits: Callable[[str], bool] = field(repr=False)
    spelling: Spelling | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedEncoding:
    """How a checkpoint in few bits is encoded.

    Args:
        method: quant_method.
        raw: `quantization_config` as it is written.
        rules: the first that fits a module counts; none is as one without a spelling.
    """

    method: str
    raw: Mapping[str, Any]
    rules: tuple[Rule, ...]

    @property
    def unknown(self) -> str | None:
        """A remark on the keys with a value that are not known here; None without any."""
        is_modelopt = self.method.startswith("modelopt")
        known = KNOWN_KEYS["modelopt" if is_modelopt else self.method] | {"quant_method"}
        inside = self.raw.get("quantization") if is_modelopt else None
        left = [*_not_among(known, self.raw), *_of_groups(self.raw)]
        if isinstance(inside, Mapping):
            left += [f"quantization.{key}" for key in (*_not_among(known, inside), *_of_groups(inside))]
        return f"{KEY} has {listed(left)}, of no meaning here and not read" if left else None

    def spelling(self, module: str) -> Spelling | None:
        """Returns the spelling that the config gives a module, by its name in the checkpoint; None for numbers."""
        return next((rule.spelling for rule in self.rules if rule.fits(module)), None)

    def spellings(self) -> list[Spelling]:
        """Returns all spellings, each once."""
        return list(dict.fromkeys(rule.spelling for rule in self.rules if rule.spelling is not None))

    def format(self, module: str) -> Format | None:
        """Returns the format that the config gives a module; None for numbers.

        Raises:
            UserError: no format has its codes.
        """
        spelling = self.spelling(module)
        return None if spelling is None else spelling.format


def _not_among(known: Collection[str], raw: object) -> list[str]:
    """Returns the keys of a mapping that have a value and are not known."""
    return sorted(key for key, value in raw.items() if value and key not in known) if isinstance(raw, Mapping) else []


def _of_groups(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yields the places of keys of weights, in groups of modules, that are not known."""
    groups = raw.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield from (f"config_groups.{name}.{key}" for key in _not_among(GROUP_KEYS, group))
            weights = _not_among(GROUP_WEIGHT_KEYS, group.get("weights"))
            yield from (f"config_groups.{name}.weights.{key}" for key in weights)


def encoding_of(hf_config: Mapping[str, Any]) -> ShippedEncoding | None:
    """Returns the encoding that a config.json describes; None without one, or with one that is not read.

    Raises:
        UserError: it is of a kind that is read, but has a value that is not.
    """
    inside = (part.get(KEY) for key in _TEXTS if isinstance(part := hf_config.get(key), Mapping))
    raw = hf_config.get(KEY) or next((one for one in inside if one), None)
    if not isinstance(raw, Mapping):
        return None
    method = str(raw.get("quant_method", "")).lower()
    if not method and ("quant_algo" in raw or "quantization" in raw):
        method = "modelopt"
    reader = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "gptq": _gptq,
        "awq": _awq,
    }.get(method, _modelopt if method.startswith("modelopt") else None)
    if reader is None:
        return None
    return ShippedEncoding(method=method, raw=raw, rules=tuple(reader(Entries(raw))))


def without_encoding(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json without its `quantization_config`."""
    found = {key: value for key, value in hf_config.items() if key != KEY}
    for place in _TEXTS:
        if isinstance(text := found.get(place), Mapping) and KEY in text:
            found[place] = {key: value for key, value in text.items() if key != KEY}
    return found


def _is_linear(module: str) -> bool:
    """Returns whether a module of which only the name is known counts as a linear."""
    return module.rpartition(".")[2] not in _EMBEDDINGS


def _compressed_tensors(config: Entries) -> list[Rule]:
    for key in ("sparsity_config", "transform_config"):
        inner = config.mapping(key)
        if inner.raw and inner.get("format") != "dense" and (key == "sparsity_config" or inner.get("config_groups")):
            raise config.wrong(key, "none")
    left = Rule(fits=_any_target(config.texts("ignore")), spelling=None)
    groups = config.mapping("config_groups", needed=True)
    rules: list[tuple[int, Rule]] = []
    for name in groups.raw:
        group = groups.mapping(name, needed=True)
        spelling = scheme_spelling(group, config.get("format"))
        rules += [(order, Rule(fits=fits, spelling=spelling)) for order, fits in _targets(group.texts("targets"))]
    return [left, *(rule for _, rule in sorted(rules, key=lambda one: one[0]))]


def _targets(texts: Sequence[str]) -> list[tuple[int, Callable[[str], bool]]]:
    """Returns which modules targets of compressed-tensors mean, each with its place in the order in which they count:
    a name before a pattern, and that before a class."""
    patterns = [_pattern(text.removeprefix("re:")) for text in texts if text.startswith("re:")]
    names = frozenset(text for text in texts if not text.startswith("re:"))
    found: list[tuple[int, Callable[[str], bool]]] = [
        (0, names.__contains__),
        (1, lambda module: any(pattern.match(module) for pattern in patterns)),
    ]
    if "Linear" in names:
        found.append((2, _is_linear))
    if "Embedding" in names:
        found.append((2, lambda module: not _is_linear(module)))
    return found


def _any_target(texts: Sequence[str]) -> Callable[[str], bool]:
    each = [fits for _, fits in _targets(texts)]
    return lambda module: any(fits(module) for fits in each)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(
            f"config.json has {KEY} with the regular expression {text!r}, which is none ({error}): correct it or copy "
            "it again."
        ) from error


def _modelopt(config: Entries) -> list[Rule]:
    inside = config.mapping("quantization") if "quantization" in config.raw else config
    algorithm = inside.get("quant_algo")
    if algorithm is None:  # of keys and values alone
        return []
    left = Rule(fits=_excluded([*inside.texts("exclude_modules"), *inside.texts("ignore")]), spelling=None)
    if str(algorithm).upper() != "MIXED_PRECISION":
        return [left, Rule(fits=_is_linear, spelling=_modelopt_spelling(inside))]
    layers = inside.mapping("quantized_layers")
    if layers.raw:
        each: dict[Spelling, list[str]] = {}
        for name in layers.raw:
            each.setdefault(_modelopt_spelling(layers.mapping(name, needed=True)), []).append(name)
        return [left, *(Rule(fits=_below(names), spelling=one) for one, names in each.items())]
    groups = inside.mapping("config_groups", needed=True)
    rules = [left]
    for name in groups.raw:
        group = groups.mapping(name, needed=True)
        fits = _any_target(group.texts("targets"))
        weights = group.mapping("weights", needed=True)
        if (bits := weights.get("num_bits")) not in (4, 8):
            raise weights.wrong("num_bits", "4 or 8")
        rules.append(Rule(fits=fits, spelling=_of_modelopt("NVFP4" if bits == 4 else "FP8", weights)))
    return rules


def _excluded(texts: Sequence[str]) -> Callable[[str], bool]:
    """Returns which modules ModelOpt leaves out: by wildcard, or, in older files, by a part of the name."""
    wildcards = [translate(text) for text in texts if "*" in text or "?" in text]
    pattern = re.compile("|".join(wildcards) or "(?!)")  # of hundreds, one for each router, for each of all experts
    inside = _inside(texts)
    return lambda module: inside(module) or pattern.match(module) is not None


def _below(names: Sequence[str]) -> Callable[[str], bool]:
    """Returns which modules are among these, or below one of them."""
    known = frozenset(names)

    def fits(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[:end]) in known for end in range(len(parts), 0, -1))

    return fits


def _inside(names: Sequence[str]) -> Callable[[str], bool]:
    """Returns which modules have one of these in their name, from dot to dot."""
    known = frozenset(names)

    def fits(module: str) -> bool:
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        return any(".".join(parts[start:end]) in known for end in ends for start in range(end))

    return fits


def _modelopt_spelling(entry: Entries) -> Spelling:
    return _of_modelopt(str(entry.get("quant_algo")).upper(), entry)


def _of_modelopt(algorithm: str, entry: Entries) -> Spelling:
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        if entry.get("group_size", 16) != 16:
            raise entry.wrong("group_size", "16")
        return Floats(kind=FORMATS["nvfp4"], tensor_scale=".weight_scale_2", scale_shape=())
    if algorithm in ("MXFP4", "MXFP8"):
        return Floats(kind=FORMATS[algorithm.lower()])
    if algorithm == "FP8":
        return Floats(kind=FORMATS["fp8_channel"], one_scale=True, scale_shape=())
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return Floats(kind=FORMATS["fp8_channel"])
    if algorithm == "FP8_PB_WO":
        return Floats(kind=FORMATS["fp8_block"], scales=".weight_scale")
    raise entry.wrong(
        "quant_algo", "NVFP4, W4A16_NVFP4, MXFP4, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO or MIXED_PRECISION"
    )


def _fp8(config: Entries) -> list[Rule]:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise config.wrong("fmt", "e4m3")
    if config.get("expert_dtype", "fp8") != "fp8":
        raise config.wrong("expert_dtype", "fp8")
    if config.get("scale_fmt", "float") not in ("float", "ue8m0"):
        raise config.wrong("scale_fmt", "float or ue8m0")
    block = config.get("weight_block_size")
    if block is None:
        spelling = Floats(kind=FORMATS["fp8_channel"], scales=".weight_scale_inv", one_scale=True, scale_shape=())
        # of vLLM's own quantiser, which has no blocks
        other = Floats(kind=FORMATS["fp8_channel"], one_scale=True, scale_shape=())
        spellings = [spelling, other]
    else:
        rows, columns = config.pair("weight_block_size")
        if rows == 1 and columns == 32:
            spellings = [Floats(kind=FORMATS["mxfp8"], scales=".weight_scale_inv")]
        else:
            spellings = [Floats(kind=block_format(rows, columns), scales=".weight_scale_inv")]
    return [_skipped(config, ("lm_head",)), *(Rule(fits=_is_linear, spelling=one) for one in spellings)]


def block_format(rows: int, columns: int) -> Format:
    """Returns the format of e4m3 with a scale for each block."""
    return Format(name="fp8_block", group=columns, rows=rows, granule=rows)


def _mxfp4(config: Entries) -> list[Rule]:
    spelling = Floats(kind=FORMATS["mxfp4"], codes="_blocks", scales="_scales", last=16)
    return [Rule(fits=lambda module: _STACKS.search(module) is not None, spelling=spelling)]


def _gptq(config: Entries) -> list[Rule]:
    bits = config.count("bits")
    if bits not in (4, 8):
        raise config.wrong("bits", "4 or 8")
    group = 0 if config.get("group_size") == -1 else config.count("group_size", 128)
    if group % (32 // bits):
        raise config.wrong("group_size", f"-1 or a multiple of {32 // bits}")
    if config.switch("is_marlin_format", default=False):
        raise config.wrong("is_marlin_format", "false")
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise config.wrong("checkpoint_format", "gptq or gptq_v2")
    rules = [_skipped(config, () if config.switch("lm_head", default=False) else ("lm_head",))]
    for pattern in config.mapping("dynamic").raw:
        if not pattern.startswith("-:"):
            raise config.wrong("dynamic", "patterns that begin with -:")
        rules.append(Rule(fits=_any_target([f"re:{pattern.removeprefix('-:')}"]), spelling=None))
    spelling = Gptq(
        bits=bits, columns_of_group=group, has_zeros=not config.switch("sym", default=True), is_v2=version == "gptq_v2"
    )
    return [*rules, Rule(fits=_is_linear, spelling=spelling)]


def _awq(config: Entries) -> list[Rule]:
    bits = config.count("w_bit" if "w_bit" in config.raw else "bits")
    if bits != 4:
        raise config.wrong("bits", "4")
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise config.wrong("version", "gemm")
    if config.get("zero_point", True) is not True:
        raise config.wrong("zero_point", "true")
    key = "q_group_size" if "q_group_size" in config.raw else "group_size"
    group = 0 if config.get(key) == -1 else config.count(key, 128)
    if group % 8:
        raise config.wrong(key, "-1 or a multiple of 8")
    return [_skipped(config, ("lm_head",)), Rule(fits=_is_linear, spelling=Awq(columns_of_group=group))]


def _skipped(config: Entries, otherwise: tuple[str, ...]) -> Rule:
    """Returns the rule of modules that are left as they were; `otherwise` where the config does not say."""
    keys = ("modules_to_not_convert", "ignored_layers")
    key = next((key for key in keys if config.get(key) is not None), None)
    return Rule(fits=_inside(otherwise if key is None else config.texts(key)), spelling=None)
