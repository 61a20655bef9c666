"""Each sampling parameter against a naive statement of it, the draw against the exact distribution."""

import math

import pytest
import torch

from megakernel_runtime.interface import SamplingParams
from megakernel_runtime.program.reference.distribution import draw, keep_min_p, keep_top_k, keep_top_p
from megakernel_runtime.program.reference.sampling import Sampler
from megakernel_runtime.program.slots import Slot

LOGITS = [1.0, 3.0, 2.0, -1.0, 2.5, 0.0]


def slot(sampling, prompt=(0,), output=()):
    return Slot(0, [*prompt, *output], len(prompt), sampling, 0)


def one(sampling, logits=LOGITS, **kw):
    (choice,) = Sampler().sample(torch.tensor([logits]), [slot(sampling, **kw)])
    return choice


def support(n_draws=400, **params):
    """Which tokens are ever drawn."""
    sampler = Sampler()
    slots = [slot(SamplingParams(seed=s, **params)) for s in range(n_draws)]
    return {c.token for c in sampler.sample(torch.tensor([LOGITS]).repeat(n_draws, 1), slots)}


def chi_square(logits, draws_of, probabilities):
    n = len(draws_of)
    observed = torch.bincount(torch.tensor(draws_of), minlength=len(logits)).double()
    expected = torch.tensor(probabilities).double() * n
    assert bool((observed[expected == 0] == 0).all())
    used = expected > 0
    return (((observed - expected) ** 2 / expected)[used].sum().item(), int(used.sum()) - 1)


# upper 0.1 % points of the chi-square distribution
CRITICAL = {3: 16.27, 5: 20.52, 4: 18.47, 31: 61.10}


def test_greedy_takes_the_largest_and_the_smaller_id_of_equal_ones():
    assert one(SamplingParams(temperature=0)).token == 1
    assert one(SamplingParams(temperature=0), logits=[0.0, 2.0, 2.0]).token == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_tempered_distribution(temperature):
    slots = [slot(SamplingParams(temperature=temperature, seed=s)) for s in range(20_000)]
    tokens = [c.token for c in Sampler().sample(torch.tensor([LOGITS]).repeat(len(slots), 1), slots)]
    exact = (torch.tensor(LOGITS, dtype=torch.float64) / temperature).softmax(-1)
    statistic, degrees = chi_square(LOGITS, tokens, exact.tolist())
    assert statistic < CRITICAL[degrees]


def test_draws_of_one_stream_follow_the_distribution_too():
    logits = torch.linspace(-1, 1, 32)
    slots = [slot(SamplingParams(seed=11), output=[0] * n) for n in range(10_000)]
    tokens = [c.token for c in Sampler().sample(logits.repeat(len(slots), 1), slots)]
    statistic, degrees = chi_square(logits, tokens, logits.double().softmax(-1).tolist())
    assert statistic < CRITICAL[degrees]


def test_draws_with_all_cuts_follow_the_renormalised_rest():
    # top-k drops token 3, top-p drops token 5, and min-p, which would drop both, keeps the rest
    params = {"top_k": 5, "top_p": 0.95, "min_p": 0.1}
    slots = [slot(SamplingParams(seed=s, **params)) for s in range(20_000)]
    tokens = [c.token for c in Sampler().sample(torch.tensor([LOGITS]).repeat(len(slots), 1), slots)]
    weights = [math.exp(v) for v in LOGITS]
    kept = [0, 1, 2, 4]
    total = sum(weights[i] for i in kept)
    exact = [weights[i] / total if i in kept else 0.0 for i in range(6)]
    statistic, degrees = chi_square(LOGITS, tokens, exact)
    assert statistic < CRITICAL[degrees]


def test_top_k_keeps_the_k_likeliest():
    assert support(top_k=2) == {1, 4}
    assert support(top_k=1) == {1}
    assert support(top_k=100) == support() != support(top_k=5)


def test_top_p_keeps_the_smallest_sufficient_set():
    p = torch.tensor(LOGITS).softmax(-1)
    assert support(top_p=float(p[1]) - 0.01) == {1}
    assert support(top_p=float(p[1]) + 0.01) == {1, 4}
    assert support(top_p=0.0) == {1}


