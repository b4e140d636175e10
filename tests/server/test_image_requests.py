"""Requests with images over HTTP and by `LLM`: every format, what is counted, and what is refused by name."""

from __future__ import annotations

import base64
import shutil
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from chorus import LLM
from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.media.decoder import ImageDecoder
from chorus.core.media.processor import ImageProcessor
from chorus.core.requests.request_params import InvalidRequest
from chorus.memory.files.given_up import GivenUp, check_wanted
from chorus.server.cli.models import described
from chorus.server.library.params import SamplingParams
from chorus.server.text.tokenizer import Tokenizer

from ..core.media.tiny_vision import Reference, needs_vision, tiny
from .conftest import Live, live_server
from .stores.store_server import StoreServer, store_server

pytestmark = [pytest.mark.vision, needs_vision]

COUNT = 6
GREEDY: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("smolvlm")


@pytest.fixture(scope="module")
def host() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture(scope="module")
def live(reference: Reference, host: StoreServer) -> Iterator[Live]:
    path = reference.path
    config = EngineConfig(
        model=path,
        adapters=path / "adapters",
        memory_bytes=64 << 20,
        threads=1,
        cpu_kernels="torch",
        dtype="float32",
        device="cpu",
    )
    settings = {
        "model": path,
        "served_model_name": "base",
        "limit_mm_per_prompt": {"image": 4},
        "allowed_media_domains": host.url,
        "adapter_roots": (path,),
    }
    engine: Any = Engine.from_config(config)
    with live_server(engine, Tokenizer.load(path), settings=settings) as found:
        yield found


def picture(size: tuple[int, int], colour: str) -> Any:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, colour)
    ImageDraw.Draw(image).ellipse((2, 3, size[0] // 2, size[1] - 2), fill="white")
    return image


def file_of(image: Any) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url_of(image: Any) -> str:
    return f"data:image/png;base64,{file_of(image)}"


def wanted(reference: Reference, adapter: str | None, messages: list[Any], images: list[Any]) -> tuple[int, list[int]]:
    prompt, answer = reference.answer(adapter, messages, images, COUNT)
    return len(prompt), answer


SEEN = {"type": "image"}
HI = {"type": "text", "text": "hi"}


def test_the_server_tells_that_it_sees(live: Live) -> None:
    told = live.client.get("/health").json()
    assert told["images"] == "served"
    assert told["image_limits"] == {"backend": "torchvision", "max_image_tokens": 4096, "limit_mm_per_prompt": 4}
    assert live.client.get("/model_info").json()["has_image_understanding"] is True


def test_a_checkpoint_is_said_to_see(reference: Reference, tmp_path: Path) -> None:
    (line,) = [each for each in described(reference.path) if each.startswith("images:")]
    assert line == "images: served on CPUs and GPUs, with adapters of the vision tower"
    (line,) = [each for each in described(tiny("gemma3")) if each.startswith("images:")]
    assert line == "images: served on CPUs, and on GPUs with --attention torch, with adapters of the vision tower"
    shutil.copy(reference.path / "config.json", tmp_path)
    (line,) = [each for each in described(tmp_path) if each.startswith("images:")]
    assert "not served: the model has no preprocessor_config.json" in line


def test_chat_with_images_in_several_turns(live: Live, reference: Reference) -> None:
    first, second = picture((40, 60), "red"), picture((90, 30), "navy")
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(first), "detail": "auto"}}, HI]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [HI, {"type": "image_url", "image_url": {"url": url_of(second)}}]},
    ]
    same = [{"role": "user", "content": [SEEN, HI]}, messages[1], {"role": "user", "content": [HI, SEEN]}]
    for adapter in (None, "linear", "tower"):
        count, answer = wanted(reference, adapter, same, [first, second])
        told = live.post("/v1/chat/completions", messages=messages, model=adapter or "base", **GREEDY).json()
        assert told["choices"][0]["token_ids"] == answer, told
        assert told["usage"]["prompt_tokens"] == count
    counted = live.post("/tokenize", messages=messages, model="base").json()
    assert counted["count"] == wanted(reference, None, same, [first, second])[0]


