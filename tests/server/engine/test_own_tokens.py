"""Adapters whose tokenizer has tokens that the base model's lacks: prompts, answers and ends are those of transformers
with PEFT and the adapter's own tokenizer.
"""

from __future__ import annotations

import base64
import json
import shutil

import httpx
import pytest

from chorus import LLM, SamplingParams
from chorus.core.requests.request_params import InvalidRequest
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.settings import Settings
from chorus.server.start.launch import build_app, serving

from ..own_tokens import COUNT, Reference, save_own

pytestmark = pytest.mark.wide

SMALL = {"memory_bytes": 8 << 20, "threads": 1}
TEXT = "quiet <tool> river<end>"
USER = [{"role": "user", "content": "quiet river"}]
VOCAB = json.loads((BUILTIN_MODEL / "config.json").read_text())["vocab_size"]
GREEDY = {"temperature": 0, "max_tokens": COUNT}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """`own` and `twin` with the same tokens and other weights, `beyond` with tokens beyond the base model's vocabulary,
    and `upper` with the base model's tokenizer.
    """
    directory = tmp_path_factory.mktemp("adapters")
    ids = save_own(directory / "own")
    assert ids == {"<tool>": 260, "<end>": 259, "<plain>": 261}
    save_own(directory / "twin", 1)
    assert min(save_own(directory / "beyond", beyond=True).values()) == VOCAB
    shutil.copytree(BUILTIN_ADAPTERS / "upper", directory / "upper")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, directory / "upper")
    return directory


@pytest.fixture(scope="module")
def llm(adapters):
    with LLM(BUILTIN_MODEL, adapters=adapters, adapter_chat_templates=True, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module", params=["own", "twin", "beyond"])
def reference(adapters, request):
    found = Reference(adapters / request.param)
    found.name = request.param
    return found


def test_prompts_and_answers_are_those_of_its_own_tokenizer(llm, reference):
    ids = reference.tokenizer(TEXT)["input_ids"]
    assert {reference.end, reference.tool} <= set(ids) and ids != llm.tokenizer.encode_now([TEXT])[0]
    expected = reference.answer(ids)
    for skip in (True, False):
        params = SamplingParams(**GREEDY, add_special_tokens=True, skip_special_tokens=skip)
        answer = llm.generate(TEXT, params, adapter=reference.name)
        assert (list(answer.prompt_token_ids), list(answer.token_ids)) == (ids, expected)
        text = expected[:-1] if expected[-1] in (258, reference.end) else expected
        assert answer.text == reference.tokenizer.decode(text, skip_special_tokens=skip)
        assert "".join(llm.stream(TEXT, params, adapter=reference.name)) == answer.text


def test_conversations_are_written_by_its_template(llm, reference):
    ids = reference.tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    answer = llm.chat(USER, SamplingParams(**GREEDY), adapter=reference.name)
    assert (list(answer.prompt_token_ids), list(answer.token_ids)) == (ids, reference.answer(ids))


def test_a_client_s_text_has_no_special_tokens_in_a_conversation(llm):
    said = [{"role": "user", "content": "a<tool>b<plain>"}]
    ids = llm.chat(said, SamplingParams(max_tokens=1), adapter="own").prompt_token_ids
    assert ids.count(260) == 2 and ids.count(261) == 1


@pytest.mark.wide
def test_its_end_of_sequence_ends_its_answers_and_no_one_else_s(llm, adapters):
    reference = Reference(adapters / "own")
    encoded = {text: reference.tokenizer(text)["input_ids"] for text in map(chr, range(33, 127))}
    ends = [text for text, ids in encoded.items() if reference.answer(ids)[-1] == 259]
    assert ends
    params = SamplingParams(**GREEDY, add_special_tokens=True)
    answer = llm.generate(ends[0], params, adapter="own")
    assert answer.token_ids[-1] == 259 and (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert "<end>" not in answer.text
    longer = llm.generate(ends[0], SamplingParams(**GREEDY, ignore_eos=True), adapter="own")
    assert len(longer.token_ids) == GREEDY["max_tokens"]
    asked = SamplingParams(**GREEDY, add_special_tokens=True, stop_token_ids=[259])
    assert llm.generate(ends[0], asked, adapter="own").stop_reason == 259


def test_others_keep_the_base_model_s(llm):
    plain = tuple(llm.tokenizer.encode_now([TEXT])[0])
    params = SamplingParams(**GREEDY, add_special_tokens=True)
    mixed = llm.generate([TEXT] * 3, params, adapter=["own", None, "upper"])
    assert [one.prompt_token_ids == plain for one in mixed] == [False, True, True]
    assert [one.text for one in mixed[1:]] == [
        llm.generate(TEXT, params, adapter=name).text for name in (None, "upper")
    ]


def test_adapters_of_equal_tokens_share_a_tokenizer_and_the_vocabulary(llm):
    tokenizers = llm._asking.builder.tokenizers  # noqa: SLF001
    llm.generate([TEXT] * 2, SamplingParams(max_tokens=1), adapter=["own", "twin"])
    digests = {llm._worker.adapters.version_of(name).manifest.tokens.digest for name in ("own", "twin")}  # noqa: SLF001
    assert len(digests) == 1 and digests <= tokenizers._with_tokens.keys()  # noqa: SLF001


def test_log_probabilities_name_its_tokens(llm):
    params = SamplingParams(max_tokens=1, logprobs=1, logit_bias={"261": 100.0})
    answer = llm.generate(TEXT, params, adapter="own")
    assert answer.token_ids == (261,) and answer.text == "<plain>"


def test_grammars_without_its_tokens_are_obeyed_and_others_refused(llm):
    answer = llm.generate("x", SamplingParams(temperature=0, regex="[ab]{3}"), adapter="own")
    assert len(answer.text) == 3 and answer.text.strip("ab") == ""
    with pytest.raises(InvalidRequest, match="has '<tool>', a token of the adapter's own, which grammars don't know"):
        llm.generate("x", SamplingParams(regex="<tool>[ab]"), adapter="own")


def test_a_new_version_has_its_own(llm, adapters, tmp_path):
    path = tmp_path / "later"
    shutil.copytree(adapters / "own", path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).unlink()
    params = SamplingParams(max_tokens=1, add_special_tokens=True)
    llm.load_adapter("changing", path)
    plain = llm.tokenizer.encode_now([TEXT])[0]
    assert list(llm.generate(TEXT, params, adapter="changing").prompt_token_ids) == plain
    (path / "added_tokens.json").write_text(json.dumps({"<end>": 259, "<tool>": 260}))
    llm.load_adapter("changing", path)
    assert {259, 260} <= set(llm.generate(TEXT, params, adapter="changing").prompt_token_ids)


def test_composed_ones_are_refused(llm):
    with pytest.raises(InvalidRequest, match="tokenizer with tokens of its own"):
        llm.generate("x", SamplingParams(max_tokens=1), adapter="own*0.5+upper*0.5")


@pytest.fixture(scope="module")
def client(adapters):
    settings = Settings(model=BUILTIN_MODEL, adapters=adapters, **SMALL)
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url) as client:
        yield client


def test_http_counts_and_names_the_same_tokens(client, reference):
    ids = reference.tokenizer(TEXT)["input_ids"]
    asked = {"model": reference.name, "prompt": TEXT}
    told = client.post("/tokenize", json={**asked, "return_token_strs": True}).json()
    assert told["tokens"] == ids and told["token_strs"] == reference.tokenizer.convert_ids_to_tokens(ids)
    back = client.post("/detokenize", json={"model": reference.name, "tokens": ids}).json()
    assert back["prompt"] == reference.tokenizer.decode(ids)
    body = {**asked, **GREEDY, "logprobs": 1, "echo": True, "skip_special_tokens": False}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)
    names = answer["choices"][0]["logprobs"]["tokens"]
    assert names[: len(ids)] == [reference.tokenizer.decode([each]) for each in ids]


