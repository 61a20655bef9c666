"""docs/adding-a-model.md is true: its file, put into the registry, is a family that loads and builds."""

import json
import re
from pathlib import Path

import pytest

from megakernel_runtime.models import read_config as reader
from megakernel_runtime.models import registry
from megakernel_runtime.models.family import Family
from megakernel_runtime.models.fields import ConfigError
from megakernel_runtime.program.builder import build_program

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
CONFIG = {
    "architectures": ["ExampleForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def family(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    (family,) = [value for value in names.values() if isinstance(value, Family)]
    families = (*registry.FAMILIES, family)
    for module in (registry, reader):
        monkeypatch.setattr(module, "FAMILIES", families)
    return family


@pytest.fixture
def model_dir(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        return tmp_path

    return write


def test_the_family_is_read_and_found(family, model_dir):
    config = reader.read_config(model_dir())
    assert registry.family(config) is family
    assert (config.qkv_bias, config.max_position) == (True, 4096)


def test_every_weight_has_a_name(family, model_dir):
    for name in reader.read_config(model_dir()).weight_shapes():
        assert family.hf_name(name)
    assert family.hf_name("layers.1.q_bias") == "model.layers.1.self_attn.q_proj.bias"


def test_its_program_builds(family, model_dir):
    config = reader.read_config(model_dir())
    used = {weight for instruction in build_program(config).instructions for weight in instruction.weights}
    assert used == set(config.weight_shapes())


def test_what_it_does_not_compute_is_refused_by_name(family, model_dir):
    with pytest.raises(ConfigError, match="attention_bias"):
        reader.read_config(model_dir(attention_bias=False))


def test_the_page_names_what_exists():
    root = PAGE.parents[1]
    for name in re.findall(r"`((?:megakernel_runtime|tests)/[\w/]+\.py)`", PAGE.read_text()):
        assert (root / name).exists() or name.endswith("/example.py"), name
