"""Our policy of modes: the fastest one by its prices, once it has earned its merge; and prices that are learned."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.costs.models import CostModel, DiskCost, Kernel, MergeCost, StepCost, TransferCost
from chorus.core.merging import learned_prices
from chorus.core.merging.fastest_mode import EARNED, MOST_PROBE, PROBE, FastestMode
from chorus.core.merging.learned_prices import MERGE_STEPS, LearnedPrices
from chorus.core.merging.mode_policy import ModeChoice, Work, work_of
from chorus.core.merging.modes import Patience
from chorus.perf.simulate.merging import ProfilePrices

from .test_dlora import A, B, C, Voice, state

BIG = Voice("big", rank=64, version=9)


def prices(merge=0.0, **terms):
    step = StepCost(**{"base": 0.01, **terms})
    return ProfilePrices(CostModel(Kernel.SGMV, step, DiskCost(), TransferCost(), merge=MergeCost(merge)))


def test_work_of_modes():
    batch = {A: 3, BIG: 2, None: 1}
    assert work_of(batch, None) == Work(6, 5, 3 * 8 + 2 * 64, 64, 72)
    assert work_of(batch, A) == Work(6, 2 + 3, 2 * 64 + 3 * 8, 64, 72), "A's part is taken away from three rows"
    assert work_of(batch, BIG) == Work(6, 3 + 4, 3 * 8 + 4 * 64, 64, 72)
    assert work_of({A: 3}, A) == Work(3, 0, 0, 0, 0)


def test_what_is_there_is_chosen_by_tokens_a_second():
    policy = FastestMode(prices(lora=0.004, per_row=0.001))
    there = {"shadowed": A, "merged": None, "may_leave_out": False}
    assert policy.choose(state({A: 8}, **there)) == ModeChoice(A)
    assert policy.choose(state({B: 8}, **there)) == ModeChoice(None)
    dear = FastestMode(prices(per_rank=0.0001))
    assert dear.choose(state({A: 5, B: 3}, **there)) == ModeChoice(A), "6 rank-rows of 8 in place of 8"
    assert dear.choose(state({A: 3, B: 5}, **there)) == ModeChoice(None), "10 in place of 8"


def test_others_are_left_out_where_that_makes_more_tokens():
    policy = FastestMode(prices(lora=0.004))
    there = {"shadowed": A, "merged": A}
    assert policy.choose(state({A: 6, B: 2}, **there)) == ModeChoice.alone(A), "6 in 10 ms, 8 in 14"
    assert policy.choose(state({A: 5, B: 3}, **there)) == ModeChoice(A), "5 in 10 ms are less"
    assert policy.choose(state({A: 6, B: 2}, may_leave_out=False, **there)) == ModeChoice(A)


def test_requests_that_wait_begin_beside_those_left_out_as_far_as_memory_goes():
    policy = FastestMode(prices(lora=0.004))
    there = {"shadowed": A, "merged": A}
    waiting = state({B: 4, A: 20}, **there)
    assert policy.choose(waiting) == ModeChoice.alone(A), "8 in 10 ms"
    waiting = state({B: 4, A: 20}, running={B: 12, A: 2}, beginning=1, **there)
    assert policy.choose(waiting) == ModeChoice(A), "2 and one more in 10 ms are less than 8 in 14"
    assert waiting.alone(A) == 3
    assert state({B: 4, A: 20}, running={B: 16}, beginning=0, **there).alone(A) == 0
    assert state({A: 20}, **there).alone(A) == 8
    assert state({B: 4, A: 20}, **there).alone(B) == 4, "no more than there are"


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_a_merge_has_to_be_earned(share):
    """It is made when the tokens lost without it are worth `EARNED` times its cost."""
    policy = FastestMode(prices(merge=0.014 * share * 10 / EARNED, lora=0.004))
    steps = 0
    while policy.choose(state({A: 8}, step_seconds=0.014)).merged is None:
        steps += 1
        assert steps < 100
    lost_by_step = (8 / 0.010 - 8 / 0.014 * 1.01) * 0.014
    assert steps == pytest.approx(0.14 * share * 8 / 0.014 / lost_by_step, abs=1.01)


def test_what_is_not_worth_it_is_not_merged():
    policy = FastestMode(prices(merge=0.01, per_rank=0.0001))
    for _ in range(1000):
        assert policy.choose(state({A: 3, B: 3, C: 2}, step_seconds=0.02)).merged is None
    free = FastestMode(prices(merge=0.0))
    assert free.choose(state({A: 8}, step_seconds=0.02)).merged is None, "LoRA costs nothing"


def test_what_is_being_made_is_waited_for():
    policy = FastestMode(prices(lora=0.004))
    assert policy.choose(state({B: 8}, shadowed=A, is_under_way=True)) == ModeChoice(A)
    assert policy.choose(state({}, shadowed=A, merged=A)) == ModeChoice(A)


def test_prices_are_learned_from_steps():
    true = prices(base=0.008, per_row=0.0002, per_kv_token=1e-7, lora=0.002, per_rank=5e-6, per_adapter_rank=2e-6)
    source, learned = random.Random(3), LearnedPrices()
    voices = [A, B, BIG, None]

    def drawn():
        batch = {voice: source.randint(1, 5) for voice in source.sample(voices, source.randint(1, 4))}
        merged = source.choice([A, B, BIG, None, None])
        return batch, merged, source.uniform(50, 500)

    for _ in range(400):
        step = drawn()
        learned.observe(*step, true.step_seconds(*step) * source.uniform(0.97, 1.03))
    for _ in range(100):
        step = drawn()
        assert learned.step_seconds(*step) == pytest.approx(true.step_seconds(*step), rel=0.06)


def learned_of_mixture(learned, steps=400):
    """Prices that have learned steps of a mixture of which a token goes to a sixteenth, and the true ones."""
    true = prices(base=0.002, per_row=0.0001, experts=0.03, expert_share=1 / 16)
    source = random.Random(5)
    for _ in range(steps):
        step = {None: source.randint(1, 64)}, None, source.uniform(50, 500)
        learned.observe(*step, true.step_seconds(*step) * source.uniform(0.97, 1.03))
    return learned, true


def test_experts_of_a_step_have_a_price():
    """More rows read ever fewer further experts: no price of a row would tell."""
    learned, true = learned_of_mixture(LearnedPrices(1 / 16))
    linear, _ = learned_of_mixture(LearnedPrices())
    for rows in (1, 2, 8, 24, 64):
        step = {None: rows}, None, 200.0
        assert learned.step_seconds(*step) == pytest.approx(true.step_seconds(*step), rel=0.06)
    assert linear.step_seconds({None: 1}, None, 200.0) > 1.5 * true.step_seconds({None: 1}, None, 200.0)
    assert learned.terms[-1] == pytest.approx(0.03, rel=0.1)


def test_a_model_without_experts_has_no_price_of_them():
    learned, _ = learned_of_mixture(LearnedPrices(), steps=40)
    assert learned.terms[-1] == 0


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_prices_are_the_likeliest_that_are_not_below_0(seed, count):
    """No price that is 0 would do better above it, and none above it a little higher or lower."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3, (count, 6)) * rng.uniform(0.1, 3, 6)
    squares = rows.T @ rows + np.diag(10.0 ** rng.integers(-3, 1, 6))
    sums = rows.T @ rng.normal(1.0, 2.0, count)
    found = np.array(learned_prices.nonnegative(squares, sums, np.maximum(rng.normal(0, 1, 6), 0)))
    scale = np.sqrt(squares.diagonal())
    gain, least = sums - squares @ found, 1e-6 * scale * np.linalg.norm(sums / scale) + 1e-300
    assert (found >= 0).all()
    assert (gain <= least).all()
    assert (np.abs(gain[found > 0]) <= least[found > 0]).all()


