"""TRL's client of a generation server: its completions, chats and scores are the model's own."""

import math

import pytest

pytest.importorskip("trl")
from transformers import AutoTokenizer
from trl.generation import vllm_client

from chorus.server.demo.builtin import BUILTIN_MODEL

from .recorded import SAYS_CALL, TOOL, USER

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """It asks for an installed vLLM, which it needs only to write weights into a server."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUILTIN_MODEL)


def test_completions_of_texts_and_of_tokens(builtin, tokenizer):
    """The built-in model repeats its input; tokens and log-probabilities come for each prompt, n of each."""
    client = vllm_client.VLLMClient(base_url=builtin.url)
    prompts = ["abc\n", "hello\n"]
    made = client.generate(prompts, n=2, temperature=0.01, max_tokens=8)
    ids = tokenizer(prompts).input_ids
    assert made["prompt_ids"] == ids
    texts = [tokenizer.decode(each, skip_special_tokens=True) for each in made["completion_ids"]]
    assert [text.strip() for text in texts] == ["abc", "abc", "hello", "hello"]
    assert [len(each) for each in made["logprobs"]] == [len(each) for each in made["completion_ids"]]
    by_ids = client.generate(ids, n=1, temperature=0.01, max_tokens=8, logprobs=3)
    assert by_ids["completion_ids"] == made["completion_ids"][::2]
    assert all(3 <= len(each) <= 4 for one in by_ids["logprobs"] for each in one)


def test_a_regular_expression(builtin, tokenizer):
    client = vllm_client.VLLMClient(base_url=builtin.url)
    made = client.generate(["abc\n"], structured_outputs_regex="[0-9]{3}", max_tokens=8)
    assert tokenizer.decode(made["completion_ids"][0], skip_special_tokens=True).isdigit()


def test_scores_of_sequences(builtin, tokenizer, scores_of):
    """As distillation asks its teacher."""
    (ids,) = tokenizer(["abc\nabc"]).input_ids
    made = vllm_client.VLLMClient(base_url=builtin.url).get_sequence_logprobs([ids], [5], top_logprobs=4)
    actual = [score for (score,) in made["actual_logprobs"][0]]
    assert made["actual_token_ids"][0] == [[token] for token in ids[5:]]
    assert actual == pytest.approx(scores_of("abc\nabc")[4:], abs=0.02)
    assert all(len(each) == 4 and not math.isnan(each[0]) for each in made["logprobs"][0])


def test_the_prefix_cache_is_reset_between_two_steps_of_training(builtin, tokenizer):
    client = vllm_client.VLLMClient(base_url=builtin.url)
    prompt = ["abcdefgh" * 8 + "\n"]
    before = client.generate(prompt, n=1, temperature=0.01, max_tokens=8)["completion_ids"]
    client.reset_prefix_cache()
    assert builtin.worker.stats.num_cached_pages == 0
    assert client.generate(prompt, n=1, temperature=0.01, max_tokens=8)["completion_ids"] == before
    assert client.get_world_size() == 1


def test_why_weights_can_not_be_written_is_told(builtin):
    client = vllm_client.VLLMClient(base_url=builtin.url)
    for path in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        answer = client.session.post(f"{builtin.url}/{path}", json={})
        assert answer.status_code == 501 and "load each version" in answer.json()["error"]["message"]


def test_chats(told):
    """It renders the tools into the prompt, and reads calls from the completion's tokens by itself."""
    told.engine.text = SAYS_CALL
    client = vllm_client.VLLMClient(base_url=told.url)
    made = client.chat([USER], tools=[TOOL], max_tokens=500)
    assert bytes(token for token in made["completion_ids"][0] if token < 256).decode() == SAYS_CALL
    assert bytes(token for token in made["prompt_ids"][0] if token < 256).decode() == told.engine.prompt
    assert "weather," in told.engine.prompt
    assert [len(each) for each in made["logprobs"]] == [len(each) for each in made["completion_ids"]]