def test_images_by_urls_of_an_allowed_domain(live: Live, reference: Reference, host: StoreServer) -> None:
    image = picture((30, 70), "purple")
    host.paths["/a.png"] = base64.b64decode(file_of(image))
    url = f"{host.url}/a.png"
    count, answer = wanted(reference, None, [{"role": "user", "content": [SEEN, HI]}], [image])
    messages = [{"role": "user", "content": [as_part(url), HI]}]
    told = live.post("/v1/chat/completions", messages=messages, model="base", **GREEDY).json()
    assert told["choices"][0]["token_ids"] == answer, told
    assert told["usage"]["prompt_tokens"] == count
    blocks = [{"type": "image", "source": {"type": "url", "url": url}}, HI]
    counted = live.post("/v1/messages/count_tokens", messages=[{"role": "user", "content": blocks}], model="base")
    assert counted.json().get("input_tokens") == count, counted.text
    asked = host.asked["/a.png"]
    refused_by = live.post("/v1/chat/completions", messages=messages, model="absent", **GREEDY)
    assert refused_by.status_code == 404 and host.asked["/a.png"] == asked, "nothing is fetched for who may not ask"
    message, param = refused(chat(live, as_part(f"{host.url}/absent.png")))
    assert param == "messages[1].content[1]" and "answers 404" in message


def test_a_request_sets_how_its_images_are_prepared(live: Live, reference: Reference) -> None:
    image, settings = picture((70, 90), "red"), {"size": {"longest_edge": 64}}
    same = [{"role": "user", "content": [SEEN, HI]}]
    prompt, answer = reference.answer("seven", same, [image], COUNT, settings)
    messages = [{"role": "user", "content": [as_part(url_of(image)), HI]}]
    asked: dict[str, Any] = {"messages": messages, "model": "seven", "mm_processor_kwargs": settings}
    told = live.post("/v1/chat/completions", **asked, **GREEDY).json()
    assert told["choices"][0]["token_ids"] == answer and told["usage"]["prompt_tokens"] == len(prompt)
    assert live.post("/tokenize", **asked).json()["count"] == len(prompt)
    assert len(prompt) < wanted(reference, "seven", same, [image])[0]
    for given, why in (
        ({"size": {"longest_edge": 97}}, "from 1 to 96"),
        ({"max_pixels": 10}, "max_pixels is no setting of this model's images; it has do_image_splitting, size"),
        ({"size": 5}, "must be an object"),
    ):
        message, param = refused(live.post("/v1/chat/completions", **{**asked, "mm_processor_kwargs": given}, **GREEDY))
        assert param == "mm_processor_kwargs" and why in message
    assert live.post("/v1/completions", prompt="a", model="base", mm_processor_kwargs=settings).status_code == 400


def test_settings_of_images_by_other_routes(live: Live, reference: Reference) -> None:
    image, settings = picture((70, 90), "blue"), {"size": {"longest_edge": 64}}
    prompt, answer = reference.answer(None, [{"role": "user", "content": [SEEN, HI]}], [image], COUNT, settings)
    text = reference.processor.tokenizer.decode(answer, skip_special_tokens=True)
    fields = {"temperature": 0, "ignore_eos": True, "model": "base"}
    parts = [{"type": "input_image", "image_url": url_of(image)}, {"type": "input_text", "text": "hi"}]
    responses = {"input": [{"role": "user", "content": parts}], "max_output_tokens": COUNT, **fields}
    source = {"type": "base64", "media_type": "image/png", "data": file_of(image)}
    blocks = [{"type": "image", "source": source}, HI]
    messages = {"messages": [{"role": "user", "content": blocks}], "max_tokens": COUNT, **fields}
    told = live.post("/v1/responses", **responses, mm_processor_kwargs=settings).json()
    assert told["usage"]["input_tokens"] == len(prompt) and told["output"][0]["content"][0]["text"] == text
    told = live.post("/v1/messages", **messages, mm_processor_kwargs=settings).json()
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    assert told["content"][0]["text"] == text
    for route, asked in (("/v1/responses", responses), ("/v1/messages", messages)):
        refusal = live.post(route, **asked, mm_processor_kwargs={"max_pixels": 10})
        assert refusal.status_code == 400 and "max_pixels is no setting of this model's images" in refusal.text


