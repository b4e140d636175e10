"""Embeddings, classes, scores and rankings of a real engine on a tiny model, against transformers and peft."""

import asyncio
import base64
import json
import math
import shutil
import threading
from contextlib import ExitStack

import numpy as np
import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.engine.generation import AT_ONCE, Choice
from chorus.server.settings import Settings
from chorus.server.text.conversation import Conversation

from ....conftest import quiet
from ...conftest import live_server

pytestmark = pytest.mark.wide

MODEL = "wide_heads"
PLAIN = ("r2-qv", "r8-attention")


@quiet()
def save_classifier(model, path, labels, seed):
    torch.manual_seed(seed)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels, pad_token_id=0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="SEQ_CLS"
    )
    peft = get_peft_model(base, config)
    torch.nn.init.normal_(peft.get_parameter("base_model.model.score.modules_to_save.default.weight"), std=0.3)
    peft.save_pretrained(str(path))


@pytest.fixture(scope="module")
def reference(subject):
    return subject(MODEL)


@pytest.fixture(scope="module")
def classifiers(reference, tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    for seed, (name, labels) in enumerate({"three": 3, "one": 1}.items()):
        save_classifier(reference.model, root / name, labels, seed)
    return {name: root / name for name in ("three", "one")}


@pytest.fixture
def serve(start, reference, classifiers):
    """`serve(model, **settings)`: a server of a model directory, with adapters with and without heads."""

    def make(model=reference.model, **settings):
        engine = Engine.from_config(EngineConfig(model=model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch"))
        for name, path in {**{each: reference.adapters[each] for each in PLAIN}, **classifiers}.items():
            engine.store.register(name, path)
        return start(engine, settings={"model": str(model), "served_model_name": "base", **settings})

    return make


@pytest.fixture
def live(serve):
    return serve()


def states(reference, adapter, tokens):
    model = reference.use(adapter)
    with torch.inference_mode():
        return model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].double()


def unit(vector):
    return vector / vector.norm()


@quiet()
def logits(reference, path, labels, tokens):
    base = AutoModelForSequenceClassification.from_pretrained(
        reference.model, num_labels=labels, pad_token_id=0, dtype=torch.float32
    )
    with torch.inference_mode():
        return PeftModel.from_pretrained(base, path).eval()(torch.tensor([tokens])).logits[0].double()


def cosine(a, b):
    return torch.cosine_similarity(torch.as_tensor(np.array(a)).double(), b, dim=0).item()


def test_the_openai_client_gets_vectors_of_the_base_and_of_adapters(live, reference, tokenizer):
    texts = ["hello", "good morning, world"]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        for model, adapter in (("base", None), *((name, name) for name in PLAIN)):
            answer = client.embeddings.create(model=model, input=texts)  # the client asks for base64 by itself
            assert answer.model == model and answer.object == "list"
            assert [each.index for each in answer.data] == [0, 1]
            tokens = tokenizer.encode_now(texts)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
            for each, ids in zip(answer.data, tokens, strict=True):
                assert cosine(each.embedding, states(reference, adapter, ids)[-1]) >= 0.999999
                assert math.isclose(np.linalg.norm(each.embedding), 1, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [f"{index}" for index in range(300)]}),
        ("/rerank", {"query": "q", "documents": [f"{index}" for index in range(300)]}),
        ("/v1/completions", {"prompt": "a", "n": 100, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [f"{index}" for index in range(100)], "max_tokens": 1}),
    ],
    ids=["embeddings", "rerank", "n", "prompts"],
)
def test_a_call_of_many_choices_leaves_the_event_loop_to_others_while_they_are_made(serve, monkeypatch, path, body):
    """A rerank of 2,047 documents held it for a tenth of a second, and a ping took twice as long."""
    live, made, longest, over = serve(max_prompts=128), [0], [0], threading.Event()
    init = Choice.__init__

    def make(choice, *given, **named):
        made[0] += 1
        init(choice, *given, **named)

    async def watch():
        before = 0
        while not over.is_set():
            await asyncio.sleep(0)
            longest[0], before = max(longest[0], made[0] - before), made[0]

    monkeypatch.setattr(Choice, "__init__", make)
    watching = asyncio.run_coroutine_threadsafe(watch(), live.loop)
    answer = live.post(path, **{"model": "base", **body})
    over.set()
    watching.result(60)
    assert answer.status_code == 200, answer.text
    assert made[0] >= 100 and longest[0] <= AT_ONCE


