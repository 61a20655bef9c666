"""Times of steps on the host's scale, with events of a pretended device."""

from dataclasses import dataclass

import pytest

from megakernel_runtime.backends.graphs import cuda_readback
from megakernel_runtime.backends.graphs.cuda_readback import _Clock

MS = 1_000_000


@dataclass
class World:
    """The device's clock runs `drift` times as fast as the host's, from another zero."""

    now_ns: int = 5_000 * MS
    drift: float = 1.0

    def monotonic_ns(self):
        return self.now_ns

    @property
    def device_ms(self):
        return 77.0 + self.now_ns * self.drift / MS


@pytest.fixture
def world(monkeypatch):
    world = World()

    class Event:
        def record(self, stream):
            self.at_ms = world.device_ms

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    monkeypatch.setattr(cuda_readback, "_event", Event)
    monkeypatch.setattr(cuda_readback, "time", world)
    return world


class Entry:
    def __init__(self):
        self.started, self.ended = cuda_readback._event(), cuda_readback._event()


def run(world, clock, entry, *, seen_after_ns, waited=True):
    """A step of 3 ms that begins now; when it is seen to be over, and what the clock says of it."""
    began = world.now_ns
    entry.started.record(None)
    world.now_ns += 3 * MS
    entry.ended.record(None)
    world.now_ns += seen_after_ns
    return began, clock.span(entry, waited=waited)


def test_spans_are_told_on_the_hosts_scale(world):
    clock, entry = _Clock(None), Entry()
    world.now_ns += 40 * MS
    began, span = run(world, clock, entry, seen_after_ns=MS)
    assert span == (began, began + 3 * MS)


@pytest.mark.parametrize("drift", [1 + 1e-5, 1 - 1e-5])
def test_clocks_that_drift_apart_are_brought_together_again(world, drift):
    """After an hour of steps that were waited for, times are right to half a millisecond, and never in the future."""
    world.drift = drift
    clock, entry = _Clock(None), Entry()
    for _ in range(3600):
        world.now_ns += 1000 * MS
        began, (started_ns, ended_ns) = run(world, clock, entry, seen_after_ns=20_000)
        assert abs(started_ns - began) < MS / 2
        assert started_ns < ended_ns <= world.now_ns


def test_an_event_is_not_recorded_again_while_times_count_from_it(world):
    clock, entry = _Clock(None), Entry()
    first = entry.ended
    world.now_ns += 11_000 * MS
    run(world, clock, entry, seen_after_ns=0)
    assert entry.ended is not first
