from megakernel_runtime.backends.graphs.ledger import Ledger


def sums(ledger):
    return ledger.compute_ns, ledger.wait_host_ns, ledger.parked_ns


def test_time_is_rest_then_waiting_and_steps_then_rest():
    ledger = Ledger(1000)
    ledger.work(1100)
    ledger.step(1130, 1200)
    ledger.step(1200, 1250)
    ledger.step(1255, 1300)
    ledger.rest()
    ledger.settle(1400)
    assert sums(ledger) == (70 + 50 + 45, 30 + 5, 100 + 100)


def test_while_a_step_runs_nothing_is_settled():
    ledger = Ledger(0)
    ledger.work(10)
    ledger.settle(500)
    assert sums(ledger) == (0, 0, 10)


def test_clocks_that_disagree_never_make_time_run_backwards():
    ledger = Ledger(0)
    ledger.work(100)
    ledger.step(90, 150)  # began before it was asked for
    ledger.step(140, 145)  # ended before the last one
    assert sums(ledger) == (50, 0, 100)
    ledger.rest()
    ledger.settle(120)
    assert sums(ledger) == (50, 0, 100)
