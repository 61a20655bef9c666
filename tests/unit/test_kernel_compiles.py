"""The megakernel compiles for Hopper on a machine without a GPU: registers, shared memory and spills are checked here."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

SHARED_LIMIT_BYTES = 232_448  # of one CTA on sm_90: 227 KiB
WIDTHS = {  # hidden, q, kv, head_dim, group, ffn, vocab, layers, ring stages
    "llama-1b": (2048, 2048, 512, 64, 4, 8192, 128256, 16, 10),
    "smollm2": (576, 576, 192, 64, 3, 1536, 49152, 30, 10),
    "qwen3-0.6b": (1024, 2048, 1024, 128, 2, 3072, 151936, 28, 7),
    "qwen2-0.5b": (896, 896, 128, 64, 7, 4864, 151936, 24, 10),
}


# Bytes of a thread's stack: uniform values (loop counters, offsets) that do not fit the 240 registers of a consumer
# thread, written and read a few times an instruction. The kernel that decodes, and the one that takes chunks as well.
STACK_BYTES = {
    "llama-1b": (96, 320),
    "smollm2": (64, 320),
    "qwen3-0.6b": (420, 600),
    "qwen2-0.5b": (96, 320),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fresh", [False, True], ids=["decode", "chunks"])
@pytest.mark.parametrize("name", WIDTHS)
def test_registers_and_memory(name, fresh, tmp_path):
    from megakernel_runtime.kernels.shape import KernelShape
    from megakernel_runtime.resident.compile import compile_for

    hidden, q, kv, head_dim, group, ffn, vocab, layers, stages = WIDTHS[name]
    shape = KernelShape(
        hidden=hidden, q=q, kv=kv, head_dim=head_dim, group=group, ffn=ffn, vocab=vocab, layers=layers, stages=stages,
        rows=8, grid=132, qk_norm="qwen3" in name, qkv_bias="qwen2" in name, window=0, eps=1e-5, max_len=4096, n_pages=1024,
        fresh=fresh,
    )  # fmt: skip
    kernel = compile_for(shape, 90)
    assert kernel.metadata.shared <= SHARED_LIMIT_BYTES
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= STACK_BYTES[name][fresh], usage
    assert int(re.search(r"LOCAL:(\d+)", usage)[1]) == 0, usage
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= 168, usage
