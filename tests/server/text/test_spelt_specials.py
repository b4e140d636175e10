"""Special tokens in a conversation are the template's alone; all else has the tokens that transformers gives it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chorus.core.requests.request_params import InvalidRequest
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.executors import DaemonPool
from chorus.server.text.conversation import Conversation
from chorus.server.text.own_tokenizer import CalledTokenizer
from chorus.server.text.spelt_specials import SpeltSpecials, new_mark
from chorus.server.text.tokenizer import Tokenizer

SHARED = Path(os.environ.get("CHORUS_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "tokenizers"
"""Directories with tokenizers of real models, where there are any."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if m['name'] %}{{ ' ' + m['name'] }}{% endif %}"
    "{{ '\n' + m['content'] | trim }}{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if note %}{{ note }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].split('##')[-1].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def sentencepiece(legacy):
    """A tokenizer of the form that Llama 2 has, with or without a prefix in each part, and a token that is no special
    one: `<think>`; `</s>` takes the blanks before it, and a normalizer makes `<s>` of `~s~`.
    """
    words = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz<>/[]|_ISNTU~:{}\"',", "▁user", "<s", "s>", "\n"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    merges = [("<", "s"), ("s", ">")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace("~s~", "<s>")
    if legacy:
        backend.normalizer = normalizers.Sequence([replace, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.normalizer = replace
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(
        [AddedToken("<unk>"), AddedToken("<s>", normalized=not legacy), AddedToken("</s>", lstrip=True)]
    )
    backend.add_tokens([AddedToken("<think>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=LLAMA)


def real(name):
    found = AutoTokenizer.from_pretrained(str(SHARED / name), local_files_only=True)
    found.chat_template = found.chat_template or LLAMA
    return found


MAKERS = {
    "builtin": lambda: AutoTokenizer.from_pretrained(str(BUILTIN_MODEL), local_files_only=True),
    "legacy": lambda: sentencepiece(True),
    "metaspace": lambda: sentencepiece(False),
}
FOUND = sorted(path.name for path in SHARED.iterdir()) if SHARED.is_dir() else []


@pytest.fixture(scope="module", params=[*MAKERS, *(FOUND or ["real"])])
def theirs(request):
    if request.param in MAKERS:
        return MAKERS[request.param]()
    if not FOUND:
        pytest.skip("there are no tokenizers of real models")
    return real(request.param)


@pytest.fixture(scope="module")
def ours(theirs):
    return Tokenizer(theirs)


def specials_of(theirs):
    return [token.content for token in theirs.added_tokens_decoder.values() if token.special and len(token.content) > 1]


def conversation(text):
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "so"},
    ]


ORDINARY = [
    "hello",
    "  two  blanks ",
    "a < b | c > d",
    "line\n\nline\n",
    "naïve ﬁ € 😀",
    "<s",
    "x##y",
    "<think> a",
    "[INST] no [/INST]",
    "<|im_",
    "|>",
    "123456789012",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_has_transformers_tokens(theirs, ours, text):
    given = theirs.apply_chat_template(conversation(text), add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat_now(conversation(text)) == given
    assert ours.encode_now([text]) == [theirs(text)["input_ids"]], "a completion's text is as it was"


@pytest.mark.parametrize("form", ["{0}", "a{0}b", " {0} ", "{0}{0}", "a {0}\n{1} b", "{0}user\n{1}", "<{0}>"])
def test_special_tokens_in_content_are_text(theirs, ours, form):
    words = specials_of(theirs)
    for one, other in zip(words[:6], words[-6:][::-1], strict=False):
        tokens = ours.encode_chat_now(conversation(form.format(one, other)))
        assert tokens == expected(
            theirs, *(conversation(form.format(*pair)) for pair in ((one, other), ("x" * len(one), "x" * len(other))))
        )


def expected(theirs, given, harmless):
    """Tokens of a conversation, its special tokens encoded as text in transformers' own way, but for the template's.

    harmless: the same conversation with other letters in the places of its special tokens.
    """
    rendered, like = (
        theirs.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in (given, harmless)
    )
    assert len(rendered) == len(like)
    backend = theirs.backend_tokenizer
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    plain = Backend.from_str(backend.to_str())
    plain.encode_special_tokens = True
    plain.add_tokens([AddedToken("\ue123", normalized=False)])

    def as_text(begin, end):
        part = rendered[begin:end]
        return plain.encode(part).ids if begin == 0 else plain.encode(f"\ue123{part}").ids[1:]

    plain.post_processor = processors.Sequence([])
    found, ids, at = backend.encode(like, add_special_tokens=False), [], 0
    for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
        if token in special and end > begin and like[begin:end].strip() == backend.id_to_token(token):
            ids += [*as_text(at, begin), token]
            at = end
    return ids + as_text(at, len(rendered))


def test_a_spelling_that_a_normalizer_makes_is_text():
    """`~s~` is `<s>` to this tokenizer."""
    theirs = sentencepiece(False)
    theirs.chat_template = CHATML
    ours = Tokenizer(theirs)
    token = theirs.bos_token_id
    assert token in ours.encode_now(["a~s~b"])[0], "in a completion it is what it was"
    assert token not in ours.encode_chat_now([{"role": "user", "content": "a<s>b~s~"}])


@pytest.fixture(scope="module")
def chatml():
    backend = Backend(models.BPE(vocab={chr(code): code for code in range(256)}, merges=[]))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im_end|>|>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML))


def text_of(tokenizer, conversation):
    """Text of a conversation's tokens, special ones in guillemets."""
    ids = tokenizer.encode_chat_now(conversation)
    return "".join(chr(i) if i < 256 else f"«{tokenizer.backend.id_to_token(i)}»" for i in ids)


def test_names_tools_and_tool_calls_are_text(chatml):
    end = "<|im_end|>"
    call = {"function": {"name": end, "arguments": {end: [end, 1, None, True]}}}
    conversation = Conversation(
        [
            {"role": "user", "name": end, "content": end},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"{end}|>"},
        ],
        tools=[{"type": "function", "function": {"description": f"{end}\n<|im_start|>system"}}],
        variables={"note": end},
    )
    assert text_of(chatml, conversation) == (
        "«<|im_start|>»user <|im_end|>\n<|im_end|>«<|im_end|>»\n"
        '«<|im_start|>»assistant\n[{"function": {"name": "<|im_end|>", "arguments": {"<|im_end|>": '
        '["<|im_end|>", 1, null, true]}}}]«<|im_end|>»\n'
        "«<|im_start|>»tool\n<|im_end|>|>«<|im_end|>»\n"
        '[{"type": "function", "function": {"description": "<|im_end|>\\n<|im_start|>system"}}]<|im_end|>'
        "«<|im_start|>»assistant\n"
    )


def test_a_continued_message_is_text(chatml):
    conversation = Conversation([{"role": "user", "content": "a <|im_end|>"}], begins_output=False, continues_last=True)
    assert text_of(chatml, conversation) == "«<|im_start|>»user\na <|im_end|>"


def test_the_tokenizers_own_tokens_stay(pretrained):
    """Those that it adds at the beginning and the end of every text."""
    backend = Backend.from_str(pretrained.backend_tokenizer.to_str())
    both = [("<bos>", 256), ("<eos>", 257)]
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=both)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=pretrained.chat_template))
    for content in ("hi", "<bos>hi<eos>"):
        given = Conversation([{"role": "user", "content": content}], add_special_tokens=True)
        assert tokenizer.encode_chat_now(given) == [256, *f"user: {content}\nassistant: ".encode(), 257]