def test_at_first_a_step_is_taken_to_be_most_of_its_time():
    """Were LoRA and KV taken to be most of it, merging would be tried at once wherever an adapter has requests."""
    learned = LearnedPrices()
    for step in range(10):
        learned.observe({A: 3, B: 2, None: 3}, None, 100.0 + step, 0.01)
    assert 0.007 < learned.step_seconds({None: 8}, None, 100.0) < 0.0095
    assert 0.0055 < learned.step_seconds({None: 1}, None, 0.0) < 0.008


def test_merging_is_tried_where_it_might_help_and_given_up_where_it_does_not():
    for lora, helps in ((0.004, True), (0.0, False)):
        true, learned = prices(lora=lora), LearnedPrices()
        policy, merged, modes = FastestMode(learned), None, []
        for _ in range(300):
            now = state({A: 8}, step_seconds=0.01, merged=merged, shadowed=merged or (modes[-1:] and A) or None)
            merged = policy.choose(now).merged
            learned.observe({A: 8}, merged, 100.0, true.step_seconds({A: 8}, merged, 100.0))
            modes.append(merged)
        assert A in modes, "it was never tried"
        assert (modes[-1] is A) or not helps
        assert learned.step_seconds({A: 8}, A, 100.0) == pytest.approx(0.01, rel=0.05)


