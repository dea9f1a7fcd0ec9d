"""config.json of a Hugging Face checkpoint -> ModelShape.

One function per family in `_FAMILIES`, keyed by the name in `architectures` and by `model_type`. What is not listed is
refused: a mixture of experts taken for a dense model would be a wrong answer that looks right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ceilingd.ceiling.quantization import WeightFormat
from ceilingd.ceiling.shape import (
    Attention,
    GatedDeltaNet,
    GatedMlp,
    Layers,
    Mixer,
    ModelShape,
    Tensor,
    embedding,
    head,
    norm,
)

Config = Mapping[str, Any]


class UnknownArchitecture(ValueError):  # noqa: N818 -- named for what the config is, as the label it becomes
    """The config is of a model family whose tensors this version does not know."""


class UnknownQuantization(ValueError):  # noqa: N818
    """The config describes a weight format, or a mix of formats, whose bytes this version cannot count."""


def parse_hf_config(config: Config) -> ModelShape:
    """The shape of the model that a config.json describes; ModelOpt's `hf_quant_config.json` may be merged in under that name.

    Raises `UnknownArchitecture`, `UnknownQuantization`, or another `ValueError` naming the missing or malformed field."""
    if not isinstance(config, Mapping):
        raise ValueError("config.json: must hold a JSON object")
    name = _family_name(config)
    family = _FAMILIES.get(name)
    if family is None:
        known = ", ".join(key for key in _FAMILIES if "For" in key)
        raise UnknownArchitecture(f"architectures: {name} is not known to this version, which knows {known}")
    text = _text(config)
    for field in _UNHANDLED:
        if text.get(field):
            raise UnknownArchitecture(f"{field}: {name} with this setting is not known to this version")
    for part in (config, text):
        _check_dtype(part)
    return family(config)


_UNHANDLED = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank")
"""Marks of mixtures of experts and of latent attention, which no family here has."""


def _family_name(config: Config) -> str:
    architectures = config.get("architectures") or ()
    if architectures:
        if isinstance(architectures, str) or not isinstance(architectures, Sequence) or not isinstance(architectures[0], str):
            raise ValueError("architectures: must be a list of names")
        return str(architectures[0])
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError("architectures: missing, and so is model_type: this is not the config.json of a model")
    return model_type


# ----------------------------------------------------------------------------------------------------------- Families


def _llama(config: Config) -> ModelShape:
    bias = _flag(config, "attention_bias")
    attention = _attention(config, qkv_bias=bias, output_bias=bias)
    return _dense(config, [(_count(config, "num_hidden_layers"), attention)], mlp_bias=_flag(config, "mlp_bias"))


def _mistral(config: Config) -> ModelShape:
    attention = _attention(config, window_tokens=_optional_count(config, "sliding_window"))
    return _dense(config, [(_count(config, "num_hidden_layers"), attention)])


def _qwen2(config: Config) -> ModelShape:
    return _dense(
        config, [(count, _attention(config, qkv_bias=True, window_tokens=window)) for count, window in _windows(config)]
    )


def _qwen3(config: Config) -> ModelShape:
    bias = _flag(config, "attention_bias")
    mixers = [
        (count, _attention(config, qkv_bias=bias, output_bias=bias, qk_norm=True, window_tokens=window))
        for count, window in _windows(config)
    ]
    return _dense(config, mixers)


def _qwen3_5(config: Config) -> ModelShape:
    text = _text(config)
    hidden = _count(text, "hidden_size")
    bias = _flag(text, "attention_bias")
    attention = _attention(
        text, qkv_bias=bias, output_bias=bias, qk_norm=True, output_gate=_flag(text, "attn_output_gate", default=True)
    )
    linear = GatedDeltaNet(
        hidden=hidden,
        key_heads=_count(text, "linear_num_key_heads"),
        key_dim=_count(text, "linear_key_head_dim"),
        value_heads=_count(text, "linear_num_value_heads"),
        value_dim=_count(text, "linear_value_head_dim"),
        convolution_kernel=_count(text, "linear_conv_kernel_dim"),
        state_element_bytes=_state_element_bytes(text),
    )
    by_type: dict[str, Mixer] = {"linear_attention": linear, "full_attention": attention}
    kinds = Counter(_layer_types(text))
    unknown = next((kind for kind in kinds if kind not in by_type), None)
    if unknown is not None:
        raise UnknownArchitecture(f"layer_types: {unknown} is not known to this version")
    tied = _flag(config, "tie_word_embeddings", default=_flag(text, "tie_word_embeddings"))
    return _dense(
        text,
        [(count, by_type[kind]) for kind, count in kinds.items()],
        weight_format=_weight_format(config),
        tied=tied,
        mtp=_qwen3_5_mtp(text, attention),
        vision_parameters=_qwen3_5_vision(config["vision_config"]) if config.get("vision_config") else 0,
    )


def _qwen3_5_mtp(text: Config, attention: Attention) -> ModelShape | None:
    """The MTP layers: `fc` over [embedding; hidden state], full-attention layers, and the target's head."""
    layers = _optional_count(text, "mtp_num_hidden_layers")
    if layers is None:
        return None
    hidden = attention.hidden
    return ModelShape(
        hidden=hidden,
        layers=(_layers(text, layers, attention, mlp_bias=False),),
        embedding=embedding(_count(text, "vocab_size"), hidden) if _flag(text, "mtp_use_dedicated_embeddings") else None,
        # SGLang holds fc as a plain, replicated linear layer: neither sharded nor quantized.
        entry=(Tensor("fc", hidden, 2 * hidden), norm("pre_fc_norm_hidden", hidden), norm("pre_fc_norm_embedding", hidden)),
        other=(norm("norm", hidden),),
    )


