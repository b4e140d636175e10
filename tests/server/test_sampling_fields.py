"""Every sampling field reaches the engine, in both kinds of call; stop strings as vLLM means them."""

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(params=[COMPLETIONS, CHAT])
def ask(request, shared):
    """Asks the base model in one of the two ways; returns the engine's parameters."""

    def post(**body):
        prompt = {"prompt": "hi"} if request.param == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
        shared.engine.asked.clear()
        response = shared.post(request.param, model="base", max_tokens=9, **prompt, **body)
        assert response.status_code == 200, response.text
        return [asked.params for asked in shared.engine.asked]

    return post


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("min_p", 0.25, 0.25),
        ("presence_penalty", -1.5, -1.5),
        ("frequency_penalty", 1, 1.0),
        ("repetition_penalty", 1.2, 1.2),
        ("logit_bias", {"5": -100, "007": 3.5}, {5: -100.0, 7: 3.5}),
        ("min_tokens", 9, 9),
        ("ignore_eos", True, True),
        ("stop_token_ids", [1, 2], (1, 2)),
        ("prompt_logprobs", 3, 3),
        ("top_k", -1, 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_reaches_the_engine(ask, field, value, expected, stream):
    (params,) = ask(stream=stream, **{field: value})
    assert getattr(params, field) == expected
    (params,) = ask(stream=stream, **{field: None})
    assert getattr(params, field) == getattr(type(params)(), field)


def test_bad_words_become_token_sequences(ask):
    (params,) = ask(bad_words=["no", " no", "é"])
    assert params.bad_words == (tuple(b"no"), tuple("é".encode())), "a space is a token of its own here"


def test_bad_words_in_vocabularies_with_words(tokenizer):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from chorus.server.text.tokenizer import Tokenizer

    vocab = {"b": 0, "a": 1, "d": 2, "Ġ": 3, "Ġb": 4, "ba": 5, "bad": 6}
    backend = Backend(models.BPE(vocab=vocab, merges=[("Ġ", "b"), ("b", "a"), ("ba", "d")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrapped = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert wrapped.bad_words(["bad", "  bad"]) == ((6,), (4, 1, 2))
    assert wrapped.bad_words([" "]) == ((3,),)
    assert wrapped.bad_words(["€"]) == (), "what has no tokens can't be said, and a space is no part of it"


def test_stop_strings_are_kept_when_asked_for(shared, read_events):
    body = {"model": "base", "prompt": "one, two, three", "stop": ["two", "zzz"], "include_stop_str_in_output": True}
    assert shared.post(**body).json()["choices"][0]["text"] == "one, two"
    chunks = read_events(shared.post(**body, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one, two"
    body |= {"stop": [], "stop_token_ids": [ord(",")]}
    assert shared.post(**body).json()["choices"][0]["text"] == "one,"


def test_a_stop_string_ends_with_its_token_wherever_it_begins(shared):
    """Tokens 258 and 259 are ` €!` cut within the euro sign."""
    prompt = [97, 258, 259, 98]
    for stop, text in ((" €", "a"), ("€!b", "a "), ("!", "a €")):
        choice = shared.post(model="base", prompt=prompt, stop=stop).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (1, "a"), (2, "abXa"), (4, "abXa"), (5, "abXabX")],
)
def test_stop_strings_wait_for_min_tokens(shared, read_events, min_tokens, text):
    """The stop string ends with the second or the fifth token."""
    body = {"model": "base", "prompt": "abXabX", "stop": ["b"], "min_tokens": min_tokens}
    assert shared.post(**body).json()["choices"][0]["text"] == text
    chunks = read_events(shared.post(**body, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_a_stop_string_may_begin_within_min_tokens(tokenizer):
    def pushed(text: bytes) -> list[str]:
        return [stream.push(byte) for byte in text]

    stream = tokenizer.text_stream(["bX"], min_tokens=2)
    assert pushed(b"abXab") == ["a", "", "", "", ""]
    stream = tokenizer.text_stream(["ab"], min_tokens=2)
    assert "".join(pushed(b"abXabX")) == "abX"
    stream = tokenizer.text_stream(["END"], min_tokens=4)
    assert pushed(b"ENDEND") == ["", "", "END", "", "", ""]
    assert stream.stopped_by == "END"


def test_a_mass_of_nothing_is_the_likeliest_token_as_at_openai(ask):
    (params,) = ask(top_p=0)
    assert 0 < params.top_p <= 1e-9


def test_an_empty_stop_string_stops_nothing(shared):
    choice = shared.post(model="base", prompt="ab", stop="").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
