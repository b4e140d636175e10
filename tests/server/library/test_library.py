"""`LLM` as programs use it, on the built-in model."""

import asyncio
import json
import re
import sys
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

import chorus
from chorus import LLM, InvalidRequest, SamplingParams
from chorus.memory.adapters.store import UnknownAdapter
from chorus.memory.files.error import AdapterFormatError
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.errors import EngineUnavailable, GenerationFailed
from chorus.server.library.absent import ABSENT

GREEDY = SamplingParams(temperature=0, max_tokens=40)
CHAT = GREEDY.replace(add_special_tokens=True)  # the built-in model's prompts begin with a special token
TEXT = "quiet river"
PROMPT = f"{TEXT}\n"


@pytest.fixture(scope="module")
def llm():
    with LLM(memory_bytes=8 << 20, threads=1, keep_versions=2) as llm:
        own = llm.tokenizer._tokenizer  # noqa: SLF001 - the built-in model has no chat template
        own.chat_template = "{{ messages[-1].content + '\\n' }}"
        yield llm


# --- prompts and conversations


def test_every_form_of_a_prompt_gives_the_same_answer(llm):
    one = llm.generate(PROMPT, GREEDY, adapter="reverse")
    ids = list(one.prompt_token_ids)
    assert one.text == TEXT[::-1] and one.adapter.startswith("reverse@")
    for form in (ids, tuple(ids), {"prompt": PROMPT}, {"prompt_token_ids": ids}):
        assert llm.generate(form, GREEDY, adapter="reverse") == one
        assert llm.generate([form, PROMPT], GREEDY, adapter="reverse") == [one, one]


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (None, "prompts"),
        (5, "prompts"),
        ([None], "prompts[0]"),
        (["a", 5], "prompts[1]"),
        (["a", [True]], "prompts[1]"),
        ({"prompt": 5}, "prompts.prompt"),
        ({"prompt_token_ids": "a"}, "prompts.prompt_token_ids"),
        ({"promptt": "a"}, "prompts.promptt"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], "prompts[0]"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompts.multi_modal_data"),
    ],
)
def test_other_prompts_are_refused_by_name(llm, prompts, field):
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(prompts, GREEDY)
    assert refused.value.field == field and "\n" not in str(refused.value)


def test_a_list_of_conversations_gives_a_list(llm):
    conversation = [{"role": "user", "content": TEXT}]
    one = llm.chat(conversation, CHAT, "reverse")
    assert one.text == TEXT[::-1], "the template shows the content alone"
    two = llm.chat([conversation, [{"role": "user", "content": "ab"}]], CHAT, ["reverse", "upper"])
    assert [answer.text for answer in two] == [TEXT[::-1], "AB"]
    assert llm.chat([], CHAT) == []


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "a"}, [["hello"]], ["hello"], [5], None])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat(messages, CHAT)


def test_messages_stay_the_caller_s_own(llm):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": [call]},
        {"role": "user", "content": TEXT},
    ]
    before = json.dumps(messages)
    llm.chat(messages, CHAT)
    assert json.dumps(messages) == before


# --- parameters


def test_prompt_logprobs_come_back(llm):
    answer = llm.generate(PROMPT, GREEDY.replace(prompt_logprobs=2), adapter="reverse")
    first, *others = answer.prompt_logprobs
    assert first is None and len(others) == len(answer.prompt_token_ids) - 1
    assert [one.token_id for one in others] == list(answer.prompt_token_ids[1:])


def test_several_answers_to_one_prompt(llm):
    answer = llm.generate(PROMPT, SamplingParams(n=3, temperature=2.0, seed=4, max_tokens=8))
    assert len(answer.choices) == 3 and answer.choices[0].text == answer.text
    alone = [llm.generate(PROMPT, SamplingParams(temperature=2.0, seed=4 + i, max_tokens=8)).text for i in range(3)]
    assert [one.text for one in answer.choices] == alone


