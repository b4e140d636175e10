"""One engine's promises to a request: its ends, its seed, its adapter version, and that only the guilty fail."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import InvalidRequest, RequestParams, Seeds
from chorus.core.requests.types import FinishReason
from chorus.memory.adapters.store import UnknownAdapter
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.form import WEIGHTS_FILE
from chorus.memory.pages.pool import IntegrityError, PageKind
from chorus.memory.transfers.transfer import ExecutorLost

from .conftest import Answer

pytestmark = pytest.mark.wide


@pytest.fixture
def gqa(subject):
    return subject("gqa")


def held_pages(driver):
    return driver.held_pages()


def all_pages_are_free(driver):
    """Once idle cached pages are freed, no page is held."""
    driver.engine.reclaimer.reclaim_all()
    stats = driver.engine.stats()
    return stats.num_free_pages == stats.num_pages


def copy_adapter(subject, name, path):
    return shutil.copytree(subject.adapters[name], path)


def edit_weights(path, edit):
    """Rewrite an adapter's tensors in place: `edit(name, tensor) -> tensor`."""
    file = path / WEIGHTS_FILE
    tensors = {name: edit(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


# -- sampling

SAMPLED = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_k": 12, "seed": 8},
    {"temperature": 1.4, "top_p": 0.8, "seed": 9},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "seed": 10},
    {"temperature": 0.0, "seed": 11},
]


def sampled_requests():
    """(id, (adapter, prompt), parameters) of requests that between them use every way to sample."""
    for index, params in enumerate(SAMPLED):
        for adapter in ("r8-attention", "r1-all", None):
            yield f"sampled-{index}-{adapter}", (adapter, [5 + index, 9, 30, 4, 77, 21]), {"max_tokens": 24, **params}


def add_sampled(driver):
    for name, args, params in sampled_requests():
        driver.add(name, *args, **params)


@pytest.fixture
def sampled_alone(gqa, drive):
    """The tokens of each sampled request when it runs by itself."""
    driver = drive(gqa)
    tokens = {name: driver.run(name, *args, **params).tokens for name, args, params in sampled_requests()}
    assert len({tuple(t) for t in tokens.values()}) == len(tokens)
    return tokens


def test_seeded_tokens_do_not_depend_on_the_batch(gqa, drive, sampled_alone):
    driver = drive(gqa, max_num_batched_tokens=40)
    for index in range(6):
        driver.add(f"before-{index}", list(gqa.adapters)[index], [3] * (10 + index), max_tokens=20, temperature=1.0)
    driver.step()
    add_sampled(driver)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in sampled_alone} == sampled_alone


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_seeded_tokens_survive_preemption(gqa, drive, sampled_alone, preemption):
    adapters = {name: gqa.adapters[name] for name in ("r8-attention", "r1-all")}
    host = {"host_cache_bytes": 0} if preemption == "recompute" else {}  # else blocks come back from host memory
    driver = drive(gqa, num_pages=24, adapters=adapters, preemption=preemption, **host)
    add_sampled(driver)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in sampled_alone} == sampled_alone
    restarted = {
        row.request_id for plan in driver.plans for row in plan.sequences if row.start == 0 and len(row.tokens) > 6
    }
    assert bool(restarted) == (preemption == "recompute"), "no request was preempted after it had given tokens"
    assert (driver.engine.stats().num_swaps_in > 0) == (preemption == "swap")


def test_the_engine_draws_no_seed(gqa, drive):
    """One that takes a request over would draw another. `Seeds` gives each request its own, where it enters."""
    driver = drive(gqa, seed=3)
    params = {"max_tokens": 16, "temperature": 1.0}
    plain = driver.run("a", None, [5, 6, 7], **params).tokens
    assert driver.run("b", None, [5, 6, 7], seed=0, **params).tokens == plain
    seeds, again = Seeds(3), Seeds(3)
    filled = [seeds.fill(RequestParams()) for _ in range(3)]
    assert len({it.seed for it in filled}) == 3
    assert filled == [again.fill(RequestParams()) for _ in range(3)]
    assert Seeds(None).fill(RequestParams()) != Seeds(None).fill(RequestParams())
    assert seeds.fill(RequestParams(seed=0)) == RequestParams(seed=0)


