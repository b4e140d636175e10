"""Log-probabilities, choices and echoes of a real engine on a tiny model, asked by the OpenAI client."""

import openai
import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def client(start, reference):
    engine = Engine.from_config(
        EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    )
    for name in ("r2-qv", "r8-attention"):
        engine.store.register(name, reference.adapters[name])
    live = start(engine)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def scores(reference, adapter, tokens):
    """Log-probabilities `[len(tokens), vocab]` of the token after each."""
    return torch.log_softmax(reference.logits(adapter, tokens), -1)


def test_completion_logprobs_are_those_of_transformers(client, reference, tokenizer):
    prompt = reference.prompt("r2-qv", 9, 6, 1)
    answer = client.completions.create(
        model="r2-qv",
        prompt=prompt,
        max_tokens=6,
        temperature=0,
        logprobs=3,
        echo=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    tokens = [*prompt, *choice.token_ids]
    assert choice.token_ids == reference.greedy("r2-qv", prompt, 6)
    expected = scores(reference, "r2-qv", tokens)
    names = [tokenizer.vocabulary.name_of(token) for token in tokens]
    assert choice.logprobs.tokens == names and choice.logprobs.token_logprobs[0] is None
    for at in range(1, len(tokens)):
        assert choice.logprobs.token_logprobs[at] == pytest.approx(float(expected[at - 1, tokens[at]]), abs=TOLERANCE)
        best = expected[at - 1].topk(3)
        wanted = {
            tokenizer.vocabulary.name_of(i): v for i, v in zip(*map(torch.Tensor.tolist, best[::-1]), strict=True)
        }
        wanted[names[at]] = float(expected[at - 1, tokens[at]])
        assert choice.logprobs.top_logprobs[at] == pytest.approx(wanted, abs=TOLERANCE)
    offsets = choice.logprobs.text_offset
    assert len(offsets) == len(tokens) and offsets == sorted(offsets) and offsets[-1] <= len(choice.text)


def test_prompt_logprobs_are_those_of_transformers(client, reference):
    prompt = reference.prompt("r8-attention", 9, 1, 1)
    answer = client.completions.create(
        model="r8-attention", prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    expected = scores(reference, "r8-attention", prompt)
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None and len(rest) == len(prompt) - 1
    for at, entry in enumerate(rest):
        token = str(prompt[at + 1])
        assert entry[token]["logprob"] == pytest.approx(float(expected[at, prompt[at + 1]]), abs=TOLERANCE)
        best = [str(i) for i in expected[at].topk(2).indices.tolist()]
        assert set(entry) == {token, *best} and [entry[i]["rank"] for i in best] == [1, 2]


def test_chat_logprobs(client):
    messages = [{"role": "user", "content": "hi"}]
    options = {"max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    answer = client.chat.completions.create(model="r2-qv", messages=messages, **options)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 4 and entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token, "greedy"
        assert sorted((top.logprob for top in entry.top_logprobs), reverse=True) == [
            t.logprob for t in entry.top_logprobs
        ]
    streamed = []
    for chunk in client.chat.completions.create(model="r2-qv", messages=messages, stream=True, **options):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_seeded_choices_can_be_had_again(client):
    def ask(**more):
        body = {"model": "base", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 1.0, **more}
        answer = client.completions.create(**body, extra_body={"return_token_ids": True, "ignore_eos": True})
        return [choice.token_ids for choice in answer.choices]

    three = ask(n=3, seed=41)
    assert len({tuple(tokens) for tokens in three}) == 3
    assert ask(n=3, seed=41) == three
    assert [ask(seed=41 + index)[0] for index in range(3)] == three
    assert ask(n=2, seed=42) == three[1:]


def test_penalties_biases_and_bad_words_change_what_is_said(client, reference):
    prompt = reference.prompt(None, 9, 6, 2)

    def ask(**more):
        body = {"ignore_eos": True, "return_token_ids": True, **more}
        answer = client.completions.create(model="base", prompt=prompt, max_tokens=6, temperature=0, extra_body=body)
        return answer.choices[0].token_ids

    plain = ask()
    assert plain == reference.greedy(None, prompt, 6)
    assert ask(logit_bias={"77": 100}) == [77] * 6
    assert plain[0] not in ask(logit_bias={str(plain[0]): -100})
    assert len(set(ask(logit_bias={"77": 30, "78": 30}, frequency_penalty=2))) > 1
    allowed = {str(token): 100 for token in (97, 98)}
    assert ask(logit_bias=allowed, bad_words=["a"]) == [98] * 6
    assert ask(logit_bias=allowed, bad_words=["bb", "a"])[:1] == [98]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(logit_bias={"300": 1})
    assert caught.value.param == "logit_bias"


def test_a_repeated_prompt_is_partly_cached(client):
    prompt = [*range(5, 69)]
    first, second = (client.completions.create(model="r2-qv", prompt=prompt, max_tokens=1).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.prompt_tokens_details.cached_tokens < 64
    assert (
        client.completions.create(model="base", prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens
        == 0
    )
