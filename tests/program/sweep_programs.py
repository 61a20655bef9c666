"""Programs of every supported model on many grids: `python -m tests.program.sweep_programs smollm2-135m ...`."""

from __future__ import annotations

from megakernel_runtime.program.placement import place
from megakernel_runtime.program.validate import validate
from tests.program.images import image_of, model
from tests.program.untraced import main

GRIDS = (1, 7, 78, 108, 114, 131, 132, 148, 160, 188)
BUCKETS = (8, 16)
MODELS = {
    "smollm2-135m": model("llama", 576, 30, 9, 3, 64, 1536, 49152, tied_embeddings=True),
    "smollm2-360m": model("llama", 960, 32, 15, 5, 64, 2560, 49152, tied_embeddings=True),
    "llama-3.2-1b": model("llama", 2048, 16, 32, 8, 64, 8192, 128256, tied_embeddings=True),
    "qwen2.5-0.5b": model("qwen2", 896, 24, 14, 2, 64, 4864, 151936, qkv_bias=True),
    "qwen3-0.6b": model("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, qk_norm=True),
    "qwen3-8b": model("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, qk_norm=True),
    "mistral-7b": model("mistral", 4096, 32, 32, 8, 128, 14336, 32768, sliding_window=4096),
    "narrow": model("llama", 64, 2, 1, 1, 64, 40, 6001),  # fewer row tiles than CTAs, a padded FFN, an odd vocabulary
}


def sweep(name: str) -> None:
    """Validate a model's programs on all grids, for both buckets."""
    for grid in GRIDS:
        placement = place(MODELS[name], grid)
        for rows in BUCKETS:
            validate(image_of(MODELS[name], grid, rows, placement=placement))


if __name__ == "__main__":
    main(sweep)
