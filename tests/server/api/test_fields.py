"""Every field of every peer is obeyed or refused; the few that are let pass have a reason."""

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from chorus.core.requests.request_params import RequestParams
from chorus.server.api.chat_request import ChatCompletionRequest, ChatMessage
from chorus.server.api.completion_request import CompletionRequest
from chorus.server.api.fields import ALIASES, HARMLESS, INSTEAD, NEUTRAL, REFUSED_INSIDE

pytestmark = pytest.mark.wide

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BODIES = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": USER}}

VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
    continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos include_reasoning
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs
    max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_processor_kwargs model n
    parallel_tool_calls presence_penalty priority prompt prompt_embeds prompt_logprobs reasoning_effort
    repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_prompt_text
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
    structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking guided_json guided_regex
    guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern logits_processors best_of
"""
SGLANG = """
    adapter_id best_of bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
    continue_final_message custom_labels custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank
    ebnf echo extra_key frequency_penalty ignore_eos images_config input_ids json_schema logit_bias logprobs lora_path
    max_completion_tokens max_dynamic_patch max_tokens max_new_tokens messages min_dynamic_patch min_p min_tokens
    min_new_tokens model n ngram_corpus_id no_stop_trim parallel_tool_calls presence_penalty priority prompt
    reasoning reasoning_effort regex repetition_penalty response_format return_cached_tokens_details
    return_hidden_states return_meta_info return_prompt_token_ids return_routed_experts return_token_ids rid
    routed_dp_rank routed_experts_start_len sampling_seed seed separate_reasoning session_id session_params
    skip_special_tokens stop stop_regex stop_token_ids stream stream_options stream_reasoning structural_tag suffix task
    temperature tool_choice tools top_k top_logprobs top_p use_audio_in_video user
"""
LORAX = """
    adapter_id adapter_source api_token apply_chat_template best_of decoder_input_details details do_sample
    ignore_eos_token max_new_tokens merged_adapters repetition_penalty response_format return_full_text
    return_k_alternatives seed stop temperature top_k top_p truncate typical_p watermark
"""
LLAMA_CPP = """
    cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    dynatemp_range frequency_penalty grammar id_slot ignore_eos json_schema logit_bias lora min_keep min_p mirostat
    mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs post_sampling_probs
    presence_penalty repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers seed
    sse_ping_interval stop stream t_max_predict_ms temperature timings_per_token top_k top_n_sigma top_p typical_p
    xtc_probability xtc_threshold