def test_top_k_beyond_any_vocabulary_keeps_all_tokens(gqa, drive):
    driver = drive(gqa)
    want = driver.run("a", None, [5, 6, 7], max_tokens=12, temperature=1.0, seed=1, top_k=0)
    assert driver.run("b", None, [5, 6, 7], max_tokens=12, temperature=1.0, seed=1, top_k=2**70) == want


# -- ends


def test_stop_token_ends_a_request_and_is_its_last_token(gqa, drive):
    prompt = gqa.prompt("r1-all", 10, 20, seed=1)
    want = gqa.greedy("r1-all", prompt, 20)
    stop = want[7]
    first = want.index(stop)
    answer = drive(gqa).run("a", "r1-all", prompt, max_tokens=20, stop_token_ids=(stop, 2))
    assert answer.tokens == want[: first + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_token_id == stop


@pytest.fixture
def with_eos(gqa, tmp_path):
    """The gqa model and a prompt, with the fifth token it answers declared to be the end of a sequence."""
    prompt = gqa.prompt(None, 10, 12, seed=2)
    want = gqa.greedy(None, prompt, 12)
    model = shutil.copytree(gqa.model, tmp_path / "model")
    for file in ("config.json", "generation_config.json"):
        config = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**config, "eos_token_id": [2, want[4]]}))
    return type(gqa)(model, {}), prompt, want


def test_end_of_sequence_ends_a_request(with_eos, drive):
    subject, prompt, want = with_eos
    answer = drive(subject).run("a", None, prompt, max_tokens=12, ignore_eos=False)
    assert answer.tokens == want[: want.index(want[4]) + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_token_id == want[4]


def test_ignore_eos_goes_on_to_max_tokens(with_eos, drive):
    subject, prompt, want = with_eos
    answer = drive(subject).run("a", None, prompt, max_tokens=12, ignore_eos=True)
    assert answer.tokens == want
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.stop_token_id is None


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_max_tokens(gqa, drive, max_tokens):
    prompt = gqa.prompt(None, 6, 9, seed=3)
    answer = drive(gqa).run("a", None, prompt, max_tokens=max_tokens)
    assert answer.tokens == gqa.greedy(None, prompt, 9)[:max_tokens]
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [15, 18, 19])
def test_context_limit_ends_a_request(gqa, drive, length):
    prompt = gqa.prompt(None, length, 5, seed=4)
    answer = drive(gqa, max_model_len=20).run("a", None, prompt, max_tokens=50)
    assert answer.tokens == gqa.greedy(None, prompt, 5)[: 20 - length]
    assert answer.finish_reason is FinishReason.LENGTH


def test_the_models_own_context_can_be_filled(gqa, drive):
    prompt = [7] * 250
    answer = drive(gqa).run("a", "r2-qv", prompt, max_tokens=50)
    assert len(answer.tokens) == 6
    assert answer.finish_reason is FinishReason.LENGTH


# -- sources of metrics


def test_the_first_output_says_how_long_the_request_waited(gqa, drive):
    driver = drive(gqa)
    driver.add("a", None, gqa.prompt(None, 6, 9, seed=3), max_tokens=3)
    outputs = []
    while driver.engine.has_work():
        outputs += driver.engine.step()
    first, *others = outputs
    assert first.queue_seconds is not None and first.queue_seconds > 0
    assert [one.queue_seconds for one in others] == [None, None]


def test_steps_are_counted_by_their_tokens(gqa, drive):
    driver = drive(gqa)
    driver.run("a", None, gqa.prompt(None, 9, 9, seed=3), max_tokens=4)
    stats = driver.engine.stats()
    assert stats.num_step_tokens == 9 + 3 and sum(stats.step_sizes) == stats.num_steps == 4
    assert stats.step_sizes[:3] == (3, 0, 1)


# -- accounting


def test_books_that_do_not_match_cost_nobody_an_answer(gqa, drive):
    """The step that makes the engine idle gives its outputs; whoever drives it asks for the check after that."""
    driver = drive(gqa)
    driver.add("last", None, [5] * 9, max_tokens=1)
    driver.engine.pool.allocate(1, PageKind.KV)  # nobody's
    (output,) = driver.engine.step()
    assert output.token_ids == (gqa.greedy(None, [5] * 9, 1)[0],)
    with pytest.raises(IntegrityError):
        driver.engine.check_when_idle()
    driver.engine.check_when_idle()  # at most once a second


# -- abort


