"""A plain fp32 forward pass over whole sequences, written apart from the product's code: what kernels are held to."""

from __future__ import annotations

import torch
from torch.nn import functional

from megakernel_runtime.program.reference.rope import inverse_frequencies


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, cos, sin):
    """x: (heads, n, D); cos, sin: (n, D / 2)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def logits_of(config, weights, ids, device):
    """Return (len(ids), V) fp32 logits. Weights are rounded to bf16 first, as the kernels have them."""
    c = config

    def w(name):
        return weights[name].to(device=device, dtype=torch.bfloat16).float()

    n = len(ids)
    tokens = torch.tensor(ids, device=device)
    angles = torch.outer(torch.arange(n, dtype=torch.float64), inverse_frequencies(c).double()).to(device)
    cos, sin = angles.cos().float(), angles.sin().float()
    at = torch.arange(n, device=device)
    seen = at[None, :] <= at[:, None]
    if c.sliding_window:
        seen &= at[None, :] > at[:, None] - c.sliding_window
    x = w("embed")[tokens]
    for layer in range(c.n_layers):
        p = f"layers.{layer}."
        h = rms(x, w(p + "norm_attn"), c.norm_eps)
        q, k, v = (h @ w(p + name).T for name in "qkv")
        if c.qkv_bias:
            q, k, v = q + w(p + "q_bias"), k + w(p + "k_bias"), v + w(p + "v_bias")
        q, k, v = (t.view(n, -1, c.head_dim).transpose(0, 1) for t in (q, k, v))
        if c.qk_norm:
            q, k = rms(q, w(p + "q_norm"), c.norm_eps), rms(k, w(p + "k_norm"), c.norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(c.group_size, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) / c.head_dim**0.5
        attn = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        x = x + attn.transpose(0, 1).reshape(n, -1) @ w(p + "o").T
        h = rms(x, w(p + "norm_mlp"), c.norm_eps)
        x = x + (functional.silu(h @ w(p + "gate").T) * (h @ w(p + "up").T)) @ w(p + "down").T
    head = "embed" if c.tied_embeddings else "lm_head"
    return rms(x, w("norm_final"), c.norm_eps) @ w(head).T


def greedy_gaps(config, weights, prompt, generated, device):
    """Return for each generated token how far its logit is below the largest, (len(generated),), and the logits' std."""
    with torch.inference_mode():
        logits = logits_of(config, weights, [*prompt, *generated[:-1]], device)[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(generated, device=logits.device)[:, None]).squeeze(1)
        return logits.amax(-1) - chosen, logits.std().item()