def test_structured_output_by_each_name(llm):
    params = {"temperature": 0, "max_tokens": 40}
    assert set(llm.generate("x\n", SamplingParams(regex="[ab]{3}", **params)).text) <= {"a", "b"}
    assert llm.generate("x\n", SamplingParams(choice=["yes", "no"], **params)).text in ("yes", "no")
    assert llm.generate("x\n", SamplingParams(grammar='start: "q" "r"', **params)).text == "qr"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(llm.generate("x\n", SamplingParams(json=schema, **params)).text) == {"a": 1}
    with pytest.raises(InvalidRequest, match=r"prompt 0: regex can't be enforced"):
        llm.generate("x\n", SamplingParams(regex="(", **params))


def test_the_rest_of_the_fields_is_obeyed(llm):
    whole = llm.generate(PROMPT, GREEDY)
    words = llm.generate(PROMPT, GREEDY.replace(bad_words=["river"]))
    assert whole.text == TEXT and "river" not in words.text
    stopped = llm.generate(PROMPT, GREEDY.replace(stop="river", include_stop_str_in_output=True))
    assert (stopped.text, stopped.stop_reason) == (TEXT, "river")
    assert llm.generate(PROMPT, GREEDY, stop=["river"]).text == "quiet "
    assert llm.generate(PROMPT, GREEDY.replace(echo=True)).text == PROMPT + TEXT
    token = whole.token_ids[2]
    cut = llm.generate(PROMPT, GREEDY.replace(stop_token_ids=[token]))
    assert cut.token_ids == whole.token_ids[:3] and cut.stop_reason == token
    assert len(llm.generate(PROMPT, GREEDY.replace(min_tokens=20)).token_ids) >= 20
    cut = llm.generate(PROMPT, GREEDY.replace(truncate_prompt_tokens=3))
    assert cut.prompt_token_ids == whole.prompt_token_ids[-3:]
    only = llm.generate(PROMPT, GREEDY.replace(allowed_token_ids=[token], max_tokens=3))
    assert only.token_ids == (token,) * 3
    with pytest.raises(InvalidRequest, match="given twice"):
        llm.generate(PROMPT, GREEDY.replace(stop="a"), stop="b")


def test_fields_of_chat_are_refused_for_prompts_and_limits_are_the_server_s(llm):
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest, match="prompt 0: tools is not supported"):
        llm.generate(PROMPT, SamplingParams(tools=tools))
    with pytest.raises(InvalidRequest, match="logprobs is 30, this server returns at most 20"):
        llm.generate(PROMPT, SamplingParams(logprobs=30))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sampling_params": GREEDY}, "it is called params"),
        ({"temperature": 0}, "params=SamplingParams\\(temperature=…\\)"),
        ({"lora_request": "reverse"}, "adapter="),
        (
            {"lora_request": SimpleNamespace(lora_name="legal", lora_int_id=1, lora_path="/data/legal")},
            r"call load_adapter\('legal', '/data/legal'\) once, and give adapter='legal'",
        ),
        ({"use_tqdm": print}, "use_tqdm is .*; it must be True, False or None"),
        ({"adaptor": "reverse"}, "did you mean adapter?"),
        ({"params": {"temperature": 0}}, "params must be SamplingParams"),
        ({"params": [GREEDY, 5]}, "2 params for 1 prompts"),
        ({"adapter": 5}, "adapter must be an adapter's name"),
        ({"adapter": "revers"}, "prompt 0: there is no adapter 'revers'; did you mean 'reverse'?"),
    ],
)
def test_wrong_arguments_are_told_by_name(llm, arguments, words):
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(PROMPT, **arguments)


def test_a_bar_shows_how_many_prompts_have_ended(llm, capsys, monkeypatch):
    answers = llm.generate([PROMPT] * 3, GREEDY, adapter="reverse", use_tqdm=True)
    assert "3/3" in capsys.readouterr().err and [one.text for one in answers] == [TEXT[::-1]] * 3
    llm.generate([PROMPT] * 3, GREEDY, adapter="reverse")
    assert capsys.readouterr().err == "", "a file gets no bar unless it is asked for"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    llm.chat([[{"role": "user", "content": TEXT}]] * 2, CHAT, "reverse")
    assert "2/2" in capsys.readouterr().err
    llm.generate(PROMPT, GREEDY, adapter="reverse")
    llm.generate([PROMPT] * 3, GREEDY, adapter="reverse", use_tqdm=False)
    assert capsys.readouterr().err == "", "one prompt needs none"