def test_abort_of_a_running_request_frees_its_pages_at_once(gqa, drive):
    driver = drive(gqa)
    driver.add("stays", None, [5] * 20, max_tokens=10)
    driver.step()
    before = held_pages(driver)
    driver.add("goes", None, [6] * 40, max_tokens=10)
    driver.step()
    assert held_pages(driver) > before
    assert driver.engine.abort("goes")
    assert held_pages(driver) == before
    driver.engine.check_integrity()
    assert not driver.engine.abort("goes")
    answers = driver.drain()
    assert held_pages(driver) == 0
    assert all_pages_are_free(driver)
    assert answers["goes"].finish_reason is None
    assert answers["stays"].tokens == gqa.greedy(None, [5] * 20, 10)


def test_abort_of_a_waiting_request(gqa, drive):
    driver = drive(gqa, max_num_seqs=1)
    driver.add("first", None, [5] * 9, max_tokens=6)
    driver.add("second", "r1-all", [6] * 9, max_tokens=6)
    driver.step()
    assert (driver.engine.stats().num_running, driver.engine.stats().num_waiting) == (1, 1)
    assert driver.engine.abort("second")
    assert driver.engine.stats().num_waiting == 0
    answers = driver.drain()
    assert len(answers["first"].tokens) == 6
    assert answers["second"].tokens == []
    assert driver.engine.stats().num_adapter_loads == 0


def test_abort_of_an_adapters_last_request_leaves_it_idle(gqa, drive):
    driver = drive(gqa)
    driver.add("a", "r1-all", [5] * 9, max_tokens=6)
    driver.step()
    assert driver.engine.store.get("r1-all").references == 1
    driver.engine.abort("a")
    assert driver.engine.store.get("r1-all").references == 0
    assert driver.engine.reclaimer.reclaim_all()
    assert held_pages(driver) == 0


def test_abort_of_the_unknown_is_refused(gqa, drive):
    assert not drive(gqa).engine.abort("nobody")


def test_an_id_can_be_used_again_after_its_end(gqa, drive):
    driver = drive(gqa)
    prompt = gqa.prompt(None, 6, 3, seed=5)
    for _ in range(2):
        assert driver.run("a", None, prompt, max_tokens=3).tokens == gqa.greedy(None, prompt, 3)


# -- refusals


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.01}),
        ("top_p", {"top_p": float("nan")}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": -0.1}),
        ("min_p", {"min_p": 1.1}),
        ("min_p", {"min_p": float("nan")}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("presence_penalty", {"presence_penalty": float("nan")}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("repetition_penalty", {"repetition_penalty": float("nan")}),
        ("logit_bias", {"logit_bias": {5: 100.5}}),
        ("logit_bias", {"logit_bias": {5: float("nan")}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 17}),
        ("bad_words", {"bad_words": ((5,), ())}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 101}),
        ("prompt_logprobs", {"prompt_logprobs": 101}),
        ("logprob_token_ids", {"logprob_token_ids": (1,)}),
        ("logprob_token_ids", {"logprobs": 0, "logprob_token_ids": (1,) * 101}),
    ],
)
def test_wrong_sampling_parameters_name_their_field(field, params):
    with pytest.raises(InvalidRequest, match=field) as caught:
        RequestParams(**params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "message", "request_", "config"),
    [
        ("request_id", "in use", ("taken", None, [5]), {}),
        ("prompt", "no tokens", ("a", None, []), {}),
        ("prompt", "256 tokens, the model takes 256", ("a", None, [5] * 256), {}),
        ("prompt", "outside the vocabulary of 160", ("a", None, [5, 160]), {}),
        ("prompt", "token id -1 is outside", ("a", None, [-1]), {}),
        ("stop_token_ids", "token id 160 is outside", ("a", None, [5], {"stop_token_ids": (5, 160)}), {}),
        ("stop_token_ids", "token id -1 is outside", ("a", None, [5], {"stop_token_ids": (-1,)}), {}),
        ("logprob_token_ids", "token id 160", ("a", None, [5], {"logprobs": 0, "logprob_token_ids": (5, 160)}), {}),
        ("logit_bias", "token id 160 is outside", ("a", None, [5], {"logit_bias": {160: 1.0}}), {}),
        ("bad_words", "token id 999999 is outside", ("a", None, [5], {"bad_words": ((5,), (6, 999_999))}), {}),
        ("min_tokens", "between 0 and max_tokens", ("a", None, [5], {"min_tokens": 9}), {}),
        ("model", "'nobody' is not registered", ("a", "nobody", [5]), {}),
        ("prompt", "chunked prefill is off", ("a", None, [5] * 60), {"chunked_prefill": False}),
        ("max_tokens", "lower max_tokens", ("a", None, [5] * 200), {"num_pages": 12}),
        ("max_tokens", "lower max_tokens", ("a", "r1-all", [5] * 200), {"num_pages": 14}),
    ],
)
def test_a_request_that_cannot_be_served_names_its_field(gqa, drive, field, message, request_, config):
    adapters = {"r1-all": gqa.adapters["r1-all"]}
    driver = drive(gqa, max_num_batched_tokens=64, adapters=adapters, **config)
    driver.add("taken", None, [5], max_tokens=2)
    with pytest.raises(InvalidRequest, match=message) as caught:
        driver.add(*request_[:3], max_tokens=8, **dict(*request_[3:]))
    assert caught.value.field == field
    answers = driver.drain()
    assert len(answers["taken"].tokens) == 2, "a refused request disturbed another"