@pytest.mark.parametrize("name", ["tower", "copied"])
def test_an_adapter_of_the_tower_is_loaded_while_serving(live: Live, reference: Reference, name: str) -> None:
    image = picture((40, 60), "teal")
    path = str(reference.path / "adapters" / name)
    loaded = live.post("/v1/load_lora_adapter", lora_name=f"new {name}", lora_path=path)
    assert loaded.status_code == 200, loaded.text
    _, answer = wanted(reference, name, [{"role": "user", "content": [SEEN, HI]}], [image])
    messages = [{"role": "user", "content": [as_part(url_of(image)), HI]}]
    told = live.post("/v1/chat/completions", messages=messages, model=f"new {name}", **GREEDY).json()
    assert told["choices"][0]["token_ids"] == answer, told


def test_an_image_of_too_many_tokens_is_made_smaller_or_refused(reference: Reference) -> None:
    image = picture((90, 90), "red")
    prompt, answer = reference.answer(None, [{"role": "user", "content": [SEEN, HI]}], [image], COUNT)
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"memory_bytes": 64 << 20, "cpu_kernels": "torch", "dtype": "float32", "device": "cpu"}
    own = prompt.count(reference.processor.image_token_id)
    for most, is_own in ((own, True), (own - 1, False), (4, None)):
        with LLM(reference.path, max_image_tokens=most, **options) as llm:
            messages = [{"role": "user", "content": [{"type": "image", "image": image}, HI]}]
            if is_own is None:
                with pytest.raises(InvalidRequest, match=r"at most 4 are taken \(max_image_tokens\)"):
                    llm.chat(messages, params)
                continue
            told = llm.chat(messages, params)
            assert (len(told.prompt_token_ids) == len(prompt)) == is_own
            assert (list(told.token_ids) == answer) or not is_own


def test_two_choices_share_an_image(live: Live, reference: Reference) -> None:
    image = picture((60, 40), "green")
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url_of(image)}, HI]}]
    _, answer = wanted(reference, "seven", [{"role": "user", "content": [SEEN, HI]}], [image])
    told = live.post("/v1/chat/completions", messages=messages, model="seven", n=2, **GREEDY).json()
    assert [choice["token_ids"] for choice in told["choices"]] == [answer, answer]


def test_responses_and_messages(live: Live, reference: Reference) -> None:
    image = picture((50, 50), "orange")
    count, answer = wanted(reference, None, [{"role": "user", "content": [SEEN, HI]}], [image])
    text = reference.processor.tokenizer.decode(answer, skip_special_tokens=True)
    parts = [{"type": "input_image", "image_url": url_of(image)}, {"type": "input_text", "text": "hi"}]
    fields = {"temperature": 0, "ignore_eos": True, "model": "base"}
    told = live.post(
        "/v1/responses", input=[{"role": "user", "content": parts}], max_output_tokens=COUNT, **fields
    ).json()
    assert told["usage"]["input_tokens"] == count and told["output"][0]["content"][0]["text"] == text
    source = {"type": "base64", "media_type": "image/png", "data": file_of(image)}
    blocks = [{"type": "image", "source": source}, HI]
    told = live.post("/v1/messages", messages=[{"role": "user", "content": blocks}], max_tokens=COUNT, **fields).json()
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count and told["content"][0]["text"] == text
    counted = live.post("/v1/messages/count_tokens", messages=[{"role": "user", "content": blocks}], model="base")
    assert counted.json()["input_tokens"] == count