def _qwen3_5_vision(vision: Config) -> int:
    """Parameters of the vision tower: patch and position embedding, blocks with biases everywhere, merger."""
    if not isinstance(vision, Mapping):
        raise ValueError("vision_config: must be an object")
    width, inner, out = (_count(vision, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    patch = _count(vision, "in_channels") * _count(vision, "temporal_patch_size") * _count(vision, "patch_size") ** 2
    if vision.get("deepstack_visual_indexes"):
        raise UnknownArchitecture("vision_config.deepstack_visual_indexes: deep-stack mergers are not known to this version")
    merged = width * _count(vision, "spatial_merge_size") ** 2

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    block = 2 * 2 * width + linear(width, 3 * width) + linear(width, width) + linear(width, inner) + linear(inner, width)
    merger = 2 * width + linear(merged, merged) + linear(merged, out)
    positions = _count(vision, "num_position_embeddings") * width
    return linear(patch, width) + positions + _count(vision, "depth") * block + merger


def _eagle(config: Config) -> ModelShape:
    """An EAGLE draft: decoder layers behind `fc(2h -> h)`, with the target's embedding and head."""
    hidden = _count(config, "hidden_size")
    bias = _flag(config, "attention_bias")
    attention = _attention(config, qkv_bias=bias, output_bias=bias)
    return ModelShape(
        hidden=hidden,
        layers=(_layers(config, _count(config, "num_hidden_layers"), attention, mlp_bias=_flag(config, "mlp_bias")),),
        entry=(Tensor("fc", hidden, 2 * hidden),),
        weight_format=_weight_format(config),
    )


def _eagle3(config: Config) -> ModelShape:
    """An EAGLE3 draft: `fc(3h -> h)` over three of the target's hidden states, one layer that reads embedding and hidden
    state side by side, and a head over its own smaller vocabulary."""
    hidden = _count(config, "hidden_size")
    target_hidden = _optional_count(config, "target_hidden_size") or hidden
    bias = _flag(config, "attention_bias")
    attention = _attention(config, qkv_bias=bias, output_bias=bias, input_columns=2 * hidden)
    layers = _layers(config, _count(config, "num_hidden_layers"), attention, mlp_bias=_flag(config, "mlp_bias"))
    vocabulary = _optional_count(config, "draft_vocab_size") or _count(config, "vocab_size")
    return ModelShape(
        hidden=hidden,
        layers=(Layers(layers.count, layers.mixer, layers.mlp, (*layers.norms, norm("hidden_norm", hidden))),),
        head=head(vocabulary, hidden),
        entry=(Tensor("fc", hidden, 3 * target_hidden),),
        other=(norm("norm", hidden),),
        weight_format=_weight_format(config),
    )


_FAMILIES: dict[str, Callable[[Config], ModelShape]] = {
    "LlamaForCausalLM": _llama,
    "llama": _llama,
    "MistralForCausalLM": _mistral,
    "mistral": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "qwen2": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "qwen3": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "LlamaForCausalLMEagle": _eagle,
    "LlamaForCausalLMEagle3": _eagle3,
}


# ------------------------------------------------------------------------------------------------------------- Pieces


def _dense(
    config: Config,
    mixers: Sequence[tuple[int, Mixer]],
    *,
    mlp_bias: bool = False,
    weight_format: WeightFormat | None = None,
    tied: bool | None = None,
    mtp: ModelShape | None = None,
    vision_parameters: int = 0,
) -> ModelShape:
    """A decoder with a gated MLP in every layer; `mixers` are (number of layers, their mixer)."""
    hidden, vocabulary = _count(config, "hidden_size"), _count(config, "vocab_size")
    return ModelShape(
        hidden=hidden,
        layers=tuple(_layers(config, count, mixer, mlp_bias) for count, mixer in mixers),
        embedding=embedding(vocabulary, hidden),
        head=head(vocabulary, hidden),
        tied=_flag(config, "tie_word_embeddings") if tied is None else tied,
        other=(norm("norm", hidden),),
        weight_format=weight_format or _weight_format(config),
        mtp=mtp,
        vision_parameters=vision_parameters,
    )


def _layers(config: Config, count: int, mixer: Mixer, mlp_bias: bool) -> Layers:
    hidden = _count(config, "hidden_size")
    mlp = GatedMlp(hidden, _count(config, "intermediate_size"), bias=mlp_bias)
    return Layers(count, mixer, mlp, (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden)))


def _attention(
    config: Config,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    output_gate: bool = False,
    window_tokens: int | None = None,
    input_columns: int | None = None,
) -> Attention:
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _optional_count(config, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads, which is {heads}")
    head_dim = _optional_count(config, "head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"head_dim: missing, and hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    return Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        output_gate=output_gate,
        window_tokens=window_tokens,
        input_columns=input_columns,
    )


def _windows(config: Config) -> list[tuple[int, int | None]]:
    """(number of layers, window) of a Qwen2 or Qwen3: windows only with `use_sliding_window`, and then in the layers that
    `layer_types` names, or from layer `max_window_layers` on."""
    layers = _count(config, "num_hidden_layers")
    window = _optional_count(config, "sliding_window")
    if not _flag(config, "use_sliding_window") or window is None:
        return [(layers, None)]
    if config.get("layer_types"):
        windowed = Counter(_layer_types(config))["sliding_attention"]
    else:
        windowed = max(layers - (_optional_count(config, "max_window_layers") or 0), 0)
    return [(count, size) for count, size in ((layers - windowed, None), (windowed, window)) if count]


def _layer_types(config: Config) -> Sequence[str]:
    """One name per layer, from `layer_types` or else from `full_attention_interval`: the last of each n is full attention."""
    layers = _count(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, Sequence) or isinstance(types, str) or not all(isinstance(kind, str) for kind in types):
            raise ValueError("layer_types: must be a list of names")
        if len(types) != layers:
            raise ValueError(f"layer_types: {len(types)} entries for num_hidden_layers {layers}")
        return types
    interval = _count(config, "full_attention_interval")
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _state_element_bytes(text: Config) -> int:
    dtype = text.get("mamba_ssm_dtype", "float32")
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    if not isinstance(dtype, str) or dtype not in sizes:
        raise ValueError(f"mamba_ssm_dtype: must be one of {', '.join(sizes)}, not {dtype!r}")
    return sizes[dtype]


# ------------------------------------------------------------------------------------------------------- Quantization

_ALWAYS_KEPT = re.compile(
    r"(^|\.)(lm_head|embed_tokens|visual|vision_tower|conv1d|in_proj_a|in_proj_b|in_proj_ba|fc|\w*norm\w*)(\.|\*|$)"
)
"""Modules that stay at 16 bits in every format, so that an ignore list may name them without changing any count."""


def _check_dtype(config: Config) -> None:
    """Refuse weights that are not served in 16 bits where no quantization says so: their bytes would come out wrong."""
    for field in ("dtype", "torch_dtype"):
        dtype = config.get(field)
        # A float32 checkpoint is served in float16: what SGLang's `--dtype auto` (the default) makes of it.
        if dtype is not None and dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise UnknownQuantization(f"{field}: must be bfloat16, float16, float32 or auto, not {dtype!r}")


def _weight_format(config: Config) -> WeightFormat:
    """How the matrices are stored; 16 bits without a quantization config."""
    modelopt = config.get("hf_quant_config")
    if modelopt is not None:
        return _modelopt(_object(modelopt, "hf_quant_config"))
    quantization = config.get("quantization_config")
    if quantization is None:
        return WeightFormat()
    quantization = _object(quantization, "quantization_config")
    method = quantization.get("quant_method")
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        known = ", ".join(_METHODS)
        raise UnknownQuantization(
            f"quantization_config.quant_method: {method!r} is not known to this version, which knows {known}"
        )
    return parse(quantization)


def _fp8(quantization: Config) -> WeightFormat:
    _check_ignored(quantization.get("modules_to_not_convert"))
    block = quantization.get("weight_block_size")
    if block is None:
        return WeightFormat("fp8_tensor")
    if block != [128, 128]:
        raise UnknownQuantization(
            f"quantization_config.weight_block_size: only [128, 128] is known to this version, not {block}"
        )
    return WeightFormat("fp8_block")


def _awq(quantization: Config) -> WeightFormat:
    _check_ignored(quantization.get("modules_to_not_convert"))
    symmetric = not _flag(quantization, "zero_point", default=True)
    return WeightFormat("awq", _four_bit_group(quantization), symmetric)


def _gptq(quantization: Config) -> WeightFormat:
    if quantization.get("dynamic"):
        raise UnknownQuantization("quantization_config.dynamic: per-module GPTQ settings are not known to this version")
    symmetric = _flag(quantization, "sym", default=True)
    return WeightFormat("gptq", _four_bit_group(quantization), symmetric, head=_flag(quantization, "lm_head"))


def _four_bit_group(quantization: Config) -> int:
    bits = quantization.get("bits", quantization.get("w_bit"))
    if bits != 4:
        raise UnknownQuantization(f"quantization_config.bits: only 4 is known to this version, not {bits}")
    group = quantization.get("group_size", quantization.get("q_group_size"))
    if not isinstance(group, int) or group <= 0:
        raise UnknownQuantization(f"quantization_config.group_size: must be a positive number of weights, not {group}")
    return group


def _modelopt(quantization: Config) -> WeightFormat:
    """ModelOpt's settings, flat as in a `quantization_config` or nested as in its own `hf_quant_config.json`."""
    if quantization.get("quantization") is not None:
        quantization = _object(quantization["quantization"], "hf_quant_config.quantization")
    _check_ignored(quantization.get("exclude_modules", quantization.get("ignore")))
    algorithm = quantization.get("quant_algo")
    if algorithm == "FP8":
        return WeightFormat("fp8_tensor")
    if algorithm == "NVFP4":
        return WeightFormat("nvfp4")
    raise UnknownQuantization(f"quant_algo: only FP8 and NVFP4 are known to this version, not {algorithm!r}")


def _compressed_tensors(quantization: Config) -> WeightFormat:
    _check_ignored(quantization.get("ignore"))
    groups = _object(quantization.get("config_groups"), "quantization_config.config_groups")
    if len(groups) != 1:
        raise UnknownQuantization("quantization_config.config_groups: mixed formats are not known to this version")
    group = _object(next(iter(groups.values())), "quantization_config.config_groups")
    if group.get("targets") != ["Linear"]:
        raise UnknownQuantization(
            "quantization_config.config_groups: only a group that targets Linear is known to this version"
        )
    weights = _object(group.get("weights"), "quantization_config.config_groups.weights")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    # lm_head is a Linear too: only the ignore list keeps it out.
    head_quantized = not any("lm_head" in str(entry) for entry in quantization.get("ignore") or ())
    match kind, bits, strategy:
        case "float", 8, "tensor":
            return WeightFormat("fp8_tensor", head=head_quantized)
        case "float", 8, "channel":
            return WeightFormat("fp8_channel", head=head_quantized)
        case "float", 8, "block" if weights.get("block_structure") == [128, 128]:
            return WeightFormat("fp8_block", head=head_quantized)
        case "int", 8, "channel":
            return WeightFormat("int8_channel", head=head_quantized)
        case "int", 4, "group" if isinstance(weights.get("group_size"), int) and weights["group_size"] > 0:
            return WeightFormat("gptq", weights["group_size"], _flag(weights, "symmetric", default=True), head_quantized)
        case "float", 4, "tensor_group" if weights.get("group_size") == 16:
            return WeightFormat("nvfp4", head=head_quantized)
    raise UnknownQuantization(
        f"quantization_config.config_groups: {bits}-bit {kind} weights per {strategy} are not known to this version"
    )


_METHODS: dict[str, Callable[[Config], WeightFormat]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}


def _check_ignored(ignored: object) -> None:
    """Refuse an ignore list that keeps a counted matrix at 16 bits: the bytes would come out too low."""
    if ignored is None:
        return
    if not isinstance(ignored, Sequence) or isinstance(ignored, str):
        raise ValueError("quantization_config: the ignore list must be a list of module names")
    for entry in ignored:
        if not _ALWAYS_KEPT.search(str(entry).removeprefix("re:")):
            raise UnknownQuantization(f"quantization_config: keeping {entry!r} at 16 bits is not known to this version")


# ------------------------------------------------------------------------------------------------------------- Fields


def _text(config: Config) -> Config:
    """The language model's part: `text_config` where the config also describes a vision tower."""
    text = config.get("text_config")
    return config if text is None else _object(text, "text_config")


def _object(value: object, name: str) -> Config:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: must be an object")
    return value


def _count(config: Config, name: str) -> int:
    """A required positive integer."""
    value = config.get(name)
    if value is None:
        raise ValueError(f"{name}: missing in the model's config")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
        raise ValueError(f"{name}: must be a positive whole number, not {value!r}")
    return value


_LARGEST = 10**9
"""Above any dimension of any model; keeps a corrupt config from becoming an absurd ceiling."""


def _optional_count(config: Config, name: str) -> int | None:
    """A positive integer, or `None` where the field is missing, null or 0."""
    return _count(config, name) if config.get(name) else None


def _flag(config: Config, name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, not {value!r}")
    return value