def test_a_request_that_just_fits_is_served(gqa, drive):
    """The largest request that is not refused comes to its end."""
    driver = drive(gqa, adapters={"r1-all": gqa.adapters["r1-all"]}, num_pages=4)
    pages = driver.executor.num_pages - 1 - driver.engine.store.get("r1-all").num_pages
    size = driver.executor.layout.block_tokens * pages
    size += 1  # nothing is computed from the last token that is drawn, so its KV takes no room
    with pytest.raises(InvalidRequest):
        driver.add("a", "r1-all", [5] * 8, max_tokens=size - 7)
    assert len(driver.run("a", "r1-all", [5] * 8, max_tokens=size - 8).tokens) == size - 8


@pytest.mark.parametrize("adapter", [None, "r1-all"])
def test_a_limit_that_nobody_asked_for_is_what_model_and_arena_allow(gqa, drive, adapter):
    adapters = {"r1-all": gqa.adapters["r1-all"]}
    driver = drive(gqa, adapters=adapters, num_pages=6)
    pages = driver.executor.num_pages - 1 - (driver.engine.store.get("r1-all").num_pages if adapter else 0)
    in_arena = driver.executor.layout.block_tokens * pages + 1
    assert in_arena < driver.engine.model.max_model_len
    assert len(driver.run("small", adapter, [5] * 8, max_tokens=None).tokens) == in_arena - 8
    roomy = drive(gqa, adapters=adapters)
    assert len(roomy.run("large", adapter, [5] * 8, max_tokens=None).tokens) == roomy.engine.model.max_model_len - 8


def test_a_limit_that_nobody_asked_for_fits_a_step_where_prompts_are_not_split(gqa, drive):
    driver = drive(gqa, chunked_prefill=False, max_num_batched_tokens=40)
    assert len(driver.run("a", None, [5] * 8, max_tokens=None).tokens) == 33
    with pytest.raises(InvalidRequest, match="42 tokens") as caught:
        driver.add("b", None, [5] * 41, max_tokens=None)
    assert caught.value.field == "prompt"


def test_a_prompt_that_the_arena_cannot_hold_is_refused_without_a_limit_too(gqa, drive):
    driver = drive(gqa, num_pages=3, adapters={})
    with pytest.raises(InvalidRequest, match="shorten the prompt") as caught:
        driver.add("a", None, [5] * 40, max_tokens=None)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        driver.add("b", None, [5] * 30, max_tokens=None, min_tokens=10)
    assert caught.value.field == "min_tokens"


def test_config_budget_must_cover_the_batch(gqa):
    with pytest.raises(ValueError, match="max_num_batched_tokens is 8, below max_num_seqs 16"):
        EngineConfig(model=gqa.model, max_num_seqs=16, max_num_batched_tokens=8)


def test_an_adapter_larger_than_the_arena_is_refused(gqa, drive):
    driver = drive(gqa, adapters={}, num_pages=20)
    with pytest.raises(AdapterFormatError, match="raise memory_bytes"):
        driver.engine.store.register("r33-all", gqa.adapters["r33-all"])
    assert "r33-all" not in driver.engine.store


# -- failures


def break_by_truncation(path):
    file = path / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-64])


def break_by_removal(path):
    shutil.rmtree(path)