def test_an_image_in_a_tool_result(live: Live) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": file_of(picture((40, 60), "red"))}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": source}, HI]}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with_image = live.post("/v1/messages/count_tokens", messages=messages, model="base").json()["input_tokens"]
    result["content"] = [HI]
    without = live.post("/v1/messages/count_tokens", messages=messages, model="base").json()["input_tokens"]
    assert with_image > without + 20


def refused(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


def chat(live: Live, *parts: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [HI, *parts]}]
    return live.post("/v1/chat/completions", messages=messages, **{"model": "base", "max_tokens": 2, **fields})


def as_part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_each_refusal_names_the_image(live: Live) -> None:
    good = as_part(url_of(picture((20, 20), "red")))
    message, param = refused(chat(live, good, as_part("data:image/png;base64,aGVsbG8=")))
    assert param == "messages[1].content[2]" and "no image that is read" in message
    message, param = refused(chat(live, as_part("https://example.org/a.png")))
    assert param == "messages[1].content[1]" and "does not fetch from" in message
    message, _ = refused(chat(live, as_part(url_of(picture((20, 20), "red")), detail="tiny")))
    assert "detail" in message
    message, param = refused(chat(live, *[good] * 5))
    assert param == "messages[1].content[5]" and "at most 4" in message
    message, _ = refused(chat(live, {"type": "video_url", "video_url": {"url": "x"}}))
    assert "neither text nor an image" in message
    message, param = refused(chat(live, good, truncate_prompt_tokens=5))
    assert param == "truncate_prompt_tokens"


def test_nothing_is_decoded_for_an_unknown_model(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageDecoder, "decode", lambda *_: pytest.fail("it was decoded"))
    answer = chat(live, as_part(url_of(picture((21, 22), "red"))), model="nobody")
    assert answer.status_code == 404, answer.text


def test_vectors_of_conversations_with_images(live: Live, reference: Reference) -> None:
    """An adapter of the tower changes them, and so does another image."""
    images, found = [picture((90, 30), "red"), picture((30, 60), "navy")], {}
    for adapter, image in (("base", images[0]), ("tower", images[0]), ("linear", images[1])):
        sent = [{"role": "user", "content": [as_part(url_of(image)), HI]}]
        told = live.post("/v1/embeddings", messages=sent, model=adapter).json()
        (vector,) = [each["embedding"] for each in told["data"]]
        same = [{"role": "user", "content": [SEEN, HI]}]
        own = reference.vector(None if adapter == "base" else adapter, same, [image])
        assert vector == pytest.approx(own, abs=1e-4)
        found[adapter] = vector
        assert told["usage"]["prompt_tokens"] > 4 * 4
    assert found["base"] != pytest.approx(found["tower"], abs=1e-2)
    sent = [{"role": "user", "content": [as_part(url_of(images[0])), HI]}]
    fewer = {"messages": sent, "model": "base", "mm_processor_kwargs": {"do_image_splitting": False}}
    assert live.post("/v1/embeddings", **fewer).json()["usage"]["prompt_tokens"] < told["usage"]["prompt_tokens"]
    refused = live.post("/v1/embeddings", messages=sent, model="base", truncate_prompt_tokens=5)
    assert refused.status_code == 400 and "would cut a prompt with images" in refused.text
    refused = live.post("/v1/embeddings", input="a", model="base", mm_processor_kwargs={"do_image_splitting": False})
    assert refused.status_code == 400 and "mm_processor_kwargs is of conversations" in refused.text
    refused = live.post("/v1/embeddings", messages=sent, model="base", mm_processor_kwargs={"max_pixels": 1})
    assert refused.status_code == 400 and "max_pixels is no setting" in refused.text


