"""What the scheduler counted: cumulative counters, and samples that wait to be taken. Must not know: metric names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counters since the start, and samples since they were last taken, in seconds."""

    prompt_tokens: int = 0  # of admitted sequences, cached ones included
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    queue_times: list[float] = field(default_factory=list[float])  # submitted to first scheduled, a request
    prefill_times: list[float] = field(default_factory=list[float])  # first scheduled to first token, a sequence
    decode_times: list[float] = field(default_factory=list[float])  # first token to last, a sequence

    def take_samples(self) -> tuple[list[float], list[float], list[float]]:
        """Return (queue, prefill, decode) times since the last call."""
        taken = self.queue_times, self.prefill_times, self.decode_times
        self.queue_times, self.prefill_times, self.decode_times = [], [], []
        return taken


@dataclass(frozen=True, slots=True)
class Gauges:
    """How things stand."""

    n_running: int  # sequences that hold a slot
    n_waiting: int  # sequences in the queue
    kv_usage: float  # share of pages held by live sequences