def break_by_nan(path):
    edit_weights(path, lambda name, tensor: tensor * float("nan"))


def break_by_missing_tensor(path):
    file = path / WEIGHTS_FILE
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file, metadata={"format": "pt"})


def break_by_larger_rank(path):
    edit_weights(path, lambda name, tensor: torch.cat([tensor, tensor], dim=0 if "lora_A" in name else 1))


def break_by_rank_one(path):
    """Shapes that would broadcast over the registered rank."""
    edit_weights(path, lambda name, tensor: tensor[:1] if "lora_A" in name else tensor[:, :1])


@pytest.mark.parametrize(
    "break_it",
    [
        break_by_truncation,
        break_by_removal,
        break_by_nan,
        break_by_missing_tensor,
        break_by_larger_rank,
        break_by_rank_one,
    ],
)
def test_adapter_that_breaks_after_registration_fails_its_requests_alone(gqa, drive, tmp_path, break_it):
    driver = drive(gqa)
    path = copy_adapter(gqa, "r8-attention", tmp_path / "broken")
    driver.engine.store.register("broken", path)
    break_it(path)
    prompt = gqa.prompt("r1-all", 12, 8, seed=6)
    for name, adapter in (("before", "r1-all"), ("x", "broken"), ("y", "broken"), ("after", "r1-all")):
        driver.add(name, adapter, prompt, max_tokens=8)
    answers = driver.drain()
    for name in "xy":
        assert answers[name].finish_reason is FinishReason.ERROR
        assert str(path) in answers[name].error and answers[name].failure in ("adapter_changed", "adapter_invalid")
        assert answers[name].tokens == []
    for name in ("before", "after"):
        assert answers[name].tokens == gqa.greedy("r1-all", prompt, 8)
    driver.engine.reclaimer.reclaim_all()
    assert held_pages(driver) == 0
    assert all_pages_are_free(driver)


def test_failing_load_that_is_no_format_error_fails_its_request_alone(gqa, drive, monkeypatch):
    driver = drive(gqa)
    place = driver.executor.adapters.load

    def failing(image, layout, pages):
        raise RuntimeError("the copy failed")

    driver.add("stays", None, [5] * 9, max_tokens=6)
    driver.step()
    monkeypatch.setattr(driver.executor.adapters, "load", failing)
    driver.add("x", "r1-all", [5] * 9, max_tokens=6)
    driver.step()
    assert driver.answers["x"].finish_reason is FinishReason.ERROR
    assert "the copy failed" in driver.answers["x"].error and driver.answers["x"].failure is None
    monkeypatch.setattr(driver.executor.adapters, "load", place)
    assert driver.run("y", "r1-all", [5] * 9, max_tokens=6).tokens == gqa.greedy("r1-all", [5] * 9, 6)
    assert driver.answers["stays"].tokens == gqa.greedy(None, [5] * 9, 6)


@pytest.mark.parametrize("guilty", [("r1-all", 0), (None, 0), ("r1-all", 15)], ids=["prefill", "base", "decode"])
def test_executor_that_raises_for_one_request_fails_only_that(gqa, drive, guilty):
    adapter, start = guilty

    def before(plan):
        if any(row.request_id == "guilty" and row.start >= start for row in plan.sequences):
            raise RuntimeError("device fault")

    driver = drive(gqa, before=before)
    others = ["r1-all", "r2-qv", None, "r33-all"]
    prompts = {name: gqa.prompt(name, 12, 10, seed=7) for name in others}
    for name in others[:2]:
        driver.add(str(name), name, prompts[name], max_tokens=10)
    driver.add("guilty", adapter, [5] * 12, max_tokens=10)
    for name in others[2:]:
        driver.add(str(name), name, prompts[name], max_tokens=10)
    answers = driver.drain()
    assert answers["guilty"].finish_reason is FinishReason.ERROR
    assert "device fault" in answers["guilty"].error
    assert answers["guilty"].tokens == gqa.greedy(adapter, [5] * 12, 10)[: max(0, start - 11)]
    for name in others:
        assert answers[str(name)].tokens == gqa.greedy(name, prompts[name], 10), name


