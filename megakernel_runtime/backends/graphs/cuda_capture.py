"""CUDA graphs of steps: capture with one pool of memory, replay, and how many kernels a graph holds.

Needs a GPU. Must not know: what a step does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from megakernel_runtime.backends.graphs.shapes import Shape
from megakernel_runtime.interface import Progress

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class CudaGraph:
    """One captured step."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self.n_kernels = _count_kernels(graph.raw_cuda_graph())

    def replay(self) -> None:
        """Run it again, on the current stream."""
        self._graph.replay()


def capture(
    run_step: Callable[[Shape], None], shapes: Sequence[Shape], stream: torch.cuda.Stream, progress: Progress
) -> dict[Shape, CudaGraph]:
    """Return a graph for each shape. The current frame must be one in which nothing runs.

    All graphs share one pool, the largest first: they are never replayed side by side. Each shape runs once before it
    is captured, so that kernels are compiled and libraries have chosen their algorithms and workspaces.
    """
    graphs: dict[Shape, CudaGraph] = {}
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        for done, shape in enumerate(sorted(shapes, reverse=True), 1):
            run_step(shape)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run_step(shape)
            finally:
                graph.capture_end()
            graph.instantiate()
            graphs[shape] = CudaGraph(graph)
            progress("capture", done, len(shapes))
    return graphs


def warm_up(run_step: Callable[[Shape], None], shapes: Sequence[Shape], stream: torch.cuda.Stream) -> None:
    """Run a step of each shape, in which nothing runs: compiles kernels and takes the memory that they need at most."""
    with torch.cuda.stream(stream):
        for shape in shapes:
            run_step(shape)
    stream.synchronize()


def _count_kernels(graph: int) -> int:
    """Return how many nodes of a cudaGraph_t are kernels."""
    driver = ctypes.CDLL("libcuda.so.1")
    n_nodes = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(n_nodes)))
    nodes = (ctypes.c_void_p * n_nodes.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(n_nodes)))
    kind = ctypes.c_int()
    n_kernels = 0
    for node in nodes:
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        n_kernels += kind.value == _KERNEL_NODE
    return n_kernels


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answered {status} when asked about a graph")
