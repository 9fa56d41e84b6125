"""Chat templates: rendered as transformers renders them, and shut in their sandbox."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fastdecode_rdma.chat_template import ChatTemplate
from fastdecode_rdma.errors import ConfigError

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
[{{ message['role'] }}] {{ message['content'] | trim }}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- if add_generation_prompt %}
{% generation %}[assistant]{% endgeneration %}
{%- endif %}"""
USER = [{"role": "user", "content": " Grüße <b> "}]


def render(template: str, messages=USER, **options) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(messages, **options)


def test_tools_and_special_tokens():
    messages = [*USER, {"role": "system", "content": "x"}]
    text = render(TEMPLATE, messages, documents=[{"title": "Ü", "a": "<"}])
    assert text == '<s>[user] Grüße <b>[system] x[{"title": "Ü", "a": "<"}][assistant]'
    assert render(TEMPLATE, messages, add_generation_prompt=False).endswith("[system] x")


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_as_transformers(count, add_generation_prompt):
    messages = [{"role": f"r{i}", "content": f"\n text {i} 😀 "} for i in range(count)]
    documents = [{"title": "Größe", "text": "a & b"}]
    theirs, _ = render_jinja_template(
        [messages],
        documents=documents,
        chat_template=TEMPLATE,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )
    ours = render(
        TEMPLATE, messages, documents=documents, add_generation_prompt=add_generation_prompt
    )
    assert [ours] == theirs


def test_tojson_takes_its_options_and_keeps_order():
    assert '[\n  {\n    "name": "Ü"' in render(TEMPLATE, tools=[{"name": "Ü", "a": 1}])


@pytest.mark.parametrize(
    "messages", [[{"role": "bad", "content": ""}], [{"content": "x"}], ["hello"], [{"role": "a"}]]
)
def test_refused_messages_are_typed_errors(messages):
    template = TEMPLATE.replace("| trim", "+ ''")  # a missing content cannot be added to
    with pytest.raises(ConfigError):
        render(template, messages)


@pytest.mark.parametrize("evil", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_template_cannot_reach_out_of_its_sandbox(evil):
    with pytest.raises(ConfigError, match="refused"):
        render(evil)


def test_broken_template():
    with pytest.raises(ConfigError, match="Jinja"):
        ChatTemplate("{% if %}", {})


def test_strftime_now():
    year = render("{{ strftime_now('%Y') }}")
    assert year.isdigit() and len(year) == 4