def test_a_lost_executor_ends_the_step_and_no_row_is_tried_alone(gqa, drive):
    plans = []

    def before(plan):
        plans.append(len(plan.sequences))
        raise ExecutorLost("the device failed: an illegal address")

    driver = drive(gqa, before=before)
    for name in "ab":
        driver.add(name, None, [5] * 6, max_tokens=4)
    with pytest.raises(ExecutorLost, match="illegal address"):
        driver.step()
    assert plans == [2]
    assert not driver.answers["a"].tokens


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_executor_that_is_lost_while_it_loads_an_adapter_fails_no_request_alone(gqa, drive, monkeypatch, prefetch):
    driver = drive(gqa, prefetch=prefetch, max_num_seqs=1)

    def lost(image, layout, pages):
        raise ExecutorLost("the device failed: an ECC error")

    monkeypatch.setattr(driver.executor.adapters, "load", lost)
    if prefetch:  # the slot is taken: the other's adapter is loaded ahead
        driver.add("runs", None, [5] * 9, max_tokens=30)
    driver.add("x", "r1-all", [5] * 9, max_tokens=6)
    with pytest.raises(ExecutorLost, match="ECC"):
        for _ in range(20):
            driver.step()


def make_overflowing(gqa, path):
    """An adapter whose weights are finite and whose products are not."""
    copy_adapter(gqa, "r8-attention", path)
    edit_weights(path, lambda name, tensor: tensor.sign() * 1e30)
    return path


def test_logits_that_are_not_finite_fail_only_their_request(gqa, drive, tmp_path):
    driver = drive(gqa)
    driver.engine.store.register("overflow", make_overflowing(gqa, tmp_path / "overflow"))
    prompts = {name: gqa.prompt(name, 12, 10, seed=8) for name in (None, "r1-all", "r8-attention")}
    for name, prompt in prompts.items():
        driver.add(str(name), name, prompt, max_tokens=10)
    driver.add("x", "overflow", [5] * 12, max_tokens=10)
    answers = driver.drain()
    assert answers["x"].finish_reason is FinishReason.ERROR
    assert "not finite" in answers["x"].error
    for name, prompt in prompts.items():
        assert answers[str(name)].tokens == gqa.greedy(name, prompt, 10), name


def test_pages_left_full_of_nan_do_not_harm_their_next_owner(gqa, drive, tmp_path):
    driver = drive(gqa)
    driver.engine.store.register("overflow", make_overflowing(gqa, tmp_path / "overflow"))
    assert driver.run("x", "overflow", [5] * 60, max_tokens=10).finish_reason is FinishReason.ERROR
    assert all_pages_are_free(driver)
    prompt = gqa.prompt(None, 20, 10, seed=9)
    for name in "abc":
        driver.add(name, None, prompt, max_tokens=10)
    answers = driver.drain()
    for name in "abc":
        assert answers[name].error is None
        assert answers[name].tokens == gqa.greedy(None, prompt, 10)


# -- adapter versions


@pytest.fixture
def two_versions(gqa, tmp_path):
    """Paths of two adapters that answer differently, and a prompt."""
    old, new = copy_adapter(gqa, "r8-attention", tmp_path / "old"), copy_adapter(gqa, "r1-all", tmp_path / "new")
    seed = 10
    while True:
        prompt = gqa.prompt("r8-attention", 10, 16, seed)
        if gqa.is_clear("r1-all", prompt, 16):
            return old, new, prompt
        seed += 1


def test_reload_gives_running_requests_the_old_weights_and_new_ones_the_new(gqa, drive, two_versions):
    old, new, prompt = two_versions
    driver = drive(gqa, adapters={"voice": old})
    driver.add("running", "voice", prompt, max_tokens=16)
    for _ in range(4):
        driver.step()
    first = driver.engine.store.get("voice")
    second = driver.engine.store.register("voice", new)
    assert second.version > first.version
    driver.add("later", "voice", prompt, max_tokens=16)
    driver.step()
    assert first.pages
    assert second.pages
    answers = driver.drain()
    assert answers["running"].tokens == gqa.greedy("r8-attention", prompt, 16)
    assert answers["later"].tokens == gqa.greedy("r1-all", prompt, 16)
    assert not first.pages, "the old version's pages were not given back"
    assert driver.engine.stats().num_adapter_pages == len(second.pages)