def test_the_tokenizer_is_transformers_and_the_caller_s_own(llm):
    its = llm.get_tokenizer()
    assert isinstance(its, PreTrainedTokenizerBase)
    ids = its(PROMPT, add_special_tokens=False, truncation=True, max_length=4)["input_ids"]
    assert len(ids) == 4, "its state is its own: the engine's tokenizer goes on without truncation"
    answer = llm.generate(PROMPT, GREEDY, adapter="reverse")
    assert answer.text == TEXT[::-1] and list(answer.prompt_token_ids)[-len(PROMPT) :][:4] == ids


def test_every_error_is_exported(llm):
    """A program catches them without knowing where they are defined."""
    for name in chorus.__all__:
        assert getattr(chorus, name) is not None and name in dir(chorus)
    with pytest.raises(chorus.UnknownAdapter):
        llm.adapter("nobody")
    with pytest.raises(chorus.LaunchError):
        LLM("/nowhere/model")
    with pytest.raises(chorus.InvalidRequest):
        llm.generate(PROMPT, SamplingParams(logprobs=30))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memry_bytes": 1}, "did you mean memory_bytes?"),
        ({"memory_bytes": "much"}, "memory_bytes"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"port": 80}, "only has a meaning for chorus serve"),
        ({"trust_remote_code": True}, "code of a model is never run"),
    ],
)
def test_wrong_options_are_told_in_one_line(options, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        LLM(**options)
    assert "\n" not in str(refused.value) and "pydantic" not in str(refused.value)


# --- streams and event loops


def test_a_stream_is_read_with_and_without_an_event_loop(llm):
    stream = llm.stream(PROMPT, GREEDY.replace(logprobs=1), adapter="reverse")
    with pytest.raises(GenerationFailed, match="not been read"):
        _ = stream.completion
    pieces = list(stream)
    assert "".join(pieces) == TEXT[::-1] and len(pieces) > 2
    assert stream.completion == llm.generate(PROMPT, GREEDY.replace(logprobs=1), adapter="reverse")

    async def read():
        return [piece async for piece in llm.stream_chat([{"role": "user", "content": TEXT}], CHAT, "reverse")]

    assert asyncio.run(read()) == pieces


def test_a_stream_left_early_ends_its_request(llm):
    for _ in llm.stream(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True, temperature=0), "reverse"):
        break
    for _ in range(500):
        if not llm.adapter("reverse").references:
            return
        llm.generate(PROMPT, GREEDY)
    raise AssertionError("the request goes on")


def test_several_coroutines_share_the_engine(llm):
    async def ask():
        return await asyncio.gather(
            llm.agenerate(PROMPT, GREEDY, "reverse"),
            llm.agenerate([PROMPT] * 2, GREEDY, ["upper", None]),
            llm.achat([{"role": "user", "content": TEXT}], CHAT, "reverse"),
        )

    one, (upper, base), chat = asyncio.run(ask())
    assert (one.text, upper.text, base.text, chat.text) == (TEXT[::-1], TEXT.upper(), TEXT, TEXT[::-1])


def test_streams_have_one_answer(llm):
    for ask in (lambda: llm.stream([PROMPT]), lambda: llm.stream(PROMPT, SamplingParams(n=2))):
        with pytest.raises(InvalidRequest, match="a stream has one"):
            ask()


# --- adapters


def files_of(name):
    directory = BUILTIN_ADAPTERS / name
    return json.loads((directory / "adapter_config.json").read_text()), directory / "adapter_model.safetensors"