def test_every_kind_of_input_and_format(live, reference, tokenizer):
    (ids,) = tokenizer.encode_now(["hello"])
    wanted = unit(states(reference, None, ids)[-1])
    for given, count in (("hello", 1), (["hello"], 1), (ids, 1), ([ids, "hello"], 2)):
        body = live.post("/v1/embeddings", model="base", input=given, encoding_format="float").json()
        assert len(body["data"]) == count
        for each in body["data"]:
            assert cosine(each["embedding"], wanted) >= 0.999999
    body = live.post("/v1/embeddings", input="hello", encoding_format="base64").json()
    packed = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    assert cosine(packed, wanted) >= 0.999999 and body["id"].startswith("embd-")


def test_token_ids_of_another_tokenizer_are_refused(live, tokenizer):
    """Ids of the model's own tokenizer may be cut anywhere, and have its special tokens."""
    (ids,) = tokenizer.encode_now(["good m\N{GRINNING FACE}rning"])
    for own in (ids, ids[:8], ids[8:], [*ids[1:], *ids]):
        assert live.post("/v1/embeddings", input=[own, "a"]).status_code == 200, own
    for foreign, said in (
        ([5, 300_000], "input[1]: token id 300000 is outside the model's vocabulary of"),
        ([200, 201, 202, 203, 65], "input[1]: 4 of 5 token ids are others than this model's tokenizer gives"),
    ):
        error = live.post("/v1/embeddings", input=[ids, foreign]).json()["error"]
        assert error["param"] == "input[1]" and said in error["message"], error
        assert "send texts" in error["message"] and "check_embedding_ctx_length=False" in error["message"]


def test_dimensions_cut_a_vector_before_it_is_normalised(live, reference, tokenizer):
    (ids,) = tokenizer.encode_now(["hello"])
    whole = states(reference, None, ids)[-1]
    (each,) = live.post("/v1/embeddings", input="hello", dimensions=8).json()["data"]
    np.testing.assert_allclose(each["embedding"], unit(whole[:8]), atol=1e-5)
    (each,) = live.post("/v1/embeddings", input="hello", dimensions=8, normalize=False).json()["data"]
    np.testing.assert_allclose(each["embedding"], whole[:8], atol=1e-4)
    error = live.post("/v1/embeddings", input="hello", dimensions=41).json()["error"]
    assert error["param"] == "dimensions" and "the model's vectors have 40" in error["message"]


def test_a_long_text_is_cut_as_asked_or_refused(live, reference, tokenizer):
    text = "a b c d " * 100
    error = live.post("/v1/embeddings", input=text).json()["error"]
    assert error["param"] == "input" and error["code"] == "context_length_exceeded"
    (ids,) = tokenizer.encode_now([text])
    for side in ("left", "right"):
        body = live.post("/v1/embeddings", input=text, truncate_prompt_tokens=9, truncation_side=side).json()
        kept = [ids[0], *(ids[-8:] if side == "left" else ids[1:9])]  # the special token before a text stays
        assert body["usage"]["prompt_tokens"] == 9
        assert cosine(body["data"][0]["embedding"], states(reference, None, kept)[-1]) >= 0.999999
    assert live.post("/v1/embeddings", input=text, truncate_prompt_tokens=-1).status_code == 200


MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "b"},
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", 1.5]}, "input[1]"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream"),
        ("/v1/embeddings", {"input": [100000]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "messages": MESSAGES}, "messages"),
        ("/v1/embeddings", {"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/v1/embeddings", {"messages": []}, "messages"),
        ("/v1/embeddings", {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ("/v1/embeddings", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ("/classify", {"model": "r2-qv", "input": "a"}, "model"),
        ("/classify", {"input": "a"}, "model"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"model": "three", "text_1": "a", "text_2": "b"}, "model"),
        ("/score", {"model": "one", "queries": "a"}, "documents"),
        ("/score", {"model": "one", "items": "a"}, "queries"),
        ("/score", {"model": "one"}, "text_1"),
        ("/score", {"model": "one", "text_1": "a", "text_2": "b", "queries": "c"}, "text_2"),
        ("/score", {"model": "one", "queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
        ("/score", {"model": "one", "queries": "a", "documents": []}, "documents"),
        ("/score", {"model": "one", "queries": "a", "documents": "b " * 3000}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_wrong_bodies_are_refused_by_name(live, path, body, param):
    response = live.post(path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_unknown_models_are_not_found(live):
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
        response = live.post(path, model="threes", **body)
        assert response.status_code == 404 and "did you mean 'three'?" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_of_an_adapters_head(live, reference, classifiers, tokenizer, path):
    texts = ["hello", "good morning"]
    body = live.post(path, model="three", input=texts).json()
    assert body["object"] == "list" and body["id"].startswith("classify-") and body["model"] == "three"
    for each, ids in zip(body["data"], tokenizer.encode_now(texts), strict=True):
        wanted = logits(reference, classifiers["three"], 3, ids)
        np.testing.assert_allclose(each["probs"], wanted.softmax(-1), atol=1e-5)
        assert each["label"] == f"LABEL_{int(wanted.argmax())}" and each["num_classes"] == 3
    (each,) = live.post(path, model="three", input="hello", use_activation=False).json()["data"]
    wanted = logits(reference, classifiers["three"], 3, tokenizer.encode_now(["hello"])[0])
    assert cosine(each["probs"], wanted) >= 0.999999


def test_an_adapter_without_a_head_is_refused_and_never_the_base(live):
    error = live.post("/classify", model="r2-qv", input="hello").json()["error"]
    assert "adapter 'r2-qv' has no score head" in error["message"] and "SEQ_CLS" in error["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_a_head_with_one_label(live, reference, classifiers, tokenizer, path):
    body = live.post(path, model="one", text_1="a question", text_2=["an answer", "another"]).json()
    assert [each["object"] for each in body["data"]] == ["score", "score"]
    pairs = [("a question", "an answer"), ("a question", "another")]
    for each, ids in zip(body["data"], tokenizer.encode_pairs_now(pairs), strict=True):
        wanted = logits(reference, classifiers["one"], 1, ids).sigmoid().item()
        assert each["score"] == pytest.approx(wanted, abs=1e-5)


def test_scores_of_an_embedding_model_are_similarities(live, reference, tokenizer):
    body = live.post("/score", model="r2-qv", text_1=["a", "b c"], text_2=["d", "b c"]).json()
    vectors = {text: unit(states(reference, "r2-qv", tokenizer.encode_now([text])[0])[-1]) for text in ("a", "d")}
    assert body["data"][0]["score"] == pytest.approx(float(vectors["a"] @ vectors["d"]), abs=1e-5)
    assert body["data"][1]["score"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(live, path):
    documents = ["an answer", {"text": "another"}, "a third one"]
    scores = live.post("/score", model="one", text_1="why", text_2=["an answer", "another", "a third one"]).json()
    wanted = sorted(enumerate(each["score"] for each in scores["data"]), key=lambda pair: -pair[1])
    body = live.post(path, model="one", query="why", documents=documents).json()
    found = [(each["index"], each["relevance_score"]) for each in body["results"]]
    assert [index for index, _ in found] == [index for index, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted], abs=1e-6)
    assert body["results"][0]["document"]["text"] == ["an answer", "another", "a third one"][found[0][0]]
    body = live.post(path, model="one", query="why", documents=documents, top_n=1, return_documents=False).json()
    assert [each.keys() for each in body["results"]] == [{"index", "relevance_score"}]


@pytest.fixture
def changed(reference, tmp_path):
    """`changed(field=…)`: a copy of the model directory with other fields in its config.json."""

    def make(**fields):
        shutil.copytree(reference.model, tmp_path / "model")
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return tmp_path / "model"

    return make


@pytest.mark.parametrize(
    "fields",
    [
        {"classifier_from_token": ["n", "y"]},
        {
            "architectures": ["LlamaForSequenceClassification"],
            "classifier_from_token": ["n", "y"],
            "is_original_qwen3_reranker": True,
        },
    ],
    ids=["generator", "overridden"],
)
def test_scores_of_a_generator_that_answers_with_one_of_two_tokens(serve, changed, reference, tokenizer, fields):
    live = serve(changed(**fields))
    pairs = [("why", "an answer"), ("why", "another")]
    no, yes = (tokenizer.backend.token_to_id(token) for token in ("n", "y"))
    for model, adapter in (("base", None), ("r8-attention", "r8-attention")):
        body = live.post("/score", model=model, text_1="why", text_2=["an answer", "another"]).json()
        for each, ids in zip(body["data"], tokenizer.encode_pairs_now(pairs), strict=True):
            last = reference.logits(adapter, ids)[-1].double()
            assert each["score"] == pytest.approx((last[yes] - last[no]).sigmoid().item(), abs=1e-5)
        raw = live.post("/rerank", model=model, query="why", documents=["an answer"], use_activation=False).json()
        last = reference.logits(adapter, tokenizer.encode_pairs_now(pairs)[0])[-1].double()
        assert raw["results"][0]["relevance_score"] == pytest.approx((last[yes] - last[no]).item(), abs=1e-3)


def test_the_two_tokens_may_be_a_setting(serve, reference, tokenizer):
    live = serve(classifier_from_token="n,y")
    no, yes = (tokenizer.backend.token_to_id(token) for token in ("n", "y"))
    (each,) = live.post("/score", text_1="why", text_2="so").json()["data"]
    last = reference.logits(None, tokenizer.encode_pairs_now([("why", "so")])[0])[-1].double()
    assert each["score"] == pytest.approx((last[yes] - last[no]).sigmoid().item(), abs=1e-5)
    with pytest.raises(ValueError, match="two tokens are needed"):
        Settings(classifier_from_token="yes")
    live = serve(classifier_from_token="n,nothing")
    error = live.post("/score", text_1="why", text_2="so")
    assert error.status_code == 501 and "'nothing', which is no token" in error.json()["error"]["message"]


def test_pooling_is_that_of_sentence_transformers_files(serve, changed, reference, tokenizer):
    model = changed()
    kinds = ["Transformer", "Pooling"]
    modules = [
        {"idx": i, "path": f"{i}_{each}" if i else "", "type": f"sentence_transformers.models.{each}"}
        for i, each in enumerate(kinds)
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    )
    live = serve(model)
    (ids,) = tokenizer.encode_now(["hello there"])
    (each,) = live.post("/v1/embeddings", model="r2-qv", input="hello there").json()["data"]
    np.testing.assert_allclose(each["embedding"], states(reference, "r2-qv", ids).mean(0), atol=1e-4)


@quiet()
def test_a_checkpoint_of_a_classifier_names_its_labels(serve, reference, tokenizer, tmp_path):
    torch.manual_seed(3)
    labels = {0: "bad", 1: "good", 2: "odd"}
    model = AutoModelForSequenceClassification.from_pretrained(reference.model, id2label=labels, pad_token_id=0)
    model.save_pretrained(tmp_path / "model")
    live = serve(tmp_path / "model")
    (each,) = live.post("/classify", input="hello").json()["data"]
    with torch.inference_mode():
        wanted = model.eval()(torch.tensor(tokenizer.encode_now(["hello"]))).logits[0].double()
    np.testing.assert_allclose(each["probs"], wanted.softmax(-1), atol=1e-5)
    assert each["label"] == labels[int(wanted.argmax())]
    error = live.post("/v1/completions", prompt="hello").json()["error"]
    assert error["param"] == "model" and "no language-model head" in error["message"]
    assert live.post("/classify", model="r2-qv", input="hello").status_code == 400


def test_a_restricted_key_gets_nothing_of_other_models_and_pays_for_its_prompts(serve, tmp_path):
    (tmp_path / "keys").write_text("sk-narrow-key narrow adapters=three base=no tokens_per_minute=5\n")
    live = serve(api_key_file=tmp_path / "keys")
    live.client.headers["authorization"] = "Bearer sk-narrow-key"
    for model in ("one", "base", "nothing"):
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/classify", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ):
            response = live.post(path, model=model, **body)
            assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    assert live.post("/classify", model="three", input="a longer text").status_code == 200
    late = live.post("/v1/embeddings", model="three", input="a")
    assert late.status_code == 429 and late.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_vector_counts_as_a_request_without_generated_tokens(live):
    live.post("/v1/embeddings", model="r2-qv", input="hello")
    metrics = live.client.get("/metrics").text
    assert 'finished_reason="stop"' in metrics
    lines = [line for line in metrics.splitlines() if "generation_tokens_total{" in line]
    assert lines and all(line.endswith(" 0.0") for line in lines)


@pytest.mark.parametrize("adapter", [None, PLAIN[0]])
@pytest.mark.parametrize("begins", [False, True])
def test_a_conversation_is_written_by_the_chat_template(live, reference, tokenizer, adapter, begins):
    ids = tokenizer.encode_chat_now(Conversation(MESSAGES, begins_output=begins))
    fields = {"messages": MESSAGES, "add_generation_prompt": begins, "encoding_format": "float"}
    body = live.post("/v1/embeddings", model=adapter or "base", **fields).json()
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert cosine(body["data"][0]["embedding"], states(reference, adapter, ids)[-1]) >= 0.999999


def test_a_conversation_is_classified(live, reference, classifiers, tokenizer):
    ids = tokenizer.encode_chat_now(Conversation(MESSAGES, begins_output=False))
    body = live.post("/classify", model="three", messages=MESSAGES, activation=False).json()
    wanted = logits(reference, classifiers["three"], 3, ids)
    assert body["data"][0]["probs"] == pytest.approx(wanted.tolist(), abs=1e-4)


def content_of(role):
    return f'messages | selectattr("role", "eq", "{role}") | map(attribute="content") | first'


RERANKER = (
    f'<eos>Judge <Instruct>: {{{{ {content_of("system")} | default("find passages") }}}} '
    f"<Query>: {{{{ {content_of('query')} }}}} <Document>: {{{{ {content_of('document')} }}}}<eos>"
)
"""As Qwen3-Reranker's own: the instruction is the system's message."""

WITH_VARIABLE = (
    '{{ instruction | default("find passages") }}|{% for message in messages %}'
    "{% if message.role == 'query' %}question:{{ message.content }}"
    '{% elif message.role == "document" %} passage:{{ message.content }}{% endif %}{% endfor %}'
)
"""As vLLM's examples: the instruction is a variable."""


@pytest.fixture
def reranker(changed, classifiers, reference, tokenizer):
    """`reranker(template, **fields)`: a server of a model that has a chat template."""
    with ExitStack() as stack:

        def make(template, **fields):
            model = changed(**({"classifier_from_token": ["n", "y"]} | fields))
            engine = Engine.from_config(EngineConfig(model=model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch"))
            engine.store.register("r8-attention", reference.adapters["r8-attention"])
            engine.store.register("one", classifiers["one"])
            settings = {"model": str(model), "served_model_name": "base"}
            return stack.enter_context(live_server(engine, tokenizer.with_chat_template(template), settings=settings))

        yield make


def written(template, query, document, instruction=None):
    if template is RERANKER:
        query_part = f"<eos>Judge <Instruct>: {instruction or 'find passages'} <Query>: {query} "
        return f"{query_part}<Document>: {document}<eos>"
    return f"{instruction or 'find passages'}|question:{query} passage:{document}"


@pytest.mark.parametrize("template", [RERANKER, WITH_VARIABLE], ids=["system", "variable"])
@pytest.mark.parametrize("adapter", [None, "r8-attention"])
def test_a_rerankers_own_template_writes_query_and_document(reranker, reference, tokenizer, template, adapter):
    live = reranker(template)
    no, yes = (tokenizer.backend.token_to_id(token) for token in ("n", "y"))

    def wanted(document, instruction=None):
        (ids,) = tokenizer.encode_now([written(template, "why", document, instruction)])
        last = reference.logits(adapter, ids)[-1].double()
        return pytest.approx((last[yes] - last[no]).sigmoid().item(), abs=1e-5)

    model = adapter or "base"
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        body = live.post("/score", model=model, **{first: "why", second: ["so", "not so"]}).json()
        assert [each["score"] for each in body["data"]] == [wanted("so"), wanted("not so")]
    for given in ({"instruction": "odd"}, {"chat_template_kwargs": {"instruction": "odd"}}):
        (each,) = live.post("/rerank", model=model, query="why", documents=["so"], **given).json()["results"]
        assert each["relevance_score"] == wanted("so", "odd")


def test_texts_stay_text_in_a_rerankers_template(reranker, tokenizer):
    live = reranker(RERANKER)
    plain, spelt = (
        live.post("/score", text_1="why", text_2=text).json()["usage"]["prompt_tokens"] for text in ("so", "<eos>so")
    )
    assert spelt - plain > 1, "the special token that a document spells is not that token"


def test_a_template_is_of_heads_too(reranker, reference, classifiers, tokenizer):
    live = reranker(RERANKER, classifier_from_token=None)
    (each,) = live.post("/score", model="one", text_1="why", text_2="so").json()["data"]
    (ids,) = tokenizer.encode_now([written(RERANKER, "why", "so")])
    assert each["score"] == pytest.approx(logits(reference, classifiers["one"], 1, ids).sigmoid().item(), abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"instruction": "odd"}, "instruction", "leave it out"),
        ({"chat_template_kwargs": {"instruction": "odd"}}, "chat_template_kwargs", "leave it out"),
    ],
)
@pytest.mark.parametrize("model", ["one", "r2-qv"], ids=["joined", "vectors"])
def test_an_instruction_that_no_template_reads_is_refused(live, model, fields, param, said):
    answer = live.post("/score", model=model, text_1="a", text_2="b", **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"]


def test_a_template_that_reads_no_instruction_refuses_it(reranker):
    live = reranker(WITH_VARIABLE.replace('{{ instruction | default("find passages") }}|', ""))
    error = live.post("/rerank", query="a", documents=["b"], instruction="odd").json()["error"]
    assert error["param"] == "instruction" and "chat template" in error["message"]
    error = live.post("/rerank", query="a", documents=["b"], chat_template_kwargs={"tools": 1}).json()["error"]
    assert error["param"] == "chat_template_kwargs"