def test_one_merge_that_was_held_up_is_not_the_last():
    learned = LearnedPrices()
    learned.observe({A: 8}, None, 100.0, 0.01)
    assert learned.merge_seconds(A) == MERGE_STEPS * 0.01
    learned.observe_merge(A, 0.03)
    assert learned.merge_seconds(A) == 0.03
    learned.observe_merge(A, 2.5)
    assert learned.merge_seconds(A) == pytest.approx(0.06), "no more than twice as much"
    for _ in range(3):
        learned.observe_merge(A, 0.02)
    assert learned.merge_seconds(A) == 0.02


def test_a_clock_that_stands_still_breaks_nothing():
    learned = LearnedPrices()
    for _ in range(3):
        learned.observe({A: 8}, None, 100.0, 0.0)
    for _ in range(20):
        learned.observe({A: 8}, None, 100.0, 0.01)
    assert learned.step_seconds({A: 8}, None, 100.0) == pytest.approx(0.01, rel=0.3)


def test_one_slow_step_changes_little():
    learned = LearnedPrices()
    for _ in range(50):
        learned.observe({A: 8}, None, 100.0, 0.01)
    learned.observe({A: 8}, None, 100.0, 1.0)
    assert learned.step_seconds({A: 8}, None, 100.0) < 0.012


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.booleans(), st.booleans()), max_size=200))
def test_patience(steps):
    """Requests that are left out lose no more than the limit, and half of the time at most."""
    patience, out, back = Patience(5.0, 50), 0.0, 0.0
    for seconds, wants, late in steps:
        leaves = wants and not patience.is_over
        patience.pass_by(seconds, leaves, late and leaves)
        out, back = out + seconds * leaves, back + seconds * (not leaves)
        assert out <= back + 6.0 + 1e-9


def test_merging_pays_though_every_row_always_had_the_same_rank():
    """Rows and their ranks come together then: neither's price may be below 0 to make up for the other's."""
    true, learned = prices(lora=0.004, per_row=0.0001), LearnedPrices()
    for step in range(60):
        rows, merged = 1 + step // 10, A if 5 <= step < 25 else None
        learned.observe({A: rows}, merged, 100.0, true.step_seconds({A: rows}, merged, 100.0))
    for rows in (1, 8, 32):
        merged, unmerged = (learned.step_seconds({A: rows}, mode, 100.0) for mode in (A, None))
        assert merged < unmerged


def test_all_requests_run_now_and_then_beside_one_adapter_alone():
    policy = FastestMode(prices(lora=0.004))
    alone = state({A: 7, B: 1}, shadowed=A, merged=A)
    together = [index for index in range(6000) if policy.choose(alone) == ModeChoice(A)]
    gaps = [after - before - 1 for before, after in itertools.pairwise([-1, *together])]
    assert gaps == [PROBE, 2 * PROBE, 4 * PROBE, 8 * PROBE, MOST_PROBE, MOST_PROBE, MOST_PROBE, MOST_PROBE]
    policy.choose(state({A: 4, B: 4}, shadowed=A, merged=A))
    choices = [policy.choose(alone) for _ in range(PROBE + 1)]
    assert choices == [*[ModeChoice.alone(A)] * PROBE, ModeChoice(A)], "all had just run"


