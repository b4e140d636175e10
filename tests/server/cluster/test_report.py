"""Rows and reports come out of a frame as they went in; sums over replicas."""

from dataclasses import replace

import msgpack
import pytest

from chorus.core.requests.types import FinishReason, RequestOutput, TokenLogprobs
from chorus.server.cluster.cluster_view import NOTHING, counted, total
from chorus.server.cluster.report import Report, model_hash
from chorus.server.cluster.rows import from_row, to_row
from chorus.server.cluster.wire import Malformed


def through_a_frame(data):
    return msgpack.unpackb(msgpack.packb(data))


def test_rows():
    score = TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.5)))
    for output in (
        RequestOutput("a", (5,)),
        RequestOutput("a", (5,), queue_seconds=0.25),
        RequestOutput("a", (5,), FinishReason.LENGTH, num_preemptions=2),
        RequestOutput("a", (), FinishReason.ERROR, error="broken"),
        RequestOutput("a", (5,), FinishReason.STOP, 5, None, None, 3, (score,), (score, score), None, 1.5),
        RequestOutput("a", (5,), was_draft=True),
        RequestOutput("a", (5,), num_rejected_drafts=3),
    ):
        assert from_row(through_a_frame(to_row(output, 4)), None) == (output, 4)


def test_a_row_of_one_token_is_plain_though_its_request_was_preempted():
    for output in (RequestOutput("a", (5,)), RequestOutput("a", (5,), num_preemptions=3)):
        assert to_row(output, 4) == ["a", 4, (5,)]


def test_a_row_of_another_kind_is_refused():
    for more in ({"queued": "x"}, {"queued": []}, 7):
        with pytest.raises(Malformed):
            from_row(["a", 1, [5], more], None)


def test_reports():
    report = Report(replace(NOTHING, num_steps=3, step_sizes=(1, 2, 0), num_step_tokens=20))
    assert Report.from_wire(through_a_frame(report.to_wire())) == report


def test_sums_of_step_sizes_keep_what_a_replica_that_is_gone_had():
    one = replace(NOTHING, step_sizes=(1, 2, 0), num_step_tokens=20, num_running=4)
    other = replace(NOTHING, step_sizes=(0, 5, 7), num_step_tokens=300)
    assert counted(one).step_sizes == one.step_sizes and counted(one).num_running == 0
    both = total([counted(one), other])
    assert both.step_sizes == (1, 7, 7) and both.num_step_tokens == 320
    assert total([]).step_sizes == ()


def test_a_models_hash_is_of_the_form_of_its_weights_too(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    seen = {model_hash(tmp_path)}
    for name in ("config.json", "quantize_config.json", "hf_quant_config.json"):
        for bits in (4, 8):
            (tmp_path / name).write_text(f'{{"bits": {bits}}}')
            seen |= {model_hash(tmp_path), model_hash(tmp_path, dummy=True)}
    assert len(seen) == 13


def test_a_models_hash_is_of_the_kv_caches_dtype_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hashes = {model_hash(tmp_path), model_hash(tmp_path, kv="fp8"), model_hash(tmp_path, form="int8", kv="fp8")}
    assert len(hashes) == 3
