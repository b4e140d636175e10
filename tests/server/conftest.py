"""A small engine that keeps the engine's contract without tensors, a small tokenizer, and a live server of the two."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from chorus.core.engine_stats import EngineStats
from chorus.core.executors.base import ExecutorBase
from chorus.core.merging.step_samples import StepSamples
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import InvalidRequest, RequestParams
from chorus.core.requests.types import FinishReason, RequestOutput, StepInfo, TokenLogprobs
from chorus.core.scheduling.overload import Overloaded
from chorus.core.scheduling.queues import Running
from chorus.memory.adapters.adapter import Tier
from chorus.memory.adapters.adapter_costs import AdapterCosts
from chorus.memory.adapters.store import UnknownAdapter
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.pages.adapter_layout import AdapterPart
from chorus.memory.pages.block import Medium
from chorus.memory.pages.pool import IntegrityError, PagePool
from chorus.server.api.sampling_defaults import SamplingDefaults
from chorus.server.app import create_app
from chorus.server.engine.kv_publisher import kv_publisher_of
from chorus.server.engine.recorder import Recorder
from chorus.server.engine.telemetry import Telemetry
from chorus.server.engine.tracing import Tracer
from chorus.server.engine.usage_file import UsageFile
from chorus.server.engine.worker import EngineWorker
from chorus.server.http.server import HttpServer
from chorus.server.http.unix_socket import unix_listener
from chorus.server.settings import Settings
from chorus.server.start.launch import bind, http_server, url_of
from chorus.server.text.tokenizer import Tokenizer

from ..tables import TINY_PATHS
from ..tiny_tokenizer import save_tokenizer

BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{ raise_exception('no system role here') }}{%- endif -%}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)


class FakePins:
    """Pinned adapters, by name."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __contains__(self, adapter: SimpleNamespace) -> bool:
        return adapter.name in self.names

    def holds_pages_of(self, adapter: SimpleNamespace) -> bool:
        return False


class FakeStore:
    def __init__(self, names: list[str]) -> None:
        self.tiers = dict.fromkeys(sorted(names), Tier.DISK)
        self.pins = FakePins()
        self.num_loadable = 7
        self.images = SimpleNamespace(keys=list)
        self.spent = AdapterCosts(time.monotonic)

    def names(self) -> list[str]:
        return list(self.tiers)

    def __contains__(self, name: str) -> bool:
        return name in self.tiers

    def latest(self, name: str) -> SimpleNamespace:
        return self.get(name)

    def get(self, name: str) -> SimpleNamespace:
        name = name.removesuffix("@1")
        if name not in self.tiers:
            raise UnknownAdapter(name)
        part = AdapterPart(rank=4, scale=1.0, layers=(0,), targets=("q_proj",))
        manifest = AdapterManifest(
            Path("/adapters") / name, (part,), content_hash="0" * 64, no_effect=False, modules=TINY_PATHS
        )
        return SimpleNamespace(
            name=name,
            version=1,
            label="1",
            rank=4,
            manifest=manifest,
            pages=[],
            layout=SimpleNamespace(num_pages=2),
            uses=3,
            references=0,
            load_seconds=0.25,
            num_overflows=None,
        )

    def __len__(self) -> int:
        return len(self.tiers)

    def registered(self) -> list[tuple[str, SimpleNamespace]]:
        return [(name, self.get(name)) for name in self.tiers]

    def cached(self) -> list[tuple[str, SimpleNamespace]]:
        return [each for each in self.registered() if self.tiers[each[0]] is not Tier.DISK]

    def resident(self) -> list[SimpleNamespace]:
        return []

    def kept(self, name: str) -> list[str]:
        return []

    def versions(self) -> list[SimpleNamespace]:
        return [self.get(name) for name in self.names()]

    def tier(self, adapter: SimpleNamespace) -> Tier:
        return self.tiers[adapter.name]