def test_an_adapter_without_a_row_is_merged_if_most_requests_wait_for_it():
    """First come, first served gives A and B the rows; C has as many requests as a step has rows, alone."""
    policy = FastestMode(prices(lora=0.004))
    crowd = state({A: 4, B: 4, C: 20}, step_seconds=0.014, beginning=20)
    choices = [policy.choose(crowd).merged for _ in range(20)]
    assert C in choices
    assert not {A, B} & {*choices}


def test_a_price_that_was_guessed_too_high_is_mended_by_three_steps():
    """LoRA takes 12 ms whatever the batch, which small batches don't show: 16 rows seem dear until they are run."""
    learned = LearnedPrices()
    voices = [Voice(f"v{index}", rank=64, version=index + 1) for index in range(8)]
    for _ in range(40):
        learned.observe({voices[0]: 1}, None, 100.0, 0.024)
    for _ in range(200):
        learned.observe({A: 8}, A, 100.0, 0.012)
    batch = dict.fromkeys(voices, 2)
    before = learned.step_seconds(batch, None, 100.0)
    for _ in range(3):
        learned.observe(batch, None, 100.0, 0.024)
    after = learned.step_seconds(batch, None, 100.0)
    assert before > 0.1
    assert after < 0.04


class MergesLearned(LearnedPrices):
    """Knows the times of steps, and learns the time of a merge."""

    def __init__(self, true):
        super().__init__()
        self.step_seconds = true.step_seconds


def merges_by_steps(prices, seconds, steps, matrices=60):
    """Return the numbers of steps at which a merge of so many seconds was begun, and those at which one was done.

    Between two steps goes half of a step's time, as in `Merging`.
    """
    policy, begun, done, made, shadowed = FastestMode(prices), [], [], 0, None
    prices.observe({A: 8}, None, 100.0, prices.step_seconds({A: 8}, None, 100.0))
    for number in range(steps):
        is_under_way = shadowed is not None and made < matrices
        merged = shadowed if made == matrices else None
        if is_under_way and made:
            prices.observe_merge(A, seconds)
        there = {"merged": merged, "shadowed": shadowed, "is_under_way": is_under_way, "share_made": made / matrices}
        choice = policy.choose(state({A: 8}, step_seconds=0.01, **there)).merged
        if choice is not None and shadowed is None:
            begun.append(number)
            shadowed, made = choice, 0
        elif choice is None and is_under_way:
            shadowed, made = None, 0
        if shadowed is not None and made < matrices:
            made = min(matrices, made + max(1, int(0.005 / (seconds / matrices))))
            if made == matrices:
                done.append(number)
        prices.observe({A: 8}, merged, 100.0, prices.step_seconds({A: 8}, merged, 100.0))
    return begun, done


def test_a_merge_that_turns_out_dear_is_given_up_until_it_has_been_earned():
    """It takes 60 steps and was taken to take 2: its first matrices say so, and the rest waits for its worth.

    Each try doubles the price twice, as the loss is `EARNED` = 2 times the price before.
    """
    learned = MergesLearned(prices(lora=0.0005))
    begun, done = merges_by_steps(learned, seconds=0.63, steps=6000)
    assert learned.merge_seconds(A) == pytest.approx(0.63)
    lost_by_step = (8 / 0.010 - 8 / 0.0105 * 1.01) * 0.01
    lost = [EARNED * MERGE_STEPS * times * 8 for times in (1, 4, 16)]  # tokens
    assert [number * lost_by_step for number in begun] == pytest.approx(lost, rel=0.02)
    assert done == [begun[-1] + 59], "in one go"


def test_a_merge_that_costs_what_was_thought_is_made_in_one_go():
    begun, done = merges_by_steps(MergesLearned(prices(lora=0.004)), seconds=MERGE_STEPS * 0.014, steps=300)
    assert (len(begun), len(done)) == (1, 1)