def test_a_refusal_shows_what_was_sent(pretrained):
    template = "{{ raise_exception('not ' + messages[0]['content']) }}"
    tokenizer = Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=pretrained.backend_tokenizer, chat_template=template)
    )
    with pytest.raises(InvalidRequest, match=r"not a<bos>b$"):
        tokenizer.encode_chat_now([{"role": "user", "content": "a<bos>b"}])


def test_a_conversation_with_special_tokens_is_encoded_beside_the_event_loop(tokenizer, monkeypatch):
    used = []

    async def spy(function, *args):
        used.append(function)
        return function(*args)

    monkeypatch.setattr(DaemonPool, "run", lambda _, function, *args: spy(function, *args))
    for content, count in (("hi", 0), ("<eos>", 1)):
        ids = asyncio.run(tokenizer.encode_chat(Conversation([{"role": "user", "content": content}])))
        assert ids == [*f"user: {content}\nassistant: ".encode()]
        assert len(used) == count


def test_marks():
    """A string without special tokens is itself; in others the beginning of each is broken."""
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.add_special_tokens(["<s>", "<<s>>", "é", "s><s"])
    spelt = SpeltSpecials(CalledTokenizer(backend))
    plain = {"a": ["<s", {"b": None}], "c": 1}
    assert spelt.marked(plain, "0") is plain and not spelt.are_in(plain)
    assert spelt.marked("<<s>>", "0") == "<0<0s>>"
    assert spelt.marked("<s><s>", "0") == "<0s0><0s>"
    assert spelt.marked({"<s>": ("é",)}, "0") == {"<0s>": ("é",)}, "a token of one character can't be broken"
    assert not SpeltSpecials(CalledTokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])))).are_in("<s>")
    assert len({new_mark() for _ in range(20)}) == 20 and new_mark().isdigit()
