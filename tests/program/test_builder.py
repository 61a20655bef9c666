import itertools

import pytest

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.builder import build_program
from megakernel_runtime.program.isa import Kind, Op


def config(*, tied=False, bias=False, norm=False, n_layers=3):
    return ModelConfig(
        architecture="llama",
        vocab_size=131,
        hidden_size=48,
        n_layers=n_layers,
        n_heads=6,
        n_kv_heads=2,
        head_dim=10,
        ffn_size=64,
        norm_eps=1e-5,
        rope_theta=1e4,
        max_position=64,
        tied_embeddings=tied,
        qkv_bias=bias,
        qk_norm=norm,
    )


ALL = [
    {"tied": t, "bias": b, "norm": n, "n_layers": layers}
    for t, b, n, layers in itertools.product((False, True), (False, True), (False, True), (1, 3))
]


@pytest.mark.parametrize("kw", ALL)
def test_every_weight_is_used_and_none_is_invented(kw):
    c = config(**kw)
    used = [w for i in build_program(c).instructions for w in i.weights]
    assert set(used) == set(c.weight_shapes())
    twice = {"embed"} if c.tied_embeddings else set()
    assert {w for w in used if used.count(w) > 1} == twice


def test_weights_stand_in_the_order_of_the_instruction_set():
    qkv = next(i for i in build_program(config(bias=True, norm=True)).instructions if i.op is Op.QKV and i.layer == 2)
    leaves = ["norm_attn", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm"]
    assert list(qkv.weights) == [f"layers.2.{leaf}" for leaf in leaves]
    tied, untied = (build_program(config(tied=t)).instructions[-3] for t in (True, False))
    assert tied.weights == ("norm_final", "embed")
    assert untied.weights == ("norm_final", "lm_head")


@pytest.mark.parametrize("kw", ALL)
def test_what_is_read_was_written_before_or_lives_across_steps(kw):
    program = build_program(config(**kw))
    written = {b.name for b in program.buffers if b.kind is not Kind.ACTIVATION}
    for instruction in program.instructions:
        assert set(instruction.reads) <= written, instruction
        written |= set(instruction.writes)
    assert written == {b.name for b in program.buffers}


@pytest.mark.parametrize("kw", ALL)
def test_every_activation_that_is_written_is_read(kw):
    program = build_program(config(**kw))
    for at, instruction in enumerate(program.instructions):
        for name in instruction.writes:
            if program.buffer(name).kind is Kind.ACTIVATION:
                later = program.instructions[at + 1 :]
                next_use = next(i for i in later if name in i.reads or name in i.writes)
                assert name in next_use.reads, (instruction, next_use)


def test_order_of_a_step():
    ops = [i.op for i in build_program(config(n_layers=2)).instructions]
    layer = [Op.QKV, Op.ATTEND, Op.COMBINE, Op.OUT, Op.GATE_UP, Op.DOWN]
    assert ops == [Op.EMBED, *layer, *layer, Op.LM_HEAD, Op.SAMPLE, Op.ADVANCE]


def test_buffers():
    program = build_program(config())
    widths = {b.name: (b.columns, b.dtype) for b in program.buffers}
    assert widths == {
        "resid": (48, "f32"),
        "q": (60, "bf16"),
        "partials": (6 * 12, "f32"),
        "attn": (60, "bf16"),
        "act": (64, "bf16"),
        "logits": (131, "f32"),
        "token": (1, "i32"),
        "kv": (40, "bf16"),
        "slots": (1, "i32"),
    }
    with pytest.raises(KeyError):
        program.buffer("nothing")
