"""lm-eval's models for completions and chats: scores of text by the server's own tokenizer, answers up to a stop."""

import pytest

from .recorded import ANSWER

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

pytestmark = pytest.mark.integration


def asked(kind, *given):
    return [Instance(kind, {}, arguments, index) for index, arguments in enumerate(given)]


@pytest.fixture
def completions(builtin):
    model = builtin.client.get("/v1/models").json()["data"][0]["id"]
    how = {"base_url": f"{builtin.url}/v1/completions", "model": model, "tokenizer_backend": "remote"}
    return LocalCompletionsAPI(**how, num_concurrent=1, max_length=512)


@pytest.mark.parametrize("begin", ["", "<|bos|>"])
def test_scores_of_choices(completions, scores_of, begin):
    """As tasks with several choices are answered: the sum of a choice's log-probabilities, and if it is the likeliest.

    Its remote tokenizer adds no begin token, so a model that needs one is asked with its text.
    """
    context, choices = "abc\na", ("bc", "yz")
    given = ((begin + context, choice) for choice in choices)
    found = completions.loglikelihood(asked("loglikelihood", *given))
    for (score, is_likeliest), choice in zip(found, choices, strict=True):
        scores = scores_of(context + choice, begun=bool(begin))[-len(choice) :]
        assert score == pytest.approx(sum(scores), abs=0.05)
        assert is_likeliest == (choice == "bc") or not begin


def test_scores_of_whole_texts(completions, scores_of):
    (score,) = completions.loglikelihood_rolling(asked("loglikelihood_rolling", ("abc\nabc",)))
    assert score == pytest.approx(sum(scores_of("abc\nabc")), abs=0.05)


def test_answers_of_completions(completions):
    until = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
    assert completions.generate_until(asked("generate_until", ("<|bos|>hello\n", until))) == ["hello"]


def test_answers_of_chats(told):
    told.engine.text = ANSWER
    model = LocalChatCompletion(base_url=f"{told.url}/v1/chat/completions", model="base", num_concurrent=1)
    until = {"until": ["Paris"], "max_gen_toks": 99}
    turns = model.apply_chat_template([{"role": "user", "content": "Weather?"}])
    assert model.generate_until(asked("generate_until", (turns, until))) == [ANSWER.partition("Paris")[0]]
