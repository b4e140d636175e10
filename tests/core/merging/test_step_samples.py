"""Samples of steps tell what the steps computed, although later steps reuse their sequences."""

from __future__ import annotations

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL


def test_a_sample_keeps_its_adapters_when_later_steps_number_them_anew():
    engine = Engine.from_config(EngineConfig(model=BUILTIN_MODEL, adapters=BUILTIN_ADAPTERS, speculation="off"))

    def ask(name, adapter, max_tokens, token=100):
        params = RequestParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(Request(name, [token] * 40, params, adapter))

    def step_until(done):
        while not done():
            engine.step()

    def names(sample):
        return {adapter and adapter.name: count for adapter, count in sample.batch.items()}

    for adapter in ("count", "upper"):  # both are read before the first sample that counts
        ask(adapter, adapter, 2, token=101)
        step_until(lambda adapter=adapter: adapter not in engine.scheduler)
    engine.samples.take_decode()
    engine.samples.take_prefill()
    ask("a", "count", 6)
    ask("b", "upper", 60)
    ask("c", "upper", 60)
    step_until(lambda: "a" not in engine.scheduler)  # from then on "upper" is the only adapter, and the first
    ask("d", None, 2)  # a step with a prompt numbers the adapters of all sequences anew
    step_until(lambda: "d" not in engine.scheduler)
    sample = engine.samples.take_decode()
    assert names(sample) == {"count": 1, "upper": 2} and sample.merged is None
    assert 40 <= sample.context < 42 and (sample.num_sequences, sample.num_tokens) == (3, 3) and sample.seconds > 0
    prefill = engine.samples.take_prefill()
    assert names(prefill).keys() <= {"count", "upper"} and prefill.num_tokens >= 40 and prefill.context == 0
    assert engine.samples.take_decode() is None, "it was taken"
    step_until(lambda: engine.scheduler.get("b").num_output_tokens > 20)
    assert names(engine.samples.take_decode()) == {"upper": 2}
    engine.close()