def test_an_image_is_decoded_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = ImageDecoder.decode

    def counted(*arguments: Any) -> Any:
        decoded.append(len(arguments[1]))
        return decode(*arguments)

    monkeypatch.setattr(ImageDecoder, "decode", counted)
    for adapter in ("base", "tower", "text"):
        answer = chat(live, *[as_part(url_of(picture((33, 44 + at), "olive"))) for at in range(3)], model=adapter)
        assert answer.status_code == 200, answer.text
    assert len(decoded) == 3 + 3, "rows of an adapter of the tower are others; that of the text part has the model's"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/embeddings"])
def test_an_image_whose_client_left_is_given_up(live: Live, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, received = threading.Event(), ImageDecoder._received  # noqa: SLF001

    def stopped(decoder: ImageDecoder, link: Any) -> bytes:
        """As one that decodes for minutes."""
        if given_up.is_set():
            return received(decoder, link)
        try:
            while True:
                check_wanted()
                time.sleep(0.01)
        except GivenUp:
            given_up.set()
            raise

    monkeypatch.setattr(ImageDecoder, "_received", stopped)
    messages = [{"role": "user", "content": [as_part(url_of(picture((35, 36 + len(path)), "olive")))]}]
    with pytest.raises(httpx.ReadTimeout):
        live.client.post(path, json={"messages": messages, "model": "base"}, timeout=0.5)
    assert given_up.wait(60)
    assert live.post(path, messages=messages, model="base").status_code == 200


def test_low_detail_reduces_an_image(live: Live, reference: Reference) -> None:
    large = picture((700, 400), "olive")
    large.putpixel((350, 200), (1, 2, 3))
    reduced = large.copy()
    reduced.thumbnail((512, 512))
    count, answer = wanted(reference, None, [{"role": "user", "content": [SEEN, HI]}], [reduced])
    for part in (as_part(url_of(large), detail="low"), as_part(url_of(reduced), detail="high")):
        messages = [{"role": "user", "content": [part, HI]}]
        told = live.post("/v1/chat/completions", messages=messages, model="base", **GREEDY).json()
        assert told["choices"][0]["token_ids"] == answer and told["usage"]["prompt_tokens"] == count
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the same pixels"
    processor = ImageProcessor(reference.path)
    low = processor.of_file(base64.b64decode(file_of(large)), {"detail": "low"})
    assert low.digest == processor.of_image(reduced).digest and low.settings == {"detail": "low"}
    refusal = chat(live, as_part(url_of(large)), mm_processor_kwargs={"detail": "low"})
    assert "detail is no setting" in refused(refusal)[0]


def test_a_typed_placeholder_is_text(live: Live) -> None:
    """As every special token that a client writes in a conversation."""
    image = picture((40, 60), "red")
    plain = live.post(
        "/tokenize", messages=[{"role": "user", "content": [as_part(url_of(image))]}], model="base"
    ).json()
    typed = [as_part(url_of(image)), {"type": "text", "text": "<image>"}]
    counted = live.post("/tokenize", messages=[{"role": "user", "content": typed}], model="base").json()
    assert counted["count"] == plain["count"] + len("<image>")
    message, param = refused(live.post("/v1/completions", prompt="a <image> b", model="base", max_tokens=2))
    assert param == "prompt" and "stands for a part of an image" in message


def test_text_is_served_where_the_template_takes_parts_alone(live: Live, reference: Reference) -> None:
    """SmolVLM's published template iterates over content, and writes nothing of a text."""
    template = reference.processor.tokenizer.chat_template
    begin, end = template.index("{% if message['content'] is string %}"), template.index("{% if message['content'][0]")
    lists_only = template[:begin] + template[end:].replace("{% endfor %}{% endif %}<end", "{% endfor %}<end")
    tokenizer = Tokenizer.load(reference.path).with_chat_template(lists_only)
    messages = [{"role": "user", "content": "hi"}]
    both = tokenizer.encode_chat_now(messages), Tokenizer.load(reference.path).encode_chat_now(messages)
    assert both[0] == both[1]


def test_a_program_gives_pil_images_paths_and_bytes(reference: Reference, tmp_path: Path) -> None:
    image = picture((40, 60), "purple")
    path = tmp_path / "image.png"
    image.save(path)
    _, answer = wanted(reference, "text", [{"role": "user", "content": [SEEN, HI]}], [image])
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"memory_bytes": 64 << 20, "cpu_kernels": "torch", "dtype": "float32", "device": "cpu"}
    with LLM(tiny("smolvlm"), adapters=reference.path / "adapters", **options) as llm:
        for part in (
            {"type": "image", "image": image},
            {"type": "image", "image": path.read_bytes()},
            {"type": "image", "path": str(path)},
            {"type": "image_url", "image_url": {"url": url_of(image)}},
            {"type": "image", "url": url_of(image)},
        ):
            told = llm.chat([{"role": "user", "content": [part, HI]}], params, "text")
            assert list(told.token_ids) == answer
        for part, why in (
            ({"type": "image", "path": str(tmp_path / "none.png")}, "can't be read"),
            ({"type": "image", "url": "http://127.0.0.1/a.png"}, r"fetches none \(allowed_media_domains\)"),
            ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "allowed_media_domains"),
            ({"type": "image", "url": "file:///etc/passwd"}, "no data URL"),
            ({"type": "image"}, "has nothing"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                llm.chat([{"role": "user", "content": [part, HI]}], params)


def test_a_program_names_images_by_urls_of_domains_that_it_allows(reference: Reference, host: StoreServer) -> None:
    image = picture((40, 60), "green")
    host.paths["/b.png"] = base64.b64decode(file_of(image))
    _, answer = wanted(reference, "text", [{"role": "user", "content": [SEEN, HI]}], [image])
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"memory_bytes": 64 << 20, "cpu_kernels": "torch", "dtype": "float32", "device": "cpu"}
    options["allowed_media_domains"] = [host.url]
    with LLM(tiny("smolvlm"), adapters=reference.path / "adapters", **options) as llm:
        for part in (
            {"type": "image", "url": f"{host.url}/b.png"},
            {"type": "image", "image": f"{host.url}/b.png"},
            {"type": "image_url", "image_url": {"url": f"{host.url}/b.png"}},
        ):
            assert list(llm.chat([{"role": "user", "content": [part, HI]}], params, "text").token_ids) == answer
        for url, why in (("http://127.0.0.1:9/b.png", "does not fetch from"), (f"{host.url}/none.png", "answers 404")):
            with pytest.raises(InvalidRequest, match=why):
                llm.chat([{"role": "user", "content": [{"type": "image", "url": url}, HI]}], params)


def test_images_on_axes_over_http() -> None:
    """Positions behind images come from their grids, which the server's processor tells."""
    reference = Reference("qwen3_vl")
    path = reference.path
    config = EngineConfig(model=path, adapters=path / "adapters", memory_bytes=64 << 20, threads=1, dtype="float32")
    engine: Any = Engine.from_config(config.model_copy(update={"device": "cpu"}))
    images = [picture((90, 30), "red"), picture((40, 60), "navy")]
    turns = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
    same = [{"role": "user", "content": [SEEN, HI, SEEN]}, *turns]
    sent = [{"role": "user", "content": [as_part(url_of(images[0])), HI, as_part(url_of(images[1]))]}, *turns]
    settings = {"model": path, "served_model_name": "base"}
    with live_server(engine, Tokenizer.load(path), settings=settings) as live:
        for adapter in (None, "tower", "linear"):
            count, answer = wanted(reference, adapter, same, images)
            told = live.post("/v1/chat/completions", messages=sent, model=adapter or "base", n=2, **GREEDY).json()
            assert [choice["token_ids"] for choice in told["choices"]] == [answer, answer], told
            assert told["usage"]["prompt_tokens"] == count
