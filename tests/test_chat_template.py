"""Chat templates of many styles, rendered exactly as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fastdecode_rdma.chat import Chat
from fastdecode_rdma.chat_template import ChatTemplate
from fastdecode_rdma.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# In the style of well-known families: what they compute with, in our own words.
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}
    {%- else %}{%- set date_string = "1 Jan 2024" %}{%- endif %}
{%- endif %}
{%- set system = "" %}
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == "tool" or "tool_calls" in message) %}
        {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" }}
        {{- message["content"] | trim + "<|eot_id|>" }}
    {%- elif "tool_calls" in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "Signatures within <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and message.content is string %}
        {%- set ns.found = true %}{%- set ns.last = (messages | length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for message in rest if message["role"] != "tool" and "tool_calls" not in message %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
{%- endfor %}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif "tool_calls" in message %}
        {%- for call in message["tool_calls"] %}
            {{- "[TOOL_CALLS] [" + call.function | tojson + "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = (messages[0]['content'] if messages[0]['content'] is string
                      else messages[0]['content'][0]['text']) + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
PHI = """{% for message in messages %}{% if message['role'] == 'system' and message['tools'] \
%}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + \
'<|/tool|><|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' }}
{{ message['content'] + '<|end|>' }}
{% if loop.index0 > 40 %}{% break %}{% endif %}
{% endif %}{% endfor %}
{% if documents %}<|doc|>{% for d in documents %}{{ d.title | upper }}: {{ d['text'] }};{% endfor %}
{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
TRAINING = """{% set where = 'outside' %}{% for message in messages %}
{%- if message.role == 'assistant' %}{% generation %}{% set where = 'inside' %}
{{- message.content }}|{% endgeneration %}{% else %}{{ message.content }}
    {% endif %}{{ where }}
{% endfor %}"""
TEMPLATES = {
    "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI,
    "training": TRAINING,
}  # fmt: skip

USER = {"role": "user", "content": " Grüße <b> & 'q' \"d\" 😀\n"}
REPLY = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes. "}
TOOL = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": "Größe <&> \u2028",
        "parameters": {"type": "object", "properties": {"z": {"type": "number"}, "a": {}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "wetter", "arguments": {"z": 1.5}}}],
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": " Be brief.\n"}, USER],
    "turns": [USER, REPLY, {"role": "user", "content": "more"}],
    "long": [{"role": ("user", "assistant")[i % 2], "content": f"t{i} "} for i in range(45)],
    "tools": [
        USER,
        CALL,
        {"role": "tool", "content": "20"},
        REPLY,
        {"role": "user", "content": "ok"},
    ],
}


compiled = cache(ChatTemplate)


def render(template: str, messages: Any = None, **options: Any) -> str:
    return compiled(template).render(Chat(messages or [USER], **options), SPECIAL)


@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]], ids=["", "tool", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_the_one_of_transformers(name: str, tools: list[dict[str, Any]] | None) -> None:
    documents = [{"title": "Größe", "text": "a & b"}]
    for chat in CHATS.values():
        for add in (True, False):
            for more in ({}, {"enable_thinking": False, "date_string": "x"}):
                theirs, _ = render_jinja_template(
                    [[dict(message) for message in chat]], tools=tools, documents=documents,
                    chat_template=TEMPLATES[name], add_generation_prompt=add, **SPECIAL, **more,
                )  # fmt: skip
                ours = render(
                    TEMPLATES[name], chat, tools=tools, documents=documents,
                    add_generation_prompt=add, chat_template_kwargs=more,
                )  # fmt: skip
                assert [ours] == theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_open_last_message_is_the_one_of_transformers(name: str) -> None:
    for content in ("The answer is", "The answer is ", "a\n"):
        chat = [USER, {"role": "assistant", "content": content}]
        theirs, _ = render_jinja_template(
            [[dict(message) for message in chat]], chat_template=TEMPLATES[name],
            continue_final_message=True, **SPECIAL,
        )  # fmt: skip
        ours = render(TEMPLATES[name], chat, continue_final_message=True)
        assert [ours] == theirs
        assert ours.rstrip().endswith(content.rstrip())


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_ids_are_those_of_transformers(
    model: str,
    request: pytest.FixtureRequest,
    hf_tokenizer: Callable[[Path], Any],
    real_tokenizer: Callable[[str], Tokenizer],
) -> None:
    ours = real_tokenizer(model)
    theirs = hf_tokenizer(request.getfixturevalue(f"{model}_dir"))
    templates = list(TEMPLATES.values())
    if ours.chat_template is not None:
        templates.append(None)
    for template in templates:
        for chat in (CHATS["one"], CHATS["turns"], CHATS["long"]):
            for tools in (None, [TOOL]):
                ids = ours.encode_chat(Chat(chat, tools=tools, chat_template=template))
                expected = theirs.apply_chat_template(
                    chat, tools=tools, chat_template=template, add_generation_prompt=True,
                    tokenize=True, return_dict=False,
                )  # fmt: skip
                assert ids == expected
                assert template in (None, QWEN, PHI, TRAINING) or ids[0] == ours.bos_token_id
                assert ids[1] != ours.bos_token_id or ours.bos_token_id != ids[0]


def test_tojson_is_plain_json() -> None:
    value = [{"b": "Ü<>&'\u2028", "a": 1}]
    assert render("{{ tools | tojson }}", tools=value) == json.dumps(value, ensure_ascii=False)
    text = render("{{ tools | tojson(indent=2, sort_keys=true) }}", tools=value)
    assert text == json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
    text = render("{{ tools | tojson(ensure_ascii=true, separators=(',', ':')) }}", tools=value)
    assert text == json.dumps(value, separators=(",", ":"))


def test_strftime_now() -> None:
    year = render("{{ strftime_now('%Y') }}")
    assert year.isdigit() and len(year) == 4
