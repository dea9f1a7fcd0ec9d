"""config.json of real models as shapes; everything unknown or malformed refused by name."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceilingd.ceiling.quantization import WeightFormat
from ceilingd.ceiling.shape import Attention, GatedDeltaNet, ModelShape
from ceilingd.parse.hf_config import UnknownArchitecture, UnknownQuantization, parse_hf_config
from support.shapes import CONFIGS, read_config, shape_of

with (CONFIGS / "published_totals.csv").open(encoding="utf-8") as file:
    PUBLISHED = [(row["model"], row["counts"], int(row["published_parameters"])) for row in csv.DictReader(file)]


def counted(shape: ModelShape, counts: str) -> int:
    parts = {"main": shape.parameters, "vision": shape.vision_parameters, "mtp": shape.mtp.parameters if shape.mtp else 0}
    return sum(parts[part] for part in counts.split("+"))


@pytest.mark.parametrize(("model", "counts", "published"), PUBLISHED)
def test_parameter_totals_are_those_published(model: str, counts: str, published: int) -> None:
    assert counted(shape_of(model), counts) == published


def test_qwen3_6_is_three_linear_layers_to_one_of_attention() -> None:
    linear, attention = shape_of("qwen3.6-27b").layers
    assert (linear.count, attention.count) == (48, 16)
    assert linear.mixer == GatedDeltaNet(5120, 16, 128, 48, 128, convolution_kernel=4, state_element_bytes=4)
    assert attention.mixer == Attention(5120, 24, 4, 256, qk_norm=True, output_gate=True)


def test_layer_types_follow_from_the_interval_where_they_are_not_listed() -> None:
    config = read_config("qwen3.6-27b")
    del config["text_config"]["layer_types"]
    assert parse_hf_config(config) == shape_of("qwen3.6-27b")


def test_the_text_model_alone_has_no_vision_tower() -> None:
    text = read_config("qwen3.6-27b")["text_config"]
    shape = parse_hf_config(text)
    assert (shape.vision_parameters, shape.parameters) == (0, shape_of("qwen3.6-27b").parameters)


def test_model_type_stands_in_for_missing_architectures() -> None:
    config = read_config("llama-3.1-8b")
    del config["architectures"]
    assert parse_hf_config(config) == shape_of("llama-3.1-8b")


def test_a_state_kept_in_bfloat16() -> None:
    config = read_config("qwen3.6-27b")
    config["text_config"]["mamba_ssm_dtype"] = "bfloat16"
    mixer = parse_hf_config(config).layers[0].mixer
    assert isinstance(mixer, GatedDeltaNet)
    assert mixer.state_element_bytes == 2


def windows(config: dict[str, Any]) -> list[tuple[int, int | None]]:
    return [(group.count, group.mixer.window_tokens) for group in parse_hf_config(config).layers]


def test_sliding_windows() -> None:
    assert windows(read_config("mistral-7b-v0.1")) == [(32, 4096)]
    qwen = read_config("qwen2.5-7b")
    assert windows(qwen) == [(28, None)]
    qwen |= {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    assert windows(qwen) == [(20, None), (8, 4096)]
    qwen |= {"layer_types": ["full_attention", "sliding_attention"] * 14}
    assert windows(qwen) == [(14, None), (14, 4096)]


def test_biases_are_counted() -> None:
    plain = shape_of("llama-3.1-8b")
    biased = parse_hf_config(read_config("llama-3.1-8b") | {"attention_bias": True, "mlp_bias": True})
    assert biased.parameters - plain.parameters == 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)


def test_drafts() -> None:
    eagle3 = shape_of("eagle3-llama-3.1-8b")
    assert (eagle3.embedding, eagle3.entry[0].columns) == (None, 3 * 4096)
    assert eagle3.head is not None
    assert (eagle3.head.rows, eagle3.layer_count) == (32000, 1)
    mtp = shape_of("qwen3.6-27b").mtp
    assert mtp is not None
    assert (mtp.head, mtp.embedding) == (None, None)


# --------------------------------------------------------------------------------------------------------------- Refused


@pytest.mark.parametrize(
    "model",
    ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gemma-3-27b", "qwen3-next-80b-a3b", "qwen3.6-35b-a3b"],
)
def test_families_that_are_not_modelled_are_refused(model: str) -> None:
    with pytest.raises(UnknownArchitecture, match=r"^architectures: .* is not known to this version"):
        parse_hf_config(read_config(model))


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"])
def test_experts_and_latent_attention_never_pass_as_dense(field: str) -> None:
    with pytest.raises(UnknownArchitecture, match=f"^{field}: "):
        parse_hf_config(read_config("llama-3.1-8b") | {field: 8})
    config = read_config("qwen3.6-27b")
    config["text_config"][field] = 8
    with pytest.raises(UnknownArchitecture, match=f"^{field}: "):
        parse_hf_config(config)


def test_deep_stack_vision_and_unknown_layers_are_refused() -> None:
    config = read_config("qwen3.6-27b")
    config["vision_config"]["deepstack_visual_indexes"] = [8]
    with pytest.raises(UnknownArchitecture, match="deepstack"):
        parse_hf_config(config)
    config = read_config("qwen3.6-27b")
    config["text_config"]["layer_types"][0] = "mamba2"
    with pytest.raises(UnknownArchitecture, match=r"^layer_types: mamba2"):
        parse_hf_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "^hidden_size: missing in the model's config"),
        ({"hidden_size": "4096"}, "^hidden_size: must be a positive whole number, not '4096'"),
        ({"hidden_size": -1}, "^hidden_size: must be a positive whole number"),
        ({"hidden_size": 10**12}, "^hidden_size: must be a positive whole number"),
        ({"num_hidden_layers": True}, "^num_hidden_layers: must be a positive whole number, not True"),
        ({"num_attention_heads": 33}, "^num_key_value_heads: 8 does not divide num_attention_heads, which is 33"),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, "^head_dim: missing"),
        ({"tie_word_embeddings": "no"}, "^tie_word_embeddings: must be true or false"),
        ({"architectures": "LlamaForCausalLM"}, "^architectures: must be a list of names"),
        ({"architectures": [], "model_type": None}, "^architectures: missing"),
        ({"text_config": 3}, "^text_config: must be an object"),
        ({"quantization_config": []}, "^quantization_config: must be an object"),
    ],
)
def test_a_malformed_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hf_config(read_config("llama-3.1-8b") | change)


def test_layer_types_must_fit_the_layers() -> None:
    config = read_config("qwen3.6-27b")
    config["text_config"]["num_hidden_layers"] = 32
    with pytest.raises(ValueError, match=r"^layer_types: 64 entries for num_hidden_layers 32"):
        parse_hf_config(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


@given(st.data(), JSON)
def test_a_field_of_any_value_gives_a_shape_or_one_sentence(data: st.DataObject, value: object) -> None:
    config = read_config(data.draw(st.sampled_from(["qwen3.6-27b", "llama-3.1-70b-fp8", "eagle3-qwen3-8b", "qwen2.5-7b"])))
    part = data.draw(st.sampled_from([config, *(child for child in config.values() if isinstance(child, dict))]))
    part[data.draw(st.sampled_from([*sorted(part), "quantization_config", "hf_quant_config", "kv_lora_rank"]))] = value
    try:
        shape = parse_hf_config(config)
    except ValueError as error:
        answered = bool(str(error))
    else:
        answered = shape.parameters > 0
    assert answered


# ---------------------------------------------------------------------------------------------------------- Quantization


def compressed(weights: dict[str, Any], ignore: list[str] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"] if ignore is None else ignore,
    }


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, WeightFormat("fp8_block")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, WeightFormat("fp8_tensor")),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, WeightFormat("awq")),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}, WeightFormat("gptq", 64, symmetric=True)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "lm_head": True},
            WeightFormat("gptq", head=True),
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, WeightFormat("nvfp4")),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
            WeightFormat("fp8_tensor"),
        ),
        (compressed({"type": "float", "num_bits": 8, "strategy": "tensor"}), WeightFormat("fp8_tensor")),
        (compressed({"type": "float", "num_bits": 8, "strategy": "channel"}), WeightFormat("fp8_channel")),
        (compressed({"type": "float", "num_bits": 8, "strategy": "channel"}, []), WeightFormat("fp8_channel", head=True)),
        (
            compressed({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}),
            WeightFormat("fp8_block"),
        ),
        (compressed({"type": "int", "num_bits": 8, "strategy": "channel"}), WeightFormat("int8_channel")),
        (
            compressed({"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}),
            WeightFormat("gptq", symmetric=True),
        ),
        (
            compressed({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
            WeightFormat("nvfp4"),
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_quantization_configs(quantization: dict[str, Any], expected: WeightFormat) -> None:
    assert parse_hf_config(read_config("llama-3.1-8b") | {"quantization_config": quantization}).weight_format == expected


def test_modelopts_own_file_merged_in() -> None:
    assert shape_of("llama-3.1-70b-fp8").weight_format == WeightFormat("fp8_tensor")


def test_an_ignore_list_may_name_what_stays_at_16_bits_anyway() -> None:
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.visual.blocks.0.attn.qkv", "mtp.fc"],
    }
    config = read_config("qwen3.6-27b") | {"quantization_config": quantization}
    assert parse_hf_config(config).weight_format == WeightFormat("fp8_block")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"^quantization_config\.quant_method: 'bitsandbytes'"),
        ({}, r"^quantization_config\.quant_method: None"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size: only"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3.self_attn"]}, "keeping 'model.layers.3.self_attn'"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits: only 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "group_size: must be"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:q": {}}}, "dynamic: "),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "^quant_algo: only FP8 and NVFP4"),
        (compressed({"type": "int", "num_bits": 2, "strategy": "group"}), "2-bit int weights per group"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "mixed formats"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*mlp.*"]}}}, "targets Linear"),
    ],
    ids=str,
)
def test_formats_that_cannot_be_counted_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownQuantization, match=message):
        parse_hf_config(read_config("llama-3.1-8b") | {"quantization_config": quantization})


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float64", "float8", 16, ["bfloat16"]])
def test_weights_that_are_not_of_16_bits_are_refused(field: str, dtype: object) -> None:
    with pytest.raises(UnknownQuantization, match=f"^{field}: must be bfloat16, float16, float32 or auto, not "):
        parse_hf_config({**read_config("qwen3-8b"), field: dtype})
    nested = read_config("qwen3.6-27b")
    nested["text_config"][field] = dtype
    with pytest.raises(UnknownQuantization, match=f"^{field}: "):
        parse_hf_config(nested)


@pytest.mark.parametrize("dtype", [None, "auto", "bfloat16", "float16", "float32"])
def test_16_bit_types_and_none_are_the_same_shape(dtype: str | None) -> None:
    assert parse_hf_config({**read_config("qwen3-8b"), "torch_dtype": dtype}) == shape_of("qwen3-8b")
