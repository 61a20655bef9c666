# syntax=docker/dockerfile:1
# Two images from one file:
#   docker build --target cpu -t megakernel:cpu .      about 1 GB, runs anywhere
#   docker build --target gpu -t megakernel:gpu .      with CUDA libraries; run with --gpus all
# Both run as a user without rights and write to the volume /cache and /tmp only, so the rest may be read-only.

ARG PYTHON=3.12
ARG TORCH="torch>=2.11,<2.14"

# ---- the server as a wheel, so that neither sources nor build tools reach the image
FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY server server
COPY megakernel_runtime megakernel_runtime
COPY configs configs
RUN pip wheel --no-deps --wheel-dir /wheels .

# ---- environments: torch first, since it is the largest layer and changes least
FROM python:${PYTHON}-slim AS env-cpu
ARG TORCH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" "${TORCH}"
COPY --from=wheel /wheels /wheels
RUN /venv/bin/pip install --no-cache-dir /wheels/*.whl

FROM python:${PYTHON}-slim AS env-gpu
ARG TORCH
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir "${TORCH}"
COPY --from=wheel /wheels /wheels
RUN /venv/bin/pip install --no-cache-dir /wheels/*.whl

# ---- what both images are made of
FROM python:${PYTHON}-slim AS base
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin megakernel \
    && install --directory --owner megakernel --group megakernel /cache
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MEGAKERNEL_HOST=0.0.0.0 \
    MEGAKERNEL_CACHE_DIR=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ.get('MEGAKERNEL_PORT', 8000)}/health\", timeout=2)"]
ENTRYPOINT ["megakernel"]
CMD ["serve"]

FROM base AS cpu
COPY --from=env-cpu /venv /venv
USER megakernel

FROM base AS gpu
# Triton compiles a small launcher for each kernel with the C compiler at hand.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=env-gpu /venv /venv
USER megakernel