class FakeEngine:
    """The base model repeats the prompt, adapters reverse it; then comes the end token.

    The token is always the most likely one, at -0.5; the next ids follow at -1.5, -2.5, …; prompts score the same.
    `gate`, when cleared, holds up every step. `fail_steps` makes that many steps raise; a prompt with the token
    `POISON` ends with an error output. With `refuse_from` requests running, no more are taken.
    """

    POISON = 0
    config = SimpleNamespace(max_num_seqs=32, max_adapters_per_step=None)
    block_tokens = 16
    executor = ExecutorBase()

    def __init__(self, adapters: list[str], max_model_len: int = 512) -> None:
        self.model = SimpleNamespace(
            vocab_size=300,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            window=None,
            expert_share=0.0,
            limits=None,
            why_blind="this engine is a fake",
            image_token=None,
            image_marks=(),
        )
        self.store = FakeStore(adapters)
        self.adapters = SimpleNamespace(quarantine={}, paused=set())
        self.modes = None
        self.pool = PagePool(101)
        self.prefix = SimpleNamespace(num_blocks=Counter())
        self.disk = None
        self.samples = StepSamples()
        self.gate = threading.Event()
        self.gate.set()
        self.fail_steps = 0
        self.step_error: Exception | None = None  # of every step, if any
        self.refuse_from: int | None = None
        self.fail_aborts = False
        self.accounts_match = True
        self.closed = False
        self.woken = threading.Event()
        self.step_seconds = 0.0
        self.num_cached_tokens = 0
        self.asked: list[Request] = []
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.steps = 0
        self._generated = 0
        self._last: StepInfo | None = None

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, tiers: Collection[Medium] = ()) -> int:
        return 0

    def reset_image_rows(self) -> int:
        return 0

    def add_request(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        if request.adapter_name is not None:
            try:
                request.bound = self.store.get(request.adapter_name)
            except UnknownAdapter:
                raise InvalidRequest("model", f"no adapter {request.adapter_name}") from None
        if not 0 < request.num_prompt_tokens < self.model.max_model_len:
            raise InvalidRequest("prompt", f"the prompt has {request.num_prompt_tokens} tokens")
        if any(not 0 <= token < self.model.vocab_size for token in request.token_ids):
            raise InvalidRequest("prompt", "a token id is outside the vocabulary")
        if request.params.max_tokens is None:  # as the engine does
            room = self.model.max_model_len - request.num_prompt_tokens
            request.params = replace(request.params, max_tokens=room)
        if self.refuse_from is not None and len(self.running) >= self.refuse_from:
            raise Overloaded("too many requests wait", 2.5)
        self.asked.append(request)
        self.running[request.id] = (request, self.answer(request))

    def check_room(self, tenant: str, adapter_name: str | None, count: int) -> None:
        if self.refuse_from is not None and len(self.running) + count > self.refuse_from:
            raise Overloaded("too many requests wait", 2.5)

    def answer(self, request: Request) -> list[int]:
        echo = [token for token in request.token_ids if token != BOS]
        return echo if request.adapter_name is None else echo[::-1]

    def abort(self, request_id: str) -> bool:
        if self.fail_aborts:
            raise RuntimeError("can't abort")
        self.aborted.append(request_id)
        return self.running.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.running)

    def wake(self) -> None:
        self.woken.set()

    def check_when_idle(self) -> None:
        if not self.accounts_match and not self.running:
            raise IntegrityError("page 7 has two owners")

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.get_ident())
        self.gate.wait(10)
        time.sleep(self.step_seconds)
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("a kernel went wrong")
        if self.step_error is not None:
            raise self.step_error
        self.steps += 1
        adapters = {request.adapter_name for request, _ in self.running.values()} - {None}
        self._last = StepInfo(self.steps, len(self.running), len(adapters), len(self.running))
        outputs = []
        for request, answer in list(self.running.values()):
            outputs.append(self.advance(request, answer))
            if outputs[-1].finish_reason is not None:
                del self.running[request.id]
        return outputs

    def advance(self, request: Request, answer: list[int]) -> RequestOutput:
        if self.POISON in answer:
            return RequestOutput(request.id, (), FinishReason.ERROR, error="poisoned", step=self._last)
        done = request.num_output_tokens
        token = answer[done] if done < len(answer) else EOS
        request.token_ids.append(token)
        self._generated += 1
        reason = stop = None
        if token in request.params.stop_token_ids or (token == EOS and not request.params.ignore_eos):
            reason, stop = FinishReason.STOP, token
        elif request.num_output_tokens >= self.limit(request):
            reason = FinishReason.LENGTH
        params = request.params
        prompt = None
        if done == 0 and params.prompt_logprobs is not None:
            prompt = tuple(
                self.score(t, params.prompt_logprobs) for t in request.token_ids[1 : request.num_prompt_tokens]
            )
        return RequestOutput(
            request.id,
            (token,),
            reason,
            stop,
            step=self._last,
            num_cached_tokens=self.num_cached_tokens if done == 0 else 0,
            logprobs=() if params.logprobs is None else (self.scored(token, params),),
            prompt_logprobs=prompt,
            queue_seconds=2.0**-20 if done == 0 else None,
            num_preemptions=min(done, 2),
        )

    def limit(self, request: Request) -> int:
        room = self.model.max_model_len - request.num_prompt_tokens
        return room if request.params.max_tokens is None else min(request.params.max_tokens, room)

    def scored(self, token: int, params: RequestParams) -> TokenLogprobs:
        if not (named := params.logprob_token_ids):
            return self.score(token, params.logprobs or 0)
        return TokenLogprobs(token, -0.5, ((token, -0.5), *((one, -7.0) for one in named if one != token)))

    @staticmethod
    def score(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.5, tuple((token + i, -0.5 - i) for i in range(count)))

    @property
    def scheduler(self) -> SimpleNamespace:
        """Its running requests, without pages of their own."""
        running = Running()
        for request, _ in list(self.running.values()):
            running.append(request)
        policy = SimpleNamespace(standing=lambda tenant: 0.0)
        lifecycle = SimpleNamespace(service=SimpleNamespace(policy=policy))
        return SimpleNamespace(running=running, waiting=[], eligible_adapters=None, lifecycle=lifecycle)

    def stats(self) -> EngineStats:
        busy = len(self.running)
        return EngineStats(
            num_running=busy,
            num_waiting=0,
            num_pages=100,
            num_free_pages=100 - busy,
            num_kv_pages=busy,
            num_adapter_pages=0,
            num_cached_pages=0,
            num_steps=self.steps,
            num_preemptions=0,
            num_generated_tokens=self._generated,
            num_adapter_hits=0,
            num_adapter_loads=0,
            num_streamed_loads=0,
            num_adapter_evictions=0,
            num_prefix_hit_tokens=0,
            num_prefix_query_tokens=0,
            last_step=self._last,
        )

    def close(self) -> None:
        self.closed = True


