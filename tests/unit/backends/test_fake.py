"""The fake runtime: tokens as scripted, parameters that act, failures when asked for."""

import json
import math
import time

import pytest

from megakernel_runtime.backends.fake_script import choose, read_script
from megakernel_runtime.factory import load_runtime
from megakernel_runtime.interface import (
    CapacityError,
    ModelError,
    PrefillRow,
    RuntimeFault,
    RuntimeSpec,
    SamplingParams,
    SlotAdmit,
    StepPlan,
)


def generate(script, prompt=(1, 2, 3), count=6, **sampling):
    """The tokens that follow `prompt` one by one."""
    read, tokens = read_script(json.dumps(script)), list(prompt)
    parameters = SamplingParams(max_tokens=count, **sampling)
    for _ in range(count):
        tokens.append(choose(read, tokens, len(prompt), parameters).token)
    return tokens[len(prompt) :]


class TestTokens:
    def test_echo_repeats_the_prompt_for_ever_or_ends(self):
        assert generate({"emit": "echo"}) == [1, 2, 3, 1, 2, 3]
        assert generate({"emit": "echo", "end_id": 9}) == [1, 2, 3, 9, 9, 9]

    def test_cycle_and_text(self):
        assert generate({"emit": "cycle", "ids": [5, 6]}) == [5, 6, 5, 6, 5, 6]
        assert generate({"emit": "text", "ids": [5, 6], "end_id": 0}, count=4) == [5, 6, 0, 0]

    def test_random_depends_on_the_seed_alone(self):
        script = {"emit": "random", "vocab_size": 1000}
        first = generate(script, count=50, seed=1)
        assert first == generate(script, count=50, seed=1)
        assert first != generate(script, count=50, seed=2)
        assert len(set(first)) > 40
        assert max(first) < 1000

    def test_bias_masks_and_penalties_act(self):
        cycle = {"emit": "cycle", "ids": [5], "vocab_size": 100}
        assert generate(cycle, count=1, logit_bias=((70, 100.0),)) == [70]
        assert generate(cycle, count=1, logit_bias=((5, -100.0),)) == [6]
        assert generate(cycle, count=2, allowed_token_ids=(40, 41)) == [40, 40]
        assert generate(cycle, count=3, presence_penalty=1.0) == [5, 6, 5]
        assert generate(cycle, count=4, frequency_penalty=0.5) == [5, 5, 6, 5]
        assert generate(cycle, prompt=(6,), count=1, logit_bias=((5, -1.0), (6, 1.0)), repetition_penalty=9.0) == [5]

    def test_stop_ids_are_masked_until_enough_was_said(self):
        assert generate({"emit": "cycle", "ids": [5]}, count=3, stop_token_ids=(5,), min_tokens=2) == [6, 6, 5]

    def test_logprobs_are_a_distribution(self):
        script = read_script(json.dumps({"emit": "cycle", "ids": [5], "vocab_size": 100}))
        choice = choose(script, (1,), 1, SamplingParams(top_logprobs=20))
        assert [token for token, _ in choice.top] == list(range(5, 25))
        assert choice.logprob == choice.top[0][1] == pytest.approx(math.log(0.5), abs=1e-6)
        assert choose(script, (1,), 1, SamplingParams(top_logprobs=0)).top == ()
        assert choose(script, (1,), 1, SamplingParams()).logprob is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "no valid JSON"),
        ('{"emit": "poem"}', "emit is 'poem'; known are random, echo, cycle, text"),
        ('{"emit": "text"}', "needs ids"),
        ('{"speed": 1}', "unknown keys speed"),
        ('{"emit": "text", "ids": ["a"]}', "no valid JSON"),
        ('{"emit": "cycle", "ids": [10], "vocab_size": 10}', "outside the vocabulary of 10"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused(text, words):
    with pytest.raises(ModelError, match=words):
        read_script(text)


def load(script, told=None, **spec):
    def progress(phase, done, total):
        if told is not None:
            told.append((phase, done, total))

    return load_runtime(RuntimeSpec("fake", "", fake_script=json.dumps(script), **spec), progress)


def start(runtime, max_tokens=9):
    sampling = SamplingParams(max_tokens=max_tokens)
    runtime.submit(StepPlan(1, admits=(SlotAdmit(0, (1, 2), 2, sampling, 0, (0,)),), prefill=(PrefillRow(0, 0, 2),)))


class TestRuntime:
    def test_sizes_are_those_of_the_spec_or_ample(self):
        given = load({"vocab_size": 9}, max_slots=2, n_pages=3, page_size_tokens=4, max_model_len_tokens=5,
                     max_step_tokens=6).capacity  # fmt: skip
        assert (given.max_slots, given.n_pages, given.page_size_tokens) == (2, 3, 4)
        assert (given.max_model_len_tokens, given.max_step_tokens, given.vocab_size) == (5, 6, 9)
        ample = load({}).capacity
        assert ample.n_pages * ample.page_size_tokens >= ample.max_slots * ample.max_model_len_tokens

    def test_loading_takes_its_time_and_says_so(self):
        told, before = [], time.monotonic()
        load({"load_seconds": 0.1}, told)
        assert time.monotonic() - before >= 0.1
        assert told == [("weights", 0, 2), ("weights", 1, 2), ("weights", 1, 1)]

    @pytest.mark.parametrize(("key", "error"), [("model_error", ModelError), ("capacity_error", CapacityError)])
    def test_loading_fails_as_scripted(self, key, error):
        with pytest.raises(error, match="no such luck"):
            load({key: "no such luck"})

    def test_a_step_takes_its_time(self):
        runtime = load({"step_seconds": 0.02, "row_seconds": 0.01})
        start(runtime)
        (result,) = runtime.poll(1.0)
        assert (result.ended_ns - result.started_ns) / 1e9 >= 0.04
        assert 0.04 <= runtime.telemetry().compute_ns / 1e9 < 5

    def test_a_fault(self):
        runtime = load({"fault_at_step": 1})
        start(runtime)
        with pytest.raises(RuntimeFault, match="scripted fault in step 1"):
            runtime.poll(0.1)

    def test_a_stalled_device_gives_nothing_however_long_one_waits(self):
        runtime = load({"stall_at_step": 1})
        start(runtime)
        before = time.monotonic()
        assert list(runtime.poll(0.02)) == list(runtime.poll(0.02)) == []
        assert time.monotonic() - before >= 0.02
        runtime.close()
