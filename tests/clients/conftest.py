"""A server that says recorded text, and one of the built-in model, both over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.text.tokenizer import Tokenizer

from ..conftest import quiet
from ..server.conftest import Live, Teller, byte_level_backend, live_server
from ..tiny_tokenizer import save_tokenizer

TEMPLATE = """\
{%- if tools -%}<tools>
{%- for tool in tools -%}{{ tool.function.name }},{%- endfor -%}
</tools>
{% endif -%}
{%- for m in messages -%}
<{{ m.role }}>{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor %}
{% endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""

CONTEXT = 1 << 20
"""Tokens of the server that says recorded text: long conversations of bytes."""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose engine says the recorded text that a test names, in the style of Hermes and Qwen3."""
    model = tmp_path_factory.mktemp("model")
    save_tokenizer(model)
    pretrained = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )
    settings = {
        "model": model,
        "served_model_name": "base",
        "enable_tokenizer_info_endpoint": True,
        "max_body_bytes": 8 << 20,
    }
    with live_server(Teller([], CONTEXT), Tokenizer(pretrained), settings=settings) as live:
        yield live


@pytest.fixture
def told(recorded: Live) -> Iterator[Live]:
    """The same, as one test has it: nothing is left to say from others."""
    engine = cast(Teller, recorded.engine)
    engine.text, engine.texts = "", []
    engine.asked.clear()
    yield recorded


@pytest.fixture(scope="session")
def builtin() -> Iterator[Live]:
    """A server of the built-in model, which repeats its input."""
    engine = Engine.from_config(EngineConfig(model=BUILTIN_MODEL, memory_bytes=16 << 20, threads=1))
    settings: dict[str, Any] = {"model": BUILTIN_MODEL, "enable_tokenizer_info_endpoint": True}
    with live_server(cast(Any, engine), Tokenizer.load(BUILTIN_MODEL), settings=settings) as live:
        yield live


@pytest.fixture(scope="session")
def scores_of() -> Callable[..., list[float]]:
    """`scores_of(text)`: transformers' log-probabilities of the text's tokens, after the begin token. `begun=False`:
    without it, of the tokens after the first.
    """
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(BUILTIN_MODEL, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODEL)

    @torch.inference_mode()
    def scores(text: str, *, begun: bool = True) -> list[float]:
        begin = [tokenizer.bos_token_id] if begun else []
        ids = torch.tensor([[*begin, *tokenizer.encode(text, add_special_tokens=False)]])
        logits = model(ids).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, ids[0, 1:, None])[:, 0].tolist()

    return scores
