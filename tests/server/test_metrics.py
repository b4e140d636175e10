"""GET /metrics."""


def test_metrics(start, fake_engine):
    live = start(fake_engine)
    live.post(model="alice", prompt="abc")
    live.post(model="base", prompt="abcdef", max_tokens=2)
    live.post(model="nobody", prompt="abc")
    text = live.client.get("/metrics").text
    lines = text.splitlines()
    assert 'chorus_requests_total{finish_reason="stop",model="alice"} 1.0' in lines
    assert 'chorus_requests_total{finish_reason="length",model="base"} 1.0' in lines
    assert 'chorus_generated_tokens_total{model="alice"} 4.0' in lines
    assert 'chorus_prompt_tokens_total{model="base"} 7.0' in lines
    assert "chorus_steps_total 6.0" in lines
    assert 'chorus_pages{kind="free"} 100.0' in lines
    assert "chorus_last_step_adapters 0.0" in lines
    assert "chorus_time_to_first_token_seconds_count 2.0" in lines
    assert "chorus_inter_token_latency_seconds_count 4.0" in lines
    assert "chorus_request_seconds_count 2.0" in lines
    assert "nobody" not in text
