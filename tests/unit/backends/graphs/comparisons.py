"""Each operation of Triton against its twin in torch, on whatever device Triton runs: a GPU, or its interpreter's CPU.

A comparison returns nothing and raises AssertionError. `COMPARISONS` lists them by name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from megakernel_runtime.backends.graphs.device.constants import Constants
from megakernel_runtime.backends.graphs.device.ops import TritonOps
from megakernel_runtime.backends.graphs.torch_ops import TorchOps
from megakernel_runtime.device_state.fields import Outcome
from tests.unit.backends.graphs.scenes import CONFIGS, DECODING, drawn, make_scene, plain_menu, sampling_menu

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
N_SMS = 3


def close(ours, theirs, dtype, what):
    """Largest difference over the largest value, within what rounding to `dtype` may do."""
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    assert ours.shape == theirs.shape, what
    assert ours.isfinite().all(), what
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def equal(ours, theirs, what):
    assert torch.equal(ours.cpu(), theirs.cpu()), what


def pair(config, device, dtype, **kw):
    """The same scene twice, for Triton and for its twin."""
    a, b = make_scene(config, device, dtype, **kw), make_scene(config, device, dtype, **kw)
    small = Constants(a.tables, list_room=64, vocab_block=64, block=64, short=32)  # so that loops take several rounds
    return a, TritonOps(a.tables, N_SMS, small), b, TorchOps(b.tables)


def begin(scene, ops):
    table = drawn(
        (scene.tables.config.vocab_size, scene.tables.config.hidden_size),
        5,
        scene.tables.cache.device,
        scene.tables.dtype,
    )
    return ops.embed(scene.shape, table)


def compare_write_words(device, dtype):
    a, ours, b, theirs = pair(CONFIGS["gqa2"], device, dtype)
    generator = torch.Generator().manual_seed(0)
    addresses = torch.randperm(len(a.tables.state.arena), generator=generator)[:777]
    words = torch.randint(-(2**31), 2**31 - 1, (777,), generator=generator)
    packet = torch.stack((addresses, words)).int().to(device)
    for scene, ops in ((a, ours), (b, theirs)):
        ops.write_words(packet)
        assert scene.tables.state.arena[addresses[3]].item() == words[3].item()
    equal(a.tables.state.arena, b.tables.state.arena, "arena")


def compare_embed(config, device, dtype):
    a, ours, b, theirs = pair(config, device, dtype, padded=True)
    for scene in (a, b):
        scene.tables.state.fields[1, 3] = 0  # finished: its row is skipped
    resid, expected = begin(a, ours), begin(b, theirs)
    equal(a.tables.positions, b.tables.positions, "positions")
    equal(a.tables.places, b.tables.places, "places")
    assert a.tables.positions[1] == -1
    assert (a.tables.positions[: a.frame.needs.rows] >= 0).sum() == a.frame.needs.rows - 1
    equal(resid, expected, "resid")


def compare_norms(config, device, dtype):
    a, ours, b, theirs = pair(config, device, dtype)
    h = config.hidden_size
    weight, delta = drawn((h,), 2, device, dtype), drawn((a.shape.rows, h), 3, device, dtype)
    mine, expected = begin(a, ours), begin(b, theirs)
    for d in (None, delta):
        close(ours.add_norm(mine, d, weight), theirs.add_norm(expected, d, weight), dtype, "norm")
        close(mine, expected, torch.float32, "resid")
    close(
        ours.norm_outs(a.shape, mine, delta, weight), theirs.norm_outs(b.shape, expected, delta, weight), dtype, "outs"
    )
    gate_up = drawn((a.shape.rows, 2 * config.ffn_size), 4, device, dtype, 3.0)
    close(ours.silu_mul(gate_up), theirs.silu_mul(gate_up), dtype, "silu_mul")


def compare_rope(config, device, dtype):
    a, ours, b, theirs = pair(config, device, dtype, padded=True)
    for scene in (a, b):
        scene.tables.state.fields[2, 3] = 0
    begin(a, ours), begin(b, theirs)
    width = config.q_size + 2 * config.kv_size
    qkv, expected = (drawn((a.shape.rows, width), 6, device, dtype) for _ in range(2))
    norms = [drawn((config.head_dim,), 7 + i, device, dtype) if config.qk_norm else None for i in range(2)]
    ours.rope(qkv, 1, *norms)
    theirs.rope(expected, 1, *norms)
    queries = slice(0, config.q_size)
    close(a.rows(qkv[:, queries]), b.rows(expected[:, queries]), dtype, "queries")
    close(a.tables.cache, b.tables.cache, dtype, "cache")
    equal(a.tables.cache[0], make_scene(config, device, dtype).tables.cache[0], "other layer")


def compare_attend(config, device, dtype, **kw):
    a, ours, b, theirs = pair(config, device, dtype, padded=True, page=16, **kw)
    for scene in (a, b):
        scene.tables.state.fields[1, 3] = 0
    begin(a, ours), begin(b, theirs)
    qkv = drawn((a.shape.rows, config.q_size + 2 * config.kv_size), 8, device, dtype)
    runs = a.tables.positions[: a.frame.needs.rows].cpu() >= 0
    for layer in (0, 1):  # the second finds the scratch memory as the first has left it
        out, expected = ours.attend(a.shape, qkv, layer), theirs.attend(b.shape, qkv, layer)
        close(a.rows(out)[runs], b.rows(expected)[runs], dtype, f"layer {layer}")


def compare_sample(vocab, device, full, scale=3.0, ties=False):
    config = replace(CONFIGS["gqa2"], vocab_size=vocab)
    decoding = tuple((n + 20, n + 19) for n, _ in (*DECODING, (5, 4), (6, 5), (9, 8), (10, 9)))
    kw = {"decoding": decoding, "chunks": (), "full": full, "padded": True}
    menu = sampling_menu if full else plain_menu
    a, ours, b, theirs = pair(config, device, torch.float32, sampling=menu, **kw)
    begin(a, ours), begin(b, theirs)
    for scene in (a, b):
        scene.tables.state.fields[4, 3] = 0
        scene.tables.positions[4] = -1
    for step in range(3):
        logits = drawn((16, vocab), 20 + step, device, scale=scale)
        logits = logits.round() if ties else logits
        ours.sample(a.shape, logits.clone())
        theirs.sample(b.shape, logits.clone())
        some = range(len(decoding))
        assert [Outcome(int(a.tables.result[o, 1])) for o in some] == [
            Outcome(int(b.tables.result[o, 1])) for o in some
        ]
        live = [o for o in some if b.tables.result[o, 1]]
        assert len(live) >= 4
        equal(a.tables.result[live, 0], b.tables.result[live, 0], f"tokens of step {step}")
        equal(a.tables.state.arena, b.tables.state.arena, f"state after step {step}")
        if full:
            compare_logprobs(a, b, [o for o in live if sampling_menu(o).top_logprobs is not None])


def compare_logprobs(a, b, live):
    ours, theirs = a.tables, b.tables
    close(ours.log_sums[live], theirs.log_sums[live], torch.float32, "log sums")
    for o in live:
        n = sampling_menu(o).top_logprobs
        equal(ours.top_ids[o, :n], theirs.top_ids[o, :n], f"top of output {o}")
        assert torch.allclose(ours.top_logprobs[o, :n], theirs.top_logprobs[o, :n], atol=1e-5)
        logprobs = [t.result[o, 2].view(torch.float32).item() for t in (ours, theirs)]
        assert abs(logprobs[0] - logprobs[1]) < 1e-5


def comparisons(device, dtype):
    """All comparisons by name."""
    named = {"write_words": partial(compare_write_words, device, dtype)}
    for name, config in CONFIGS.items():
        for comparison in (compare_embed, compare_norms, compare_rope, compare_attend):
            named[f"{comparison.__name__[8:]}-{name}"] = partial(comparison, config, device, dtype)
    named["attend-decode"] = partial(compare_attend, CONFIGS["gqa2"], device, dtype, chunks=())
    named["attend-chunks"] = partial(compare_attend, CONFIGS["gqa2"], device, dtype, decoding=((9, 0), (80, 16)))
    for vocab in (300, 97):
        for full in (False, True):
            named[f"sample-{vocab}-{'full' if full else 'plain'}"] = partial(compare_sample, vocab, device, full)
    named["sample-flat"] = partial(compare_sample, 150, device, False, scale=1e-3)
    named["sample-ties"] = partial(compare_sample, 200, device, True, ties=True)
    named["sample-peaked"] = partial(compare_sample, 150, device, True, scale=300.0)
    return named
