"""From a model's configuration to its program: the instructions of one step in order, and the buffers between them.

The same program serves every batch, page size and device; whoever runs it decides how rows and columns are split.
Standard library only; must not know: devices, batches, tensors.

One step runs T rows (tokens of any slots); buffers are (T, columns). Per instruction, what is read and written:

| op       | reads           | writes   | meaning                                                                   |
| -------- | --------------- | -------- | ------------------------------------------------------------------------- |
| EMBED    | slots, token    | resid    | a row's token id comes from its slot, or is the one sampled last, `token` |
| QKV      | resid, slots    | q, kv    | `slots` gives positions and page tables                                   |
| ATTEND   | q, kv, slots    | partials | a row sees positions up to its own, within the window                     |
| COMBINE  | partials, slots | attn     | `slots` gives how many spans a row has                                    |
| OUT      | resid, attn     | resid    |                                                                           |
| GATE_UP  | resid           | act      |                                                                           |
| DOWN     | resid, act      | resid    |                                                                           |
| LM_HEAD  | resid           | logits   | only rows that sample                                                     |
| SAMPLE   | logits, slots   | token    | only rows that sample                                                     |
| ADVANCE  | token, slots    | slots    | appends tokens, moves positions, finishes slots                           |
"""

from __future__ import annotations

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Buffer, Instruction, Kind, Op, Program

# Beside a span's weighted values, a partial holds the span's largest score and its sum of exponentials.
PARTIAL_EXTRA_COLUMNS = 2


def build_program(config: ModelConfig) -> Program:
    """Return the program of `config`: one EMBED, six instructions a layer, then LM_HEAD, SAMPLE and ADVANCE.

    Every weight of `config.weight_shapes()` is named by at least one instruction. The tail is the same for all models.
    """
    instructions = [Instruction(Op.EMBED, None, ("slots", "token"), ("resid",), ("embed",))]
    for layer in range(config.n_layers):
        instructions += _layer(config, layer)
    head = "embed" if config.tied_embeddings else "lm_head"
    instructions += (
        Instruction(Op.LM_HEAD, None, ("resid",), ("logits",), ("norm_final", head)),
        Instruction(Op.SAMPLE, None, ("logits", "slots"), ("token",)),
        Instruction(Op.ADVANCE, None, ("token", "slots"), ("slots",)),
    )
    return Program(_buffers(config), tuple(instructions))


def _buffers(config: ModelConfig) -> tuple[Buffer, ...]:
    return (
        Buffer("resid", Kind.ACTIVATION, config.hidden_size, "f32"),
        Buffer("q", Kind.ACTIVATION, config.q_size, "bf16"),
        # one row per (row, span): for each query head its values, then the largest score and the sum
        Buffer("partials", Kind.ACTIVATION, config.n_heads * (config.head_dim + PARTIAL_EXTRA_COLUMNS), "f32"),
        Buffer("attn", Kind.ACTIVATION, config.q_size, "bf16"),
        Buffer("act", Kind.ACTIVATION, config.ffn_size, "bf16"),
        Buffer("logits", Kind.ACTIVATION, config.vocab_size, "f32"),
        Buffer("token", Kind.STATE, 1, "i32"),
        # one row per (layer, token): all key heads, then all value heads
        Buffer("kv", Kind.KV, 2 * config.kv_size, "bf16"),
        # opaque to the program: tokens, position, page table, sampling parameters; columns are the device's choice
        Buffer("slots", Kind.STATE, 1, "i32"),
    )


def _layer(config: ModelConfig, layer: int) -> tuple[Instruction, ...]:
    def named(*leaves: str) -> tuple[str, ...]:
        return tuple(f"layers.{layer}.{leaf}" for leaf in leaves)

    biases = ("q_bias", "k_bias", "v_bias") if config.qkv_bias else ()
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return (
        Instruction(Op.QKV, layer, ("resid", "slots"), ("q", "kv"), named("norm_attn", "q", "k", "v", *biases, *norms)),
        Instruction(Op.ATTEND, layer, ("q", "kv", "slots"), ("partials",)),
        Instruction(Op.COMBINE, layer, ("partials", "slots"), ("attn",)),
        Instruction(Op.OUT, layer, ("resid", "attn"), ("resid",), named("o")),
        Instruction(Op.GATE_UP, layer, ("resid",), ("act",), named("norm_mlp", "gate", "up")),
        Instruction(Op.DOWN, layer, ("resid", "act"), ("resid",), named("down")),
    )
