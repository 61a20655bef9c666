"""The GPU's clock on the host's scale."""

from hypothesis import given
from hypothesis import strategies as st

from megakernel_runtime.backends.megakernel.clock import DeviceClock

S = 1_000_000_000


@given(st.lists(st.tuples(st.integers(1, 3 * S), st.integers(0, S)), min_size=1, max_size=30), st.integers(-S, S))
def test_what_was_observed_is_never_in_the_future(events, offset):
    clock, host_ns = DeviceClock(), 100 * S
    for after_ns, delay_ns in events:
        host_ns += after_ns
        device_ns = host_ns - delay_ns - offset
        clock.observe(device_ns, host_ns)
        assert clock.on_host(device_ns) <= host_ns


def test_what_is_seen_least_late_counts():
    clock = DeviceClock()
    for i, delay_ns in enumerate((500, 20, 900)):
        clock.observe(1_000 * i, 7 * S + 1_000 * i + delay_ns)
    assert clock.on_host(5_000) == 7 * S + 5_000 + 20


def test_drift_is_followed_within_two_windows():
    clock = DeviceClock()
    host_ns = 100 * S
    for i in range(100):  # a second each; the device's clock loses a microsecond in it
        clock.observe(host_ns + i * S - 1_000 * i, host_ns + i * S)
    late_ns = host_ns + 99 * S - clock.on_host(host_ns + 99 * S - 99_000)
    assert 0 < late_ns <= 22_000


def test_one_window_is_kept_when_the_next_begins():
    clock = DeviceClock()
    clock.observe(100 * S, 100 * S + 5)
    clock.observe(111 * S, 111 * S + 900)
    assert clock.on_host(111 * S) == 111 * S + 5
    clock.observe(122 * S, 122 * S + 800)
    assert clock.on_host(122 * S) == 122 * S + 800
