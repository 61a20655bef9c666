"""Safetensors of every family: what transformers saves is what we load; what is wrong is named before anything else."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.weights.errors import WeightError
from megakernel_runtime.weights.load import load_weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = {
    "embed": "model.embed_tokens.weight",
    "layers.1.norm_attn": "model.layers.1.input_layernorm.weight",
    "layers.1.q": "model.layers.1.self_attn.q_proj.weight",
    "layers.0.k": "model.layers.0.self_attn.k_proj.weight",
    "layers.1.v": "model.layers.1.self_attn.v_proj.weight",
    "layers.1.o": "model.layers.1.self_attn.o_proj.weight",
    "layers.0.norm_mlp": "model.layers.0.post_attention_layernorm.weight",
    "layers.1.gate": "model.layers.1.mlp.gate_proj.weight",
    "layers.1.up": "model.layers.1.mlp.up_proj.weight",
    "layers.1.down": "model.layers.1.mlp.down_proj.weight",
    "norm_final": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.0.q_bias": "model.layers.0.self_attn.q_proj.bias",
    "layers.1.k_bias": "model.layers.1.self_attn.k_proj.bias",
    "layers.1.v_bias": "model.layers.1.self_attn.v_proj.bias",
    "layers.0.q_norm": "model.layers.0.self_attn.q_norm.weight",
    "layers.1.k_norm": "model.layers.1.self_attn.k_norm.weight",
}


def quiet(phase, done, total):
    """Progress that nobody watches."""


def load(path, dtype=None):
    return load_weights(path, read_config(path), progress=quiet, dtype=dtype)


def shards(path):
    return sorted(path.glob("*-of-*.safetensors"))


@pytest.fixture
def sharded(tmp_path, tiny_model):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    return tmp_path


@pytest.fixture
def single(tmp_path, tiny_model):
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_what_transformers_saves_is_loaded(tmp_path, tiny_model, name, tied, shard_size):
    model = tiny_model(name, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / SINGLE).exists() == (shard_size == "1GB")
    weights, stored = load(tmp_path), model.state_dict()
    assert {key: tuple(value.shape) for key, value in weights.items()} == read_config(tmp_path).weight_shapes()
    assert len(weights) == len(list(model.parameters()))
    checked = [ours for ours in NAMES if ours in weights]
    assert len(checked) == 11 + (not tied) + {"qwen2": 3, "qwen3": 2}.get(name, 0)
    for ours in checked:
        assert torch.equal(weights[ours], stored[NAMES[ours]]), ours


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float32])
def test_dtype_is_the_stored_one_or_the_asked_one(tmp_path, tiny_model, stored, asked):
    model = tiny_model("qwen3").to(stored)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path, dtype=asked)
    assert {value.dtype for value in weights.values()} == {asked or stored}
    assert torch.equal(weights["layers.1.k_norm"], model.model.layers[1].self_attn.k_norm.weight.to(asked or stored))


def test_progress_counts_bytes_to_the_end(single):
    calls = []
    load_weights(single, read_config(single), progress=lambda phase, done, total: calls.append((phase, done, total)))
    total = sum(value.nbytes for value in load_file(single / SINGLE).values())
    assert {(phase, of) for phase, _, of in calls} == {("weights", total)}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == total


def rewritten(path, change):
    """Let `change` edit the tensors of a file."""
    tensors = load_file(path)
    tensors = {name: value.clone() for name, value in tensors.items()}
    change(tensors)
    save_file(tensors, path)


HEAD, DOWN = "lm_head.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), rf"'{DOWN}' is missing"),
        (
            lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t[DOWN].clone()}),
            r"'model\.layers\.2.*not part of",
        ),
        (lambda t: t.update({"extra": t[DOWN].clone()}), "'extra' is not part of"),
        (lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), rf"'{DOWN}' has shape \(96, 64\), expected \(64, 96\)"),
        (lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), rf"'{DOWN}' is I8; supported: F32, F16, BF16"),
        (lambda t: t.update({DOWN: t[DOWN].double()}), rf"'{DOWN}' is F64"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named(single, change, message):
    rewritten(single / SINGLE, change)
    with pytest.raises(WeightError, match=message) as error:
        load(single)
    assert str(single) in str(error.value)


def test_old_rotary_buffers_are_passed_over(single):
    rewritten(single / SINGLE, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert "layers.0.q" in load(single)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_stored_beside_tied_embeddings_must_equal_them(tmp_path, tiny_model, same):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    embed = "model.embed_tokens.weight"
    rewritten(tmp_path / SINGLE, lambda t: t.update({HEAD: t[embed].clone() + (0 if same else 1)}))
    if same:
        assert "lm_head" not in load(tmp_path)
    else:
        with pytest.raises(WeightError, match=r"'lm_head\.weight' differs .* tie_word_embeddings"):
            load(tmp_path)


def test_a_missing_shard_is_named(sharded):
    shards(sharded)[2].unlink()
    with pytest.raises(WeightError, match=r"model-00003-of-\d+\.safetensors: missing.*holds tensor 'model"):
        load(sharded)


def test_a_shard_without_its_tensor_is_named(sharded):
    rewritten(shards(sharded)[0], lambda t: t.pop(min(t)))
    with pytest.raises(WeightError, match=r"model-00001-of.*is missing, though model\.safetensors\.index"):
        load(sharded)


def test_a_tensor_in_two_shards_is_named(sharded):
    first, second = shards(sharded)[:2]
    name, value = next(iter(load_file(first).items()))
    rewritten(second, lambda t: t.update({name: value}))
    with pytest.raises(WeightError, match=rf"model-00002-of.*'{name}'"):
        load(sharded)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[]", "not a JSON object"),
        ("{", "cannot be read as JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "'a' is said to be in 1"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "no file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "no file name"),
        ('{"weight_map": {"a": ".."}}', "no file name|cannot be read"),
    ],
)
def test_a_damaged_index_is_named(sharded, table, message):
    (sharded / INDEX).write_text(table)
    with pytest.raises(WeightError, match=message) as error:
        load(sharded)
    assert str(sharded) in str(error.value)


def test_a_directory_without_weights_says_what_is_looked_for(single):
    (single / SINGLE).unlink()
    with pytest.raises(WeightError, match=r"neither model\.safetensors nor"):
        load(single)
    (single / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(WeightError, match="pickled weights are not read"):
        load(single)


def test_any_truncation_is_refused(single):
    content = (single / SINGLE).read_bytes()
    for length in [0, 7, 8, 100, len(content) // 2, len(content) - 1]:
        (single / SINGLE).write_bytes(content[:length])
        with pytest.raises(WeightError, match=r"model\.safetensors: cannot be read"):
            load(single)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_the_header_is_loaded_or_refused(single, pristine, data):
    content = bytearray(pristine(single / SINGLE))
    (header_bytes,) = struct.unpack_from("<Q", content)
    position = data.draw(st.integers(0, 8 + header_bytes - 1))
    patch = data.draw(st.binary(min_size=1, max_size=9) | st.sampled_from([b"999999999", b'"', b"{", b"-1", b"I64"]))
    content[position : position + len(patch)] = patch
    (single / SINGLE).write_bytes(content)
    try:
        names, message = load(single).keys(), ""
    except WeightError as error:
        names, message = None, str(error)
    assert str(single) in message if names is None else names == read_config(single).weight_shapes().keys()


@pytest.fixture
def pristine():
    """Return a reader of what a file held when it was first asked for."""
    held = {}
    return lambda path: held.setdefault(path, path.read_bytes())


def test_an_index_wins_over_a_single_file(sharded):
    save_file({"stray": torch.ones(1)}, sharded / SINGLE)
    assert len(load(sharded)) == len(json.loads((sharded / INDEX).read_text())["weight_map"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_views_of_the_mapped_file(tmp_path, tiny_model):
    tiny_model("llama", vocab_size=20_000).save_pretrained(tmp_path)
    weights = load(tmp_path)
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if str(tmp_path) in line]
    ranges = [(int(low, 16), int(high, 16)) for low, high in mapped]
    for name, value in weights.items():
        assert any(low <= value.data_ptr() < high for low, high in ranges), name