def test_a_stream_has_the_whole_answer_s_text(client):
    body = {"model": "own", "prompt": TEXT, **GREEDY, "skip_special_tokens": False}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == whole


def test_an_adapter_of_other_ids_is_refused_when_it_is_loaded(client, adapters, tmp_path):
    path = adapters / "bad"
    shutil.copytree(adapters / "own", path)
    try:
        (path / "added_tokens.json").write_text(json.dumps({"<|eos|>": 262}))
        told = client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(path)})
    finally:
        shutil.rmtree(path)
    assert told.status_code == 400 and "<|eos|>" in told.text


def test_an_adapter_that_a_request_brings_has_its_tokens_at_once(adapters):
    """The prompt is encoded after the adapter was found by a rule."""
    rules = [f"dir/*={adapters}/*"]
    settings = Settings(model=BUILTIN_MODEL, adapter_source=rules, adapter_roots=[adapters], **SMALL)
    ids = Reference(adapters / "own").tokenizer(TEXT)["input_ids"]
    body = {"model": "dir/own", "prompt": TEXT, "max_tokens": 1, "return_token_ids": True}
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url) as client:
        assert client.post("/v1/completions", json=body).json()["choices"][0]["prompt_token_ids"] == ids
        unknown = client.post("/v1/completions", json={**body, "model": "dir/none"})
    assert unknown.status_code == 404


@pytest.mark.parametrize("name", ["own", "beyond"])
def test_an_uploaded_adapter_brings_its_tokenizer(adapters, tmp_path, name):
    """And its template."""
    settings = Settings(model=BUILTIN_MODEL, adapter_uploads=tmp_path, adapter_chat_templates=True, **SMALL)
    it = Reference(adapters / name)
    ids = it.tokenizer(TEXT)["input_ids"]
    files = [("file", (path.name, path.read_bytes())) for path in (adapters / name).iterdir() if path.is_file()]
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url) as client:
        told = client.post("/v1/load_lora_adapter", data={"lora_name": "sent"}, files=files)
        assert told.status_code == 200, told.text
        body = {"model": "sent", "prompt": TEXT, **GREEDY, "return_token_ids": True}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, it.answer(ids))
        chat = client.post("/tokenize", json={"model": "sent", "messages": USER}).json()["tokens"]
    assert chat == it.tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]