@pytest.mark.parametrize("how", ["reload", "unregister and register", "in place"])
@pytest.mark.parametrize("running", [False, True], ids=["idle", "running"])
def test_reload_never_serves_the_old_ones_cached_prefix(gqa, drive, tmp_path, how, running):
    """Same name, same tokens, other weights: nothing of the old version's KV is used, whether or not a request still
    holds it; who runs on the old version goes on as before.
    """
    old, new = copy_adapter(gqa, "r8-attention", tmp_path / "old"), copy_adapter(gqa, "r1-all", tmp_path / "new")
    seed = 0
    while not gqa.is_clear("r1-all", prompt := gqa.prompt("r8-attention", 70, 16, seed), 16):
        seed += 1
    want_old, want_new = gqa.greedy("r8-attention", prompt, 16), gqa.greedy("r1-all", prompt, 16)
    assert want_old != want_new
    driver = drive(gqa, adapters={"voice": old})
    store = driver.engine.store
    assert driver.run("first", "voice", prompt, max_tokens=16).tokens == want_old
    again = driver.run("again", "voice", prompt, max_tokens=16)
    assert (again.tokens, again.num_cached_tokens) == (want_old, 64), "the prefix was not cached"
    if running:
        driver.add("running", "voice", prompt, max_tokens=16)
        driver.step()
    if how == "reload":
        store.register("voice", new)
    elif how == "unregister and register":
        store.unregister("voice")
        store.register("voice", new)
    else:
        for file in new.iterdir():
            shutil.copy(file, old / file.name)
        store.register("voice", old)
    if not running:
        assert driver.engine.stats().num_cached_pages == 0, "nobody can use the old version's KV any more"
    driver.add("later", "voice", prompt, max_tokens=16)
    answers = driver.drain()
    assert (answers["later"].tokens, answers["later"].num_cached_tokens) == (want_new, 0)
    if running:
        assert answers["running"].tokens == want_old
    warm = driver.run("warm", "voice", prompt, max_tokens=16)
    assert (warm.tokens, warm.num_cached_tokens) == (want_new, 64)
    assert {root.version for root in driver.engine.prefix.roots()} == {store.get("voice").version}
    base = driver.run("base", None, prompt, max_tokens=1)
    assert base.num_cached_tokens == 0, "the base model was served an adapter's KV"


def test_reload_while_a_request_waits(gqa, drive, two_versions):
    """A request keeps the version that was current when it was accepted, even when that was not loaded yet."""
    old, new, prompt = two_versions
    driver = drive(gqa, adapters={"voice": old}, max_num_seqs=1)
    driver.add("first", None, [5] * 8, max_tokens=4)
    driver.add("waiting", "voice", prompt, max_tokens=16)
    driver.step()
    driver.engine.store.register("voice", new)
    driver.add("later", "voice", prompt, max_tokens=16)
    answers = driver.drain()
    assert answers["waiting"].tokens == gqa.greedy("r8-attention", prompt, 16)
    assert answers["later"].tokens == gqa.greedy("r1-all", prompt, 16)
    driver.engine.reclaimer.reclaim_all()
    assert held_pages(driver) == 0
    assert all_pages_are_free(driver)


@pytest.mark.usefixtures("crowded")
def test_files_replaced_in_place_never_change_a_running_request(gqa, drive, two_versions):
    """Preempted after its adapter's files were overwritten, a request fails or goes on as before, never a mixture."""
    old, _, _ = two_versions
    prompt = gqa.prompt("r8-attention", 10, 60, seed=11)
    driver = drive(gqa, adapters={"voice": old}, num_pages=16)
    driver.add("other", None, [5] * 60, max_tokens=100)
    driver.add("running", "voice", prompt, max_tokens=60)
    while len(driver.answers["running"].tokens) < 4:
        driver.step()
    edit_weights(old, lambda name, tensor: -tensor if "lora_A" in name else tensor)
    driver.engine.store.register("voice", old)
    answer = driver.drain()["running"]
    assert driver.engine.stats().num_preemptions > 0
    want = gqa.greedy("r8-attention", prompt, 60)
    assert answer.tokens == want[: len(answer.tokens)]
    assert len(answer.tokens) == 60 or answer.finish_reason is FinishReason.ERROR