"""
OPENAI = {
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
}


def own(path):
    return (CompletionRequest if path == COMPLETIONS else ChatCompletionRequest).model_fields


@pytest.mark.parametrize("fields", [VLLM, SGLANG, LORAX, LLAMA_CPP, " ".join(OPENAI)])
def test_every_field_of_a_peer_is_known(fields):
    known = {*own(COMPLETIONS), *own(CHAT), *ALIASES, *HARMLESS, *NEUTRAL}
    assert set(fields.split()) - known == set()


def test_the_lists_do_not_contradict_each_other():
    assert not HARMLESS.keys() & NEUTRAL.keys() and not ALIASES.keys() & (HARMLESS.keys() | NEUTRAL.keys())
    assert all(name in own(CHAT) or name in own(COMPLETIONS) for name in ALIASES.values())
    assert INSTEAD.keys() <= NEUTRAL.keys()
    assert all(HARMLESS.values())


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in BODIES for name in sorted(NEUTRAL.keys() - own(path).keys())]
)
def test_what_cannot_be_obeyed_is_refused_by_name_and_taken_where_it_asks_for_nothing(shared, path, name):
    response = shared.post(path, **BODIES[path], **{name: {"asks": ["for something"]}})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name and error["code"] == "unsupported_parameter" and name in error["message"]
    for nothing in (None, *NEUTRAL[name]):
        assert shared.post(path, **BODIES[path], **{name: nothing}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_harmless_fields_are_taken(shared, path):
    assert shared.post(path, **BODIES[path], **dict.fromkeys(HARMLESS, "x")).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_refused_by_name(shared, path):
    error = shared.post(path, **BODIES[path], temprature=0).json()["error"]
    assert error["param"] == "temprature" and "temperature" in error["message"] and error["code"] == "unknown_parameter"
    error = shared.post(path, **BODIES[path], **{"y" * 5000: 1}).json()["error"]
    assert len(error["message"]) < 300 and len(error["param"]) <= 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"a b": "x"}, "messages[1].a b"),
        ({f"field{number}": "x" for number in range(17)}, "messages[1].field16"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "txt": 1}]},
            "messages[1].content[1].txt",
        ),
    ],
)
def test_unknown_fields_inside_messages_are_refused_by_name(shared, message, param):
    response = shared.post(CHAT, messages=[*USER, {"role": "assistant", "content": "a", **message}])
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "unknown_parameter", response.text
    assert error["param"] == param and param in error["message"]
    nothing = {name: None for name in message if name != "content"}
    assert shared.post(CHAT, messages=[{"role": "user", "content": "a", **nothing}]).status_code == 200


@pytest.mark.parametrize("field", REFUSED_INSIDE)
def test_fields_of_messages_that_change_answers_elsewhere_are_refused(shared, field):
    response = shared.post(CHAT, messages=[*USER, {"role": "assistant", "content": "a", field: True}])
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "unsupported_parameter", response.text
    assert error["param"] == f"messages[1].{field}" and REFUSED_INSIDE[field] in error["message"]


def test_other_fields_of_messages_are_the_templates_and_the_header_names_what_it_ignores(shared):
    response = shared.post(CHAT, messages=[{"role": "user", "content": "a", "weight": 1, "id": "m1", "date": None}])
    assert response.status_code == 200 and response.headers["x-ignored-fields"] == "messages.id, messages.weight"


def test_fields_of_messages_reach_the_template_in_their_order():
    """Not in that of a set, which differs from process to process: a template may write them as JSON."""
    given = dict.fromkeys(("thinking", "name", "tool_call_id", "reasoning", "reasoning_content"), "a")
    assert [*ChatMessage(role="tool", content="", **given).for_template()][: len(given)] == [*given]


def test_what_answers_bring_along_may_be_sent_back(shared):
    message = shared.post(CHAT, messages=USER).json()["choices"][0]["message"]
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": []}]
    again = [*USER, {**message, "annotations": []}, {"role": "user", "content": parts, "name": "x"}]
    assert shared.post(CHAT, messages=again).status_code == 200


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("stream_options.chunks", {"stream": True, "stream_options": {"include_usage": True, "chunks": 1}}),
        ("response_format", {"response_format": {"type": "text", "strict": True}}),
        ("structured_outputs.jsn", {"structured_outputs": {"jsn": {}}}),
    ],
)
def test_unknown_fields_inside_options_are_refused_by_name(shared, field, body):
    response = shared.post(CHAT, messages=USER, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "value", "name", "expected"),
    [
        ("max_new_tokens", 3, "max_tokens", 3),
        ("n_predict", 3, "max_tokens", 3),
        ("max_completion_tokens", 3, "max_tokens", 3),
        ("min_new_tokens", 3, "min_tokens", 3),
        ("ignore_eos_token", True, "ignore_eos", True),
        ("sampling_seed", 7, "seed", 7),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_other_names_of_our_fields(shared, path, field, value, name, expected):
    shared.engine.asked.clear()
    response = shared.post(path, **BODIES[path], **{field: value})
    assert response.status_code == 200, response.text
    (asked,) = shared.engine.asked
    assert getattr(asked.params, name) == expected


@pytest.mark.parametrize("path", BODIES)
def test_two_names_of_one_field_must_agree(shared, path):
    assert shared.post(path, **BODIES[path], max_tokens=3, max_new_tokens=3).status_code == 200
    error = shared.post(path, **BODIES[path], max_tokens=3, max_new_tokens=4).json()["error"]
    assert error["param"] == "max_new_tokens" and "max_tokens" in error["message"]
    assert shared.post(COMPLETIONS, prompt="a", max_tokens=3, max_completion_tokens=4).status_code == 400
    assert len(shared.post(path, **BODIES[path], n_cmpl=2).json()["choices"]) == 2


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({}, "base"),
        ({"model": "base"}, "base"),
        ({"model": "alice"}, "alice"),
        ({"lora_path": "alice"}, "alice"),
        ({"model": "base", "lora_path": "alice"}, "alice"),
        ({"model": "alice", "lora_path": "alice"}, "alice"),
        ({"lora_path": ["alice"]}, "alice"),
        ({"lora_path": [None]}, "base"),
        ({"adapter_id": "alice"}, "alice"),
        ({"model": "base:alice"}, "alice"),
        ({"model": "base:"}, "base"),
        ({"model": "base", "lora_path": ""}, "base"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_an_adapter_by_any_of_its_names(shared, path, body, model):
    shared.engine.asked.clear()
    answer = shared.post(path, **BODIES[path], **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    assert shared.engine.asked[0].adapter_name == (None if model == "base" else model)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_path": "nobody"}, 404, "model"),
        ({"adapter_id": "nobody"}, 404, "model"),
        ({"model": "base:nobody"}, 404, "model"),
        ({"model": "alice", "lora_path": "bob"}, 400, "model"),
        ({"lora_path": ["alice", "bob"]}, 400, "lora_path"),
        ({"lora_path": "x" * 257}, 400, "lora_path"),
        ({"lora_path": "alice", "adapter_id": "bob"}, 400, "adapter_id"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_adapters_that_cannot_be_meant(shared, path, body, status, param):
    response = shared.post(path, **BODIES[path], **body)
    assert response.status_code == status and response.json()["error"]["param"] == param, response.text


def test_allowed_token_ids_reach_the_engine(shared):
    shared.engine.asked.clear()
    assert shared.post(prompt="hi", allowed_token_ids=[5, 6]).status_code == 200
    assert shared.engine.asked[0].params.allowed_token_ids == (5, 6)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_list_that_allows_nothing_is_refused(shared, path):
    """A client whose list turned out empty must not get an answer of any tokens, which vLLM does not give it either."""
    response = shared.post(path, **BODIES[path], allowed_token_ids=[])
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "allowed_token_ids" and "one token id" in error["message"]
    assert shared.post(path, **BODIES[path], allowed_token_ids=None).status_code == 200


def test_chat_leaves_an_unasked_length_to_the_engine(shared):
    shared.engine.asked.clear()
    assert shared.post(CHAT, messages=USER).status_code == 200
    assert shared.post(prompt="hi").status_code == 200
    chat, completion = shared.engine.asked
    assert chat.params.max_tokens == 512 - chat.num_prompt_tokens, "all that the engine has room for"
    assert completion.params.max_tokens == RequestParams().max_tokens == 16


def test_salt_and_tenant_reach_the_engine(start, fake_engine):
    key = "a-key-of-forty-characters-for-this-test-1"
    live = start(fake_engine, settings={"api_key": [key]})
    live.client.headers["authorization"] = f"Bearer {key}"
    for body in ({"prompt": "hi", "n": 2}, {"messages": USER}):
        fake_engine.asked.clear()
        live.post(CHAT if "messages" in body else COMPLETIONS, **body, cache_salt="pepper")
        ((tenant, salt),) = {(asked.tenant, asked.cache_salt) for asked in fake_engine.asked}
        assert tenant and key not in tenant and salt == "pepper"
    fake_engine.asked.clear()
    live.post(prompt="hi")
    assert fake_engine.asked[0].cache_salt == ""
