"""GGUF files of every family equal the model they were written from; the real file equals transformers' reading of it."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakernel_runtime.interface import ModelError
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.models.registry import FAMILIES
from megakernel_runtime.weights.errors import WeightError
from megakernel_runtime.weights.load import load_weights
from megakernel_runtime.weights.quantized import QuantizedTensor
from tests.answers import load_hugging_face

HF_NAME = {f.name: f.hf_name for f in FAMILIES}


def quiet(phase, done, total):
    """Progress that nobody watches."""


def load(path, dtype=None):
    return load_weights(path, read_config(path), progress=quiet, dtype=dtype)


def load_kept(path):
    return load_weights(path, read_config(path), progress=quiet, keep_quantized=True)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [False, True])
def test_plain_types_give_the_model_back(tmp_path, tiny_model, write_gguf, name, kind, tied):
    model = tiny_model(name, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "m.gguf", model, kind=kind)
    weights, stored = load(path), model.state_dict()
    assert weights.keys() == read_config(path).weight_shapes().keys()
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for ours, value in weights.items():
        expected = stored[HF_NAME[name](ours)]
        assert torch.equal(value, expected.to(dtype) if expected.dim() == 2 else expected), ours


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_types_give_what_was_quantised(tmp_path, tiny_model, write_gguf, name, kind):
    model = tiny_model(name)
    path = write_gguf(tmp_path / "m.gguf", model, kind=kind, embed_kind="Q8_0")
    weights, kept, stored = load(path), load_kept(path), model.state_dict()
    half = load(path, dtype=torch.bfloat16)
    for ours, value in weights.items():
        original = stored[HF_NAME[name](ours)]
        if original.dim() == 2:
            chosen = gguf.GGMLQuantizationType["Q8_0" if ours == "embed" else kind]
            # a row is quantised by itself, so reordering rows and quantising them commute
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), chosen), chosen))
            quantized = kept[ours]
            assert isinstance(quantized, QuantizedTensor)
            assert quantized.kind == chosen.name
            assert quantized.shape == tuple(original.shape)
            assert torch.equal(quantized.dequantize(), expected), ours
        else:
            expected = original
            quantized = kept[ours]
            assert isinstance(quantized, torch.Tensor)
            assert torch.equal(quantized, original)
        assert torch.equal(value, expected), ours
        assert torch.equal(half[ours], expected.bfloat16()), ours


def test_head_sizes_other_than_hidden_over_heads(tmp_path, tiny_model, write_gguf):
    model = tiny_model("llama", head_dim=32, num_key_value_heads=1)
    weights = load(write_gguf(tmp_path / "m.gguf", model))
    for side in "qk":
        stored = getattr(model.model.layers[1].self_attn, f"{side}_proj").weight
        assert torch.equal(weights[f"layers.1.{side}"], stored)


def test_frequency_factors_are_no_surplus_tensor(tmp_path, tiny_model, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra={"rope_freqs.weight": torch.ones(8).numpy()})
    assert "layers.0.q" in load(path)


@pytest.mark.parametrize(
    ("keys", "extra", "message"),
    [
        ({}, {"blk.9.ffn_up.weight": torch.ones(1).numpy()}, r"'blk\.9\.ffn_up\.weight' is not part of"),
        ({"block_count": 3}, {}, r"'blk\.2\.attn_norm\.weight' is missing"),
        ({"feed_forward_length": 95}, {}, r"'blk\.0\.ffn_gate\.weight' has shape \(96, 64\), expected \(95, 64\)"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named(tmp_path, tiny_model, write_gguf, keys, extra, message):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), keys=keys, extra=extra)
    with pytest.raises(WeightError, match=message) as error:
        load(path)
    assert "m.gguf" in str(error.value)


def test_a_file_damaged_after_its_configuration_was_read(tmp_path, tiny_model, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    config = read_config(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WeightError, match=r"m\.gguf.*truncated"):
        load_weights(path, config, progress=quiet)


def test_a_quantised_vector_is_refused(tmp_path, tiny_model):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    config = tiny_model("llama", num_hidden_layers=1).config
    ones = torch.ones(config.vocab_size, 64).numpy()
    writer.add_tensor("token_embd.weight", ones)
    writer.add_tensor("output_norm.weight", gguf.quants.quantize(ones[0], kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from megakernel_runtime.weights.gguf_checkpoint import GgufCheckpoint

    with pytest.raises(WeightError, match=r"m\.gguf: tensor 'output_norm\.weight' of shape \(64,\) is Q8_0"):
        GgufCheckpoint(tmp_path / "m.gguf").read("output_norm.weight")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory, tiny_model, write_gguf):
    """Return a valid file of a model as small as they come, and its header's length."""
    model = tiny_model("qwen3", num_hidden_layers=1, vocab_size=33, hidden_size=32, intermediate_size=32)
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model, kind="Q4_1")
    return path.read_bytes(), gguf.GGUFReader(path).data_offset


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_the_header_is_loaded_or_refused(tmp_path, small_file, data):
    content, header_bytes = small_file
    position = data.draw(st.integers(0, header_bytes - 1))
    patch = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), b"\0\0\0\x7f"]))
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:position] + patch + content[position + len(patch) :])
    try:
        names, message = load(path).keys(), ""
    except ModelError as error:
        names, message = None, str(error)
    assert "m.gguf" in message if names is None else names == read_config(path).weight_shapes().keys()


@pytest.mark.slow
def test_the_real_file_equals_transformers_reading_of_it(real_model_path):
    stored = load_hugging_face(real_model_path)[0].state_dict()
    ours = load(real_model_path)
    assert len(ours) == 272
    for name, value in ours.items():
        assert torch.equal(value, stored[HF_NAME["llama"](name)]), name


def test_the_real_file_kept_quantised(real_model_path):
    kept, values = load_kept(real_model_path), load(real_model_path)
    kinds = {name: value.kind for name, value in kept.items() if isinstance(value, QuantizedTensor)}
    assert kinds.pop("embed") == "Q8_0"
    assert set(kinds.values()) == {"Q4_1"}
    assert len(kinds) == 7 * 30
    for name in ("embed", "layers.0.q", "layers.29.k", "layers.17.down"):
        quantized = kept[name]
        assert isinstance(quantized, QuantizedTensor)
        assert torch.equal(quantized.dequantize(), values[name]), name
    assert sum(value.nbytes for value in kept.values()) < real_model_path.stat().st_size