def test_unregistered_adapter_serves_whom_it_has_and_nobody_else(gqa, drive, two_versions):
    old, _, prompt = two_versions
    driver = drive(gqa, adapters={"voice": old})
    driver.add("running", "voice", prompt, max_tokens=16)
    driver.step()
    driver.engine.store.unregister("voice")
    assert driver.engine.store.names() == []
    with pytest.raises(InvalidRequest, match="not registered") as caught:
        driver.add("later", "voice", prompt, max_tokens=16)
    assert caught.value.field == "model"
    with pytest.raises(UnknownAdapter):
        driver.engine.store.unregister("voice")
    assert driver.drain()["running"].tokens == gqa.greedy("r8-attention", prompt, 16)
    assert held_pages(driver) == 0, "unloading did not unload"
    stats = driver.engine.stats()
    assert stats.num_cached_pages == 0, "its cached prefixes stayed"
    assert stats.num_free_pages == stats.num_pages


def test_unregistering_an_idle_adapter_frees_its_pages_at_once(gqa, drive):
    driver = drive(gqa)
    driver.run("a", "r5-ko", [5] * 9, max_tokens=3)
    assert driver.engine.stats().num_adapter_pages > 0
    driver.engine.store.unregister("r5-ko")
    stats = driver.engine.stats()
    assert stats.num_free_pages == stats.num_pages


def test_failed_reload_keeps_the_earlier_version(gqa, drive, two_versions, tmp_path):
    old, _, prompt = two_versions
    driver = drive(gqa, adapters={"voice": old})
    with pytest.raises(AdapterFormatError, match="no such directory"):
        driver.engine.store.register("voice", tmp_path / "nowhere")
    assert driver.run("a", "voice", prompt, max_tokens=16).tokens == gqa.greedy("r8-attention", prompt, 16)


# -- accounting


def test_stats_follow_the_work(gqa, drive):
    driver = drive(gqa)
    driver.add("a", "r2-qv", [5] * 20, max_tokens=3)
    driver.add("b", None, [5] * 20, max_tokens=3)
    outputs = driver.step()
    stats = driver.engine.stats()
    assert {output.request_id for output in outputs} == {"a", "b"}
    assert {output.step for output in outputs} == {stats.last_step}
    assert (stats.last_step.num_requests, stats.last_step.num_adapters, stats.last_step.num_tokens) == (2, 1, 40)
    assert (stats.num_running, stats.num_waiting, stats.num_adapter_loads) == (2, 0, 1)
    assert stats.num_kv_pages == 2 * driver.executor.layout.pages_for_tokens(20)
    assert stats.num_free_pages == stats.num_pages - stats.num_kv_pages - stats.num_adapter_pages
    driver.drain()
    stats = driver.engine.stats()
    assert (stats.num_generated_tokens, stats.num_steps) == (6, 3)


def test_books_that_do_not_match_cost_nobody_the_last_output(gqa, drive):
    """A leaked page is noticed as soon as the engine idles, after all sampled tokens have been delivered."""
    driver = drive(gqa, prefix_cache=False)
    request = Request("a", [5] * 8, RequestParams(2, temperature=0, ignore_eos=True))
    driver.engine.add_request(request)
    driver.engine.step()
    driver.engine.pool.allocate(1, PageKind.KV)  # nobody's
    outputs = driver.engine.step()
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH]
    with pytest.raises(IntegrityError, match="1 references but 0 holders"):
        driver.engine.check_when_idle()


@pytest.mark.parametrize(
    ("first", "second", "share", "hit"),
    [
        (("a", ""), ("a", ""), False, True),
        (("a", ""), ("b", ""), False, False),
        (("a", ""), ("b", ""), True, True),
        (("a", "x"), ("a", "y"), False, False),
        (("a", "x"), ("a", "y"), True, False),
        (("a", "x"), ("a", "x"), False, True),
        (("a", "b"), ("ab", ""), False, False),
        (("", ""), ("a", ""), False, False),
    ],
)
def test_cached_kv_is_shared_within_a_tenant_and_a_salt(gqa, drive, first, second, share, hit):
    """Otherwise the count of cached tokens would tell one client about another's prompts."""
    driver = drive(gqa, share_prefix_cache=share)
    prompt = list(range(5, 45))
    for name, (tenant, salt) in zip("12", (first, second), strict=True):
        params = RequestParams(3, temperature=0, ignore_eos=True)
        driver.engine.add_request(Request(name, prompt, params, "r1-all", tenant=tenant, cache_salt=salt))
        driver.answers[name] = Answer()
        driver.drain()
    assert driver.answers["1"].num_cached_tokens == 0
    assert driver.answers["2"].num_cached_tokens == (32 if hit else 0)
    assert driver.answers["1"].tokens == driver.answers["2"].tokens