def test_adapters_come_as_bytes_and_as_tensors(llm):
    config, weights = files_of("upper")
    first = llm.load_adapter("sent", config=config, weights=weights.read_bytes())
    assert llm.generate(PROMPT, GREEDY, "sent").text == TEXT.upper()
    config, weights = files_of("reverse")
    second = llm.load_adapter("sent", config=json.dumps(config), weights=load_file(weights))
    assert llm.generate(PROMPT, GREEDY, "sent").text == TEXT[::-1]
    assert first != second and llm.generate(PROMPT, GREEDY, first).text == TEXT.upper(), "two versions are kept"
    assert {"sent", first} <= set(llm.adapters)
    llm.unload_adapter(first)
    llm.unload_adapter("sent")
    assert not {"sent", first} & set(llm.adapters)


def test_versions_have_labels_and_pins(llm):
    assert llm.load_adapter("v@one", BUILTIN_ADAPTERS / "upper", pinned=True) == "v@one"
    assert llm.adapter("v").pinned and llm.adapter("v").tier == "device"
    llm.unpin_adapter("v")
    assert not llm.adapter("v").pinned
    with pytest.raises(FileExistsError):
        llm.load_adapter("v@one", BUILTIN_ADAPTERS / "reverse")
    with pytest.raises(FileExistsError):
        llm.load_adapter("v", BUILTIN_ADAPTERS / "reverse", replace=False)
    llm.pause_adapter("v")
    with pytest.raises(InvalidRequest, match="paused"):
        llm.generate(PROMPT, GREEDY, "v")
    llm.pause_adapter("v", paused=False)
    assert llm.generate(PROMPT, GREEDY, "v").text == TEXT.upper()
    llm.unload_adapter("v")
    for act in (llm.unload_adapter, llm.pin_adapter, llm.unpin_adapter, llm.pause_adapter, llm.adapter):
        with pytest.raises(UnknownAdapter, match=r"there is no adapter 'revers'; did you mean 'reverse'\?"):
            act("revers")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"name": "a"}, "path"),
        ({"name": "a", "path": "x", "config": {}}, "path"),
        ({"name": "a", "weights": b""}, "config"),
        ({"name": "a", "config": {}}, "weights"),
        ({"name": "a", "config": 5, "weights": b""}, "config"),
        ({"name": "a", "config": {}, "weights": {"x": "y"}}, "weights"),
        ({"name": "a", "config": {}, "weights": 5}, "weights"),
        ({"name": "../a", "path": "x"}, "name"),
        ({"name": "a@b c", "path": "x"}, "name"),
        ({"name": "a", "path": "x", "keep_versions": 0}, "keep_versions"),
    ],
)
def test_a_wrong_load_names_the_argument(llm, arguments, field):
    with pytest.raises(InvalidRequest) as refused:
        llm.load_adapter(**arguments)
    assert refused.value.field == field


def test_bytes_that_are_no_adapter_are_refused(llm):
    with pytest.raises(AdapterFormatError):
        llm.load_adapter("broken", config={}, weights=b"x")
    assert "broken" not in llm.adapters


def test_a_closed_one_says_so(tmp_path):
    llm = LLM(BUILTIN_MODEL, memory_bytes=8 << 20, threads=1)
    llm.close()
    llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate(PROMPT)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("beam_search", "ask for n choices"),
        ("sleep", "close() frees the memory"),
        ("wake_up", "POST /wake_up"),
        ("get_metrics", "GET /metrics"),
        ("collective_rpc", "no methods of workers can be called"),
    ],
)
def test_methods_of_vllms_class_answer_by_name(llm, name, advice):
    with pytest.raises(AttributeError, match=f"LLM has no attribute '{name}'; .*{re.escape(advice)}") as caught:
        getattr(llm, name)
    assert caught.value.name == name and not hasattr(llm, name)
    with pytest.raises(AttributeError, match=r"LLM has no attribute 'surprise'$"):
        getattr(llm, "surprise")  # noqa: B009
    assert not any(hasattr(LLM, each) for each in ABSENT), "what it has is not told as absent"
