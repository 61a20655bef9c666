"""config.json of every family, in both spellings, against transformers' own reading of it; refusals by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from megakernel_runtime.models.config import ModelConfig, RopeScaling
from megakernel_runtime.models.fields import ConfigError
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.models.registry import FAMILIES, family

ARCHITECTURES = {f.name: f.hf_architecture for f in FAMILIES}
REQUIRED = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}


def write(folder, values, generation=None):
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def minimal(name, **changes):
    return {"architectures": [ARCHITECTURES[name]], "model_type": name, **REQUIRED, **changes}


def assert_same(ours, theirs):
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.n_layers == theirs.num_hidden_layers
    assert ours.n_heads == theirs.num_attention_heads
    assert ours.n_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.ffn_size == theirs.intermediate_size
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.bos_token_id == theirs.bos_token_id
    ends = theirs.eos_token_id
    assert ours.eos_token_ids == (() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_absent_keys_mean_what_they_mean_in_transformers(tmp_path, name):
    values = minimal(name)
    ours = read_config(write(tmp_path, values))
    assert_same(ours, AutoConfig.from_pretrained(tmp_path))
    assert family(ours).name == name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_null_keys_mean_what_they_mean_in_transformers(tmp_path, name):
    values = minimal(name, num_attention_heads=4, num_key_value_heads=2, sliding_window=None, eos_token_id=None)
    if name != "mistral":  # transformers refuses null here
        values["num_key_value_heads"] = None
    if name != "qwen3":  # and here
        values["head_dim"] = None
    write(tmp_path, values)
    assert_same(read_config(tmp_path), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_read_back(tmp_path, tiny_model, name, tied):
    model = tiny_model(name, tie_word_embeddings=tied, rms_norm_eps=1e-5, eos_token_id=[2, 5], head_dim=32)
    model.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert_same(ours, model.config)
    assert ours.qkv_bias == (name == "qwen2")
    assert ours.qk_norm == (name == "qwen3")


def test_model_type_stands_in_for_absent_architectures(tmp_path):
    values = minimal("qwen2")
    del values["architectures"]
    assert read_config(write(tmp_path, values)).architecture == "qwen2"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_theta": 2e4, "rope_scaling": None}, 2e4, None),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2}}, 2e4, RopeScaling("linear", 2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 1e4, RopeScaling("linear", 4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rotation_in_both_spellings(tmp_path, rope, theta, scaling):
    config = read_config(write(tmp_path, minimal("llama", **rope)))
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"sliding_window": 16, "use_sliding_window": False}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ({"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}, 16),
        ({"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}, None),
        ({"sliding_window": None, "use_sliding_window": True}, None),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_window_of_qwen(tmp_path, name, changes, window):
    config = read_config(write(tmp_path, minimal(name, **changes)))
    assert config.sliding_window == window


@pytest.mark.parametrize(
    ("given", "window"), [({"sliding_window": 7}, 7), ({"sliding_window": None}, None), ({}, 4096)]
)
def test_window_of_mistral(tmp_path, given, window):
    assert read_config(write(tmp_path, minimal("mistral", **given))).sliding_window == window


def test_llama_has_no_window_whatever_the_file_says(tmp_path):
    assert read_config(write(tmp_path, minimal("llama", sliding_window=7))).sliding_window is None


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        (None, (2,)),
        ({}, (2,)),
        ({"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": None}, (2,)),
    ],
)
def test_generation_config_names_the_ends(tmp_path, generation, ends):
    assert read_config(write(tmp_path, minimal("llama"), generation)).eos_token_ids == ends


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, ("architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM")),
        ("llama", {"architectures": ["LlamaForCausalLM", "Other"]}, ("architectures", "Other")),
        ("llama", {"architectures": None, "model_type": "gpt2"}, ("architectures", "LlamaForCausalLM")),
        ("llama", {"attention_bias": True}, ("attention_bias", "True", "False")),
        ("qwen3", {"attention_bias": True}, ("attention_bias", "True", "False")),
        ("llama", {"mlp_bias": True}, ("mlp_bias", "True", "False")),
        ("llama", {"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ("mistral", {"num_local_experts": 8}, ("num_local_experts", "8")),
        ("qwen3", {"num_experts": 128}, ("num_experts", "128")),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_type", "yarn", "linear")),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ("type", "dynamic", "linear")),
        ("llama", {"rope_scaling": {"type": "linear"}}, ("factor", "missing")),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, ("factor", "-1")),
        ("llama", {"rope_scaling": "linear"}, ("rope_scaling", "object")),
        ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ("high_freq_factor",)),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ("full_attention",)),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
        ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, ("max_window_layers", "1")),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, ("layer_types", "one kind")),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ("layer_types",)),
        ("qwen2", {"layer_types": [["x"]]}, ("layer_types",)),
        ("llama", {"hidden_size": None}, ("hidden_size", "missing", "integer")),
        ("llama", {"hidden_size": "64"}, ("hidden_size", "64")),
        ("llama", {"hidden_size": True}, ("hidden_size", "True")),
        ("llama", {"num_hidden_layers": 10**9}, ("num_hidden_layers", "4096")),
        ("llama", {"vocab_size": 0}, ("vocab_size", "0")),
        ("llama", {"rms_norm_eps": 0}, ("rms_norm_eps", "0")),
        ("llama", {"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ("llama", {"rope_theta": float("inf")}, ("rope_theta", "inf")),
        ("llama", {"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "yes")),
        ("llama", {"num_key_value_heads": 3}, ("32", "3", "multiple")),
        ("llama", {"head_dim": 5}, ("head size 5", "even")),
        ("llama", {"head_dim": 1 << 20}, ("width",)),
        ("llama", {"eos_token_id": 131}, ("131", "vocabulary")),
        ("llama", {"eos_token_id": [1, "2"]}, ("eos_token_id", "token id")),
        ("llama", {"bos_token_id": -1}, ("bos_token_id", "-1")),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, name, changes, expected):
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, minimal(name, **changes)))
    for part in ("config.json", *expected):
        assert part in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1} x'])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_an_oversized_file_is_refused_unread(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(65 * 1024 * 1024)
    with pytest.raises(ConfigError, match="larger than"):
        read_config(tmp_path)


def test_a_directory_without_config_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json.*\.gguf"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(tmp_path / "nowhere")


ANY_KEY = st.sampled_from(
    [
        *REQUIRED,
        *(
            "architectures",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
        ),
        *("max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "hidden_act", "model_type"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers(-2, 40) | st.integers() | st.floats() | st.text(max_size=5)
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "type", "rope_theta", "factor", *LLAMA3]),
    SCALARS | st.just("llama3") | st.just("linear"),
)
ANY_VALUE = SCALARS | st.lists(SCALARS, max_size=3) | ROPE


@pytest.mark.parametrize("name", ARCHITECTURES)
@given(changes=st.dictionaries(ANY_KEY, ANY_VALUE, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_are_read_or_refused(tmp_path, name, changes):
    try:
        config, message = read_config(write(tmp_path, minimal(name, **changes), {"eos_token_id": None})), ""
    except ConfigError as error:
        config, message = None, str(error)
    assert isinstance(config, ModelConfig) or "config.json" in message