class Teller(FakeEngine):
    """Says `text`, whatever it is asked; first each of `texts`, in turn."""

    text = ""

    def __init__(self, adapters: list[str], max_model_len: int = 4096) -> None:
        super().__init__(adapters, max_model_len)
        self.texts: list[str] = []

    def answer(self, request: Request) -> list[int]:
        return list((self.texts.pop(0) if self.texts else self.text).encode())

    @property
    def prompt(self) -> str:
        """The text of the prompt that came last."""
        request = self.asked[-1]
        return bytes(token for token in request.token_ids[: request.num_prompt_tokens] if token < BOS).decode()


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def byte_level_backend() -> Backend:
    """A token per byte, two special tokens, and tokens whose bytes begin or end within a character."""
    letters = byte_characters()
    pieces = (b" \xe2", b"\x82\xac!", b"abc", b"ab", b"\xf0\x9f", b"\x98\x80b")  # decoded only: there are no merges
    spelt = [*letters, "<bos>", "<eos>", *("".join(letters[byte] for byte in piece) for piece in pieces)]
    vocab = {token: index for index, token in enumerate(spelt)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return backend


@pytest.fixture(scope="session")
def pretrained() -> PreTrainedTokenizerFast:
    """The tokenizer of transformers that the server's is made from."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def tokenizer(pretrained: PreTrainedTokenizerFast) -> Tokenizer:
    return Tokenizer(pretrained)


@pytest.fixture(scope="session")
def read_events() -> Callable[[httpx.Response], list[dict[str, Any]]]:
    """Reads the JSON events of a stream and checks the framing."""

    def read(response: httpx.Response) -> list[dict[str, Any]]:
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.endswith("data: [DONE]\n\n")
        frames = response.text.split("\n\n")
        assert frames.pop() == "" and frames.pop() == "data: [DONE]"
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    return read


@dataclass
class Live:
    """A server under test."""

    url: str
    engine: FakeEngine
    worker: EngineWorker
    client: httpx.Client = field(repr=False)
    server: HttpServer = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)
    app: Starlette = field(repr=False)

    def post(self, path: str = "/v1/completions", /, **body: object) -> httpx.Response:
        return self.client.post(path, json=body)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.005)


@contextmanager
def live_server(
    engine: FakeEngine,
    tokenizer: Tokenizer,
    max_body_bytes: int = 1 << 20,
    adapter_roots: tuple[Path, ...] = (),
    wrap: Callable[[Any], Any] = lambda app: app,
    settings: dict[str, Any] | None = None,
    defaults: SamplingDefaults | None = None,
    tracer: Tracer | None = None,
) -> Iterator[Live]:
    """settings: those of the server that are not the default. defaults: sampling parameters of requests."""
    worker = EngineWorker(lambda: engine)
    worker.start()
    usual = {"model": "/models/base", "max_prompts": 8, "grace_seconds": 2}
    named = {"max_body_bytes": max_body_bytes, "adapter_roots": adapter_roots}
    chosen = Settings(**{**usual, **named, **(settings or {})})
    recorder = None if chosen.record is None else Recorder(chosen.record)
    usage_file = None if chosen.usage_file is None else UsageFile(chosen.usage_file)
    telemetry = Telemetry(None, recorder, tracer, usage_file)
    publisher = kv_publisher_of(worker, chosen)
    app = create_app(worker, tokenizer, chosen, defaults or SamplingDefaults(), publisher, telemetry)
    with bind("127.0.0.1", 0, chosen.send_seconds) as bound, ExitStack() as stack:
        listeners = [bound]
        if chosen.unix_socket is not None:
            listeners.append(stack.enter_context(unix_listener(chosen.unix_socket)))
        server = http_server(app, chosen)
        served, loops = wrap(app), []

        async def noting_the_loop(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                loops.append(asyncio.get_running_loop())
            await served(scope, receive, send)

        server.config.app = noting_the_loop
        thread = threading.Thread(target=server.run, args=(listeners,), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.002)
        try:
            with httpx.Client(base_url=url_of(bound), timeout=60) as client:
                yield Live(url_of(bound), engine, worker, client, server, loops[0], app)
        finally:
            if isinstance(engine, FakeEngine):
                engine.gate.set()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server did not end"


@contextmanager
def telling_server(model: Path, template: str, max_model_len: int = 4096) -> Iterator[Live]:
    """A server named `base` with a `Teller`, whose tokens are bytes, and a chat template. model: an empty directory."""
    save_tokenizer(model)
    backend = byte_level_backend()
    own = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )
    settings = {"model": model, "served_model_name": "base"}
    with live_server(Teller([], max_model_len=max_model_len), Tokenizer(own), settings=settings) as live:
        yield live


@pytest.fixture
def fake_engine() -> FakeEngine:
    return FakeEngine(["alice", "bob"])


@pytest.fixture(scope="session")
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], list[tuple]]:
    """`calls_of(thing, method)`: the arguments of each call from now on, once it has returned."""

    def record(thing: object, method: str) -> list[tuple]:
        plain, calls = getattr(thing, method), []

        def recorded(*args: object) -> object:
            result = plain(*args)
            calls.append(args)
            return result

        monkeypatch.setattr(thing, method, recorded)
        return calls

    return record


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Live]:
    """One server for the tests of a module that don't disturb each other."""
    with live_server(FakeEngine(["alice", "bob"]), tokenizer) as live:
        yield live


@pytest.fixture
def start(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """Starts servers of a test's own."""
    with ExitStack() as stack:
        yield lambda engine, **options: stack.enter_context(live_server(engine, tokenizer, **options))


@pytest.fixture(scope="module")
def start_one(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """The same, for a server that a module's tests share."""
    with ExitStack() as stack:
        yield lambda engine, **options: stack.enter_context(live_server(engine, tokenizer, **options))
