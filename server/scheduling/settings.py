"""What an operator may choose about scheduling. Must not know: where a value came from, capacities of a runtime."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of the queue and of a step. Values are checked here, once: raises ValueError naming value and bound."""

    max_queue_requests: int = 256  # waiting beyond those that free slots will take; more are rejected
    max_queue_tokens: int = 1_000_000  # prompt tokens waiting; a single request always fits into an empty queue
    step_token_budget: int = 0  # tokens computed in one step at most; 0 = the runtime's own bound
    prefix_cache: bool = True  # keep pages of past prompts and outputs for prompts that begin alike

    def __post_init__(self) -> None:
        """Refuse bounds under which nothing could ever run."""
        for name, least in (("max_queue_requests", 0), ("max_queue_tokens", 1), ("step_token_budget", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
