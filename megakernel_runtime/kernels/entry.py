"""The resident kernel: one CTA an SM, a producer warp that streams weights, eight consumer warps that run instructions.

Must not know: plans, instructions.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import fence_async_shared, gl, gluon, mbarrier, reinterpret
from megakernel_runtime.kernels.memory import Memory, Shared
from megakernel_runtime.kernels.ring import await_phase_or_leave, fetch_tile, locate, stream_policy
from megakernel_runtime.kernels.step import consumer
from megakernel_runtime.kernels.sync import cta

LINE = gl.constexpr(32)
TILE = gl.constexpr(8 * 16 * 64)  # elements
RING = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def producer(mem, smem, tape, C: gl.constexpr):
    """Stream this CTA's tiles over and over, as far ahead as the ring has room, without waiting for activations.

    When the consumers leave, wait for what is on its way: nothing may write to shared memory that is no longer ours.
    """
    S: gl.constexpr = C.stages
    c = cta(C)
    leave = mem.leave + c * LINE
    start = gl.load(mem.meta + 4 * c)
    n = gl.load(mem.meta + 4 * c + 1)
    policy = stream_policy()
    g = 0
    i = 0
    left = (n == 0).to(gl.int32)  # a CTA may have no tiles at all
    while left == 0:
        slot = g % S
        left = await_phase_or_leave(smem.empty_at + slot * 8, ((g // S) & 1) ^ 1, leave)
        if left == 0:
            source = tape + (start + i).to(gl.int64) * TILE
            fetch_tile(smem.ring_at + slot * (TILE * 2), source, smem.full_at + slot * 8, policy, TILE * 2)
            g += 1
            i = gl.where(i + 1 == n, 0, i + 1)
    for back in range(S):
        if g > back:
            tile = g - 1 - back
            mbarrier.wait(smem.full.index(tile % S), (tile // S) & 1)


@gluon.jit(do_not_specialize=["done", "park_ns", "nonce"])
def megakernel(
    tape,
    meta,
    code,
    acts,
    partials,
    resid,
    table,
    bias,
    qk_norms,
    cos,
    sin,
    kv,
    state,
    plans,
    packets,
    head,
    steps,
    results,
    relay,
    cmd,
    local,
    leave,
    accounts,
    logits,
    best,
    counters,
    abort,
    prof,
    done,
    park_ns,
    nonce,
    C: gl.constexpr,
):
    """Entry. Grid: `C.grid` CTAs, all co-resident; 8 warps and one producer warp each.

    done: plans of the host that earlier launches have run. park_ns: how long to stay without one. nonce: new each
    launch.
    """
    S: gl.constexpr = C.stages
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    mem = Memory(
        meta,
        code,
        acts,
        partials,
        resid,
        table,
        bias,
        qk_norms,
        cos,
        sin,
        kv,
        state,
        plans,
        packets,
        head,
        steps,
        results,
        relay,
        cmd,
        local,
        leave,
        accounts,
        logits,
        best,
        counters,
        abort,
        prof,
    )
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    RING_WORDS: gl.constexpr = S * (TILE // 4)
    ring = gl.allocate_shared_memory(gl.bfloat16, [S, 8, 16, 64], RING)
    smem = Shared(
        ring,
        full,
        empty,
        locate(reinterpret(ring, gl.int64, [RING_WORDS, 1], PLAIN), nonce + 2),
        locate(full, nonce),
        locate(empty, nonce + 1),
        gl.allocate_shared_memory(gl.float32, [2, 8, 16 * T], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])),
        gl.allocate_shared_memory(gl.float32, [2, 8, T], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [8, C.warp_tokens, D], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])),
        gl.allocate_shared_memory(gl.float32, [2, 8, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [16, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [16, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [16, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [16, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    for i in gl.static_range(S):
        mbarrier.init(smem.full.index(i), count=1)
        mbarrier.init(smem.empty.index(i), count=8)
    fence_async_shared()  # marks and barriers were written as by threads, tiles come by the asynchronous copy engine
    gl.warp_specialize([(consumer, (mem, smem, done, park_ns, C)), (producer, (mem, smem, tape, C))], [1], [24])