def test_top_p_counts_after_top_k():
    # of all, token 1 holds 0.42; of the top 2, it holds 0.62
    assert support(top_k=2, top_p=0.6) == {1}
    assert support(top_p=0.6) == {1, 4}


def test_min_p_is_relative_to_the_likeliest():
    assert support(min_p=math.exp(-0.6)) == {1, 4}
    assert support(min_p=math.exp(-1.1)) == {1, 2, 4}


def test_cuts_take_smaller_ids_of_equal_weights():
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0])
    assert keep_top_k(weights, 3).tolist() == [True, True, False, False, True]
    assert keep_top_p(weights, 0.7).tolist() == [True, True, False, False, True]
    assert keep_min_p(weights, 0.5).all()


def rows_of_all_shapes(n):
    """Flat, ordinary, peaked, very peaked, with ties, with zeros."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, n, generator=generator) * torch.tensor([[0.01], [1.0], [4.0], [20.0], [2.0], [1.0]])
    logits[4].round_()
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights[5, 1::2] = 0.0
    return weights


@pytest.mark.parametrize("n_vocab", [12_345, 64, 63])
@pytest.mark.parametrize("top_p", [0.0, 0.05, 0.5, 0.9, 0.999])
def test_top_p_equals_a_full_sort(top_p, n_vocab):
    for row in rows_of_all_shapes(n_vocab):
        order = row.argsort(descending=True, stable=True)
        n = int((row[order].cumsum(0, dtype=torch.float64) < top_p * row.sum(dtype=torch.float64)).sum()) + 1
        assert keep_top_p(row, top_p).nonzero().squeeze(-1).tolist() == sorted(order[:n].tolist())


@pytest.mark.parametrize("n_vocab", [12_345, 64, 63])
@pytest.mark.parametrize("k", [1, 2, 40, 63, 192, 193, 5000, 12_345])
def test_top_k_equals_a_full_sort(k, n_vocab):
    k = min(k, n_vocab)
    for row in rows_of_all_shapes(n_vocab):
        order = row.argsort(descending=True, stable=True)
        assert keep_top_k(row, k).nonzero().squeeze(-1).tolist() == sorted(order[:k].tolist())


def test_draw_is_the_inverse_distribution_function_over_rising_ids():
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0]]).repeat(5, 1)
    assert draw(weights, [0.0, 0.2499, 0.25, 0.7499, 0.75]) == [1, 1, 3, 3, 4]
    assert draw(weights[:1], [1 - 2.0**-32]) == [4]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_logits_that_are_none_give_a_token_and_spare_the_neighbours(odd):
    logits = torch.tensor([[odd, 1.0, 2.0, 0.0], [0.0, 9.0, 1.0, 2.0]])
    for params in (
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=0),
    ):
        first, second = Sampler().sample(logits.clone(), [slot(params), slot(SamplingParams(temperature=0))])
        assert 0 <= first.token < 4
        assert second.token == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-320])
def test_tiny_temperatures_are_greedy_not_undefined(temperature):
    assert one(SamplingParams(temperature=temperature, seed=5)).token == 1


def test_penalties():
    flat = [1.0, -1.0, 1.0, 1.0]

    def logprobs(**kw):
        choice = one(SamplingParams(temperature=0, top_logprobs=4, **kw), flat, prompt=[0], output=[1, 2, 2])
        return dict(choice.top)

    def expected(adjusted):
        return dict(enumerate(torch.tensor(adjusted).log_softmax(-1).tolist()))

    assert logprobs() == pytest.approx(expected(flat))
    assert logprobs(repetition_penalty=2.0) == pytest.approx(expected([0.5, -2.0, 0.5, 1.0]))
    assert logprobs(presence_penalty=0.5) == pytest.approx(expected([1.0, -1.5, 0.5, 1.0]))
    assert logprobs(frequency_penalty=0.5) == pytest.approx(expected([1.0, -1.5, 0.0, 1.0]))
    assert logprobs(frequency_penalty=-0.5) == pytest.approx(expected([1.0, -0.5, 2.0, 1.0]))
    everything = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    assert logprobs(**everything) == pytest.approx(expected([0.5, -2.75, -0.75, 1.0]))
    biased = logprobs(logit_bias=((0, 2.0), (3, -1.0)), **everything)
    assert biased == pytest.approx(expected([2.5, -2.75, -0.75, 0.0]))


def test_counts_follow_a_slot_that_grows():
    sampler = Sampler()
    s = slot(SamplingParams(temperature=0, frequency_penalty=0.4, top_logprobs=0), prompt=[1])
    taken = []
    for _ in range(4):
        (choice,) = sampler.sample(torch.tensor([LOGITS]), [s])
        taken.append(choice.token)
        s.tokens.append(choice.token)
    # 3.0 -> 2.6 -> 2.2 of token 1 cross 2.5 of token 4, which falls to 2.1
    assert taken == [1, 1, 4, 1]


def test_counts_of_a_slot_that_did_not_grow():
    sampler = Sampler()
    s = slot(SamplingParams(temperature=0, presence_penalty=1.0), prompt=[0], output=[1])
    assert [sampler.sample(torch.tensor([LOGITS]), [s])[0].token for _ in range(3)] == [4, 4, 4]


def test_allowed_tokens_only():
    assert support(allowed_token_ids=(3, 5)) == {3, 5}
    assert one(SamplingParams(temperature=0, allowed_token_ids=(3, 5, 5))).token == 5


def test_stop_tokens_are_masked_until_min_tokens():
    p = SamplingParams(temperature=0, stop_token_ids=(1, 4), min_tokens=2, max_tokens=9)
    assert [one(p, output=[0] * n).token for n in range(3)] == [2, 2, 1]
    drawn = support(stop_token_ids=(1, 4), min_tokens=1, top_k=1)
    assert drawn == {2}


def test_allowed_tokens_win_where_all_of_them_are_masked_stop_tokens():
    assert one(SamplingParams(temperature=0, allowed_token_ids=(3,), stop_token_ids=(3,), min_tokens=5)).token == 3


def test_logprobs_are_of_temperature_one_before_masks():
    choice = one(SamplingParams(temperature=0.3, seed=1, allowed_token_ids=(2,), top_logprobs=2))
    exact = torch.tensor(LOGITS).log_softmax(-1)
    assert choice.token == 2
    assert choice.logprob == pytest.approx(exact[2].item(), abs=1e-6)
    assert [t for t, _ in choice.top] == [1, 4]
    assert [v for _, v in choice.top] == pytest.approx([exact[1].item(), exact[4].item()], abs=1e-6)


def test_top_logprobs_none_zero_and_more_than_there_are():
    assert one(SamplingParams(temperature=0)).logprob is None
    zero = one(SamplingParams(temperature=0, top_logprobs=0))
    assert zero.logprob is not None
    assert zero.top == ()
    everything = one(SamplingParams(temperature=0, top_logprobs=20)).top
    assert [t for t, _ in everything] == [1, 4, 2, 0, 5, 3]
    ties = one(SamplingParams(temperature=0, top_logprobs=2), logits=[1.0, 1.0, 1.0]).top
    assert [t for t, _ in ties] == [0, 1]


def test_a_row_is_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 1000, generator=generator) * 3
    menu = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, frequency_penalty=1.0, top_logprobs=3),
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7, top_p=0.9),
        SamplingParams(seed=3, top_k=10, presence_penalty=0.3),
        SamplingParams(seed=4, min_p=0.05, repetition_penalty=1.3, top_logprobs=0),
    ]
    slots = [slot(menu[i % 6], prompt=[i, i + 1], output=[5] * (i // 6)) for i in range(24)]
    together = Sampler().sample(logits.clone(), slots)
    alone = [Sampler().sample(logits[i : i + 1].clone(), [s])[0] for i, s in enumerate(slots)]
    assert [c.token for c in together] == [c.token for c in alone]
    assert [c.logprob for c in together] == pytest.approx([c.logprob for c in alone], abs=1e-6)
    shuffled = torch.randperm(24, generator=generator).tolist()
    again = Sampler().sample(logits[shuffled].clone(), [slots[i] for i in shuffled])
    assert [c.token for c in again] == [together[i].token for i in shuffled]


def test_the_stream_moves_with_the_generated_token_not_with_the_prompt():
    p = SamplingParams(seed=9)
    flat = [0.0] * 50
    by_index = [one(p, flat, output=[0] * n).token for n in range(20)]
    assert len(set(by_index)) > 5
    assert one(p, flat, prompt=[1, 2, 3], output=[4]).token == by_index[1]