def test_an_uploaded_file_that_no_adapter_has_is_named(adapters, tmp_path):
    """A model's card is in every folder; whatever else is there would be of no effect."""
    settings = Settings(model=BUILTIN_MODEL, adapter_uploads=tmp_path, **SMALL)
    files = [("file", (path.name, path.read_bytes())) for path in (adapters / "own").iterdir() if path.is_file()]
    files = [*(each for each in files if each[1][0] != "README.md"), ("file", ("README.md", b"# A card"))]
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url) as client:
        more = [*files, ("file", ("optimizer.pt", b"x"))]
        told = client.post("/v1/load_lora_adapter", data={"lora_name": "sent"}, files=more)
        assert told.status_code == 400
        assert told.json()["error"]["message"] == "'optimizer.pt' is no file of an adapter; leave it out"
        assert client.post("/v1/load_lora_adapter", data={"lora_name": "sent"}, files=files).status_code == 200


ITS_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def in_json(directory, **changed):
    files = {each: (directory / each).read_bytes() for each in ITS_FILES}
    weights = (directory / "adapter_model.safetensors").read_bytes()
    encoded = {each: base64.b64encode(data).decode() for each, data in {**files, "adapter_model": weights}.items()}
    config = json.loads((directory / "adapter_config.json").read_bytes())
    return {"lora_name": "sent", "adapter_config": config, **encoded, **changed}


@pytest.mark.parametrize("name", ["own", "beyond"])
def test_an_adapter_in_json_brings_its_tokenizer(adapters, tmp_path, name):
    """And its template."""
    settings = Settings(model=BUILTIN_MODEL, adapter_uploads=tmp_path, adapter_chat_templates=True, **SMALL)
    it = Reference(adapters / name)
    ids = it.tokenizer(TEXT)["input_ids"]
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url) as client:
        told = client.post("/v1/load_lora_adapter", json=in_json(adapters / name))
        assert told.status_code == 200, told.text
        body = {"model": "sent", "prompt": TEXT, **GREEDY, "return_token_ids": True}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, it.answer(ids))
        chat = client.post("/tokenize", json={"model": "sent", "messages": USER}).json()["tokens"]
    assert chat == it.tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]


def test_wrong_files_in_json_are_refused_and_nothing_is_loaded(adapters, tmp_path):
    settings = Settings(model=BUILTIN_MODEL, adapter_uploads=tmp_path, **SMALL)
    other = base64.b64encode(json.dumps({"<|eos|>": 262}).encode()).decode()
    wrong = {
        "tokenizer.json": {"tokenizer.json": {"version": "1.0"}},
        "tokenizer_config.json": {"tokenizer_config.json": "no base64!"},
        "<|eos|>": {"added_tokens.json": other},
        "adapter_model": {"adapter_model": None},
    }
    with serving(build_app(settings), settings) as url, httpx.Client(base_url=url) as client:
        for named, changed in wrong.items():
            told = client.post("/v1/load_lora_adapter", json=in_json(adapters / "own", **changed))
            assert told.status_code == 400 and named in told.json()["error"]["message"], told.text
        beside = {"lora_name": "sent", "lora_path": str(adapters / "own"), "tokenizer.json": other}
        assert client.post("/v1/load_lora_adapter", json=beside).status_code == 400
        assert client.post("/v1/completions", json={"model": "sent", "prompt": "x"}).status_code == 404


def test_a_program_gives_an_adapter_s_tokenizer(llm, adapters, reference):
    directory = adapters / reference.name
    config, weights = ((directory / f"adapter_{each}").read_bytes() for each in ("config.json", "model.safetensors"))
    files = {each: (directory / each).read_bytes() for each in ITS_FILES}
    llm.load_adapter("given", config=config, weights=weights, files=files)
    ids = reference.tokenizer(TEXT)["input_ids"]
    answer = llm.generate(TEXT, SamplingParams(**GREEDY, add_special_tokens=True), adapter="given")
    assert (list(answer.prompt_token_ids), list(answer.token_ids)) == (ids, reference.answer(ids))
    for wrong, said in (({"vocab.json": b""}, "vocab.json"), ({"tokenizer.json": {}}, "text or bytes")):
        with pytest.raises(InvalidRequest, match=said):
            llm.load_adapter("wrong", config=config, weights=weights, files=wrong)
    with pytest.raises(InvalidRequest, match="not both"):
        llm.load_adapter("wrong", directory, files=files)


def test_a_vector_is_of_the_adapter_s_tokens(client, reference):
    ids = reference.tokenizer(TEXT)["input_ids"]
    by_text, by_ids = (
        client.post("/v1/embeddings", json={"model": reference.name, "input": given}).json() for given in (TEXT, [ids])
    )
    assert by_text["data"] == by_ids["data"] and by_text["usage"]["prompt_tokens"] == len(ids)
