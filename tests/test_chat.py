"""What a chat may hold, what its template sees of it, and what it is kept from."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdecode_rdma.chat import Chat
from fastdecode_rdma.chat_template import ChatTemplate, ChatTemplates
from fastdecode_rdma.errors import ConfigError

USER = {"role": "user", "content": "hi"}
TEXT = "{{ messages[0].content }}"
BOTH = """{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}
{%- else %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def render(template: str, messages: Any = None, **options: Any) -> str:
    return ChatTemplate(template).render(Chat(messages or [USER], **options), {"bos_token": "<s>"})


PARTS = [{"type": "text", "text": "one "}, "two"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content }}", "one \ntwo"),  # knows text only
        ("{{ messages[0]['content'] | trim }}", "one \ntwo"),
        ("{% for p in messages[0].content.split('e') %}{{ p }}.{% endfor %}", "on. \ntwo."),
        ("{% for p in messages[0].content %}{{ p.text }}|{% endfor %}", "one |two|"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.type }}{% endfor %}{% endfor %}",
         "texttext"),
        ("{% set c = messages[0].content %}{% for p in c[1:] %}{{ p.text }}{% endfor %}", "two"),
        ("{% macro show(content) %}{% for p in content %}{{ p.text }};{% endfor %}{% endmacro %}"
         "{{ show(messages[0].content) }}", "one ;two;"),
        (BOTH, "[user] one two[assistant]"),
    ],
)  # fmt: skip
def test_parts_go_to_templates_that_know_them(template: str, text: str) -> None:
    assert render(template, [{"role": "user", "content": PARTS}]) == text


def test_an_open_last_message_of_parts() -> None:
    chat = [{"role": "user", "content": PARTS}]
    assert render(BOTH, chat, continue_final_message=True) == "[user] one two"
    assert render(TEXT, chat, continue_final_message=True) == "one \ntwo"
    assert chat[0]["content"] == PARTS  # the caller's messages are as they were


class Color(str, enum.Enum):
    RED = "red"

    def __str__(self) -> str:
        return "Color"


@dataclasses.dataclass
class Point:
    x: int
    y: np.float32


def test_templates_see_plain_data() -> None:
    """Enums, numpy's numbers and dataclasses as what they hold; None as what is left out."""
    message = {"role": "user", "content": None, "a": Color.RED, "b": Point(1, np.float32(0.5))}
    template = "{{ messages[0].a }}{{ messages[0].b | tojson }}{{ messages[0].content }}."
    assert render(template, [message]) == 'red{"x": 1, "y": 0.5}.'
    flags = {"yes": np.bool_(True), "no": np.bool_(False)}
    template = "{{ yes }}{% if no %}!{% endif %}"
    assert render(template, chat_template_kwargs=flags) == "True"
    with pytest.raises(ConfigError, match=r"message 0: b'x' is no plain data"):
        render(template, [{"role": "user", "content": "", "x": b"x"}])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="refused"):
        render(template, [{"role": "user", "content": "", "x": endless}])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_all_its_names(name: str) -> None:
    chat = [{"role": "assistant", "content": "", name: "hm"}]
    assert render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", chat) == "hmhm"


def test_kwargs_may_replace_special_tokens_only() -> None:
    assert render("{{ bos_token }}", chat_template_kwargs={"bos_token": "B"}) == "B"
    with pytest.raises(ConfigError, match="holds 'tools'; it is an argument itself"):
        render("", chat_template_kwargs={"tools": []})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "messages must be a list of dicts, got 'hi'"),
        ({"messages": USER}, "messages must be a list of dicts"),
        ({"messages": [USER, "hello"]}, "message 1 must be a dict, got 'hello'"),
        ({"messages": [{"content": "x"}]}, "message 0 needs a 'role'"),
        ({"tools": "x"}, "tools must be a list of dicts, got 'x'"),
        ({"tools": [len]}, r"tool 0 is a function; give its JSON schema \(transformers"),
        ({"documents": ["x"]}, "document 0 must be a dict"),
        ({"chat_template": 3}, "chat_template must be text, got 3"),
        ({"chat_template_kwargs": [1]}, r"must be a dict by name, got \[1\]"),
        ({"chat_template_kwargs": {1: 2}}, "must be a dict by name"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
)  # fmt: skip
def test_malformed_chats_are_one_clear_line(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        Chat(**{"messages": [USER], **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([{"type": "image_url", "image_url": {}}], "of type 'text' only, got 'image_url'"),
        ([{"type": "text"}], "a part of type 'text' needs a 'text'"),
        ([3], "got 'int'"),
    ],
)
def test_parts_that_are_no_text_are_refused(content: list[Any], complaint: str) -> None:
    for template in (TEXT, BOTH):
        with pytest.raises(ConfigError, match=complaint):
            render(template, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("template", "message", "complaint"),
    [
        ("{{ raise_exception('no such role') }}", USER, "refused the messages: no such role"),
        ("{{ messages[0].content + '' }}", {"role": "user"}, "refused"),
        ("{{ messages[0].content + '' }}", {"role": "user", "content": 3}, "refused"),
        ("{{ 1 // 0 }}", USER, "refused"),
        ("{{ range(10 ** 9) | length }}", USER, "refused"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", USER, "refused"),
        ("{{ messages[0].content.a.b }}", USER, "refused"),
    ],
)
def test_what_a_template_refuses_is_a_typed_error(
    template: str, message: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        render(template, [message])


@pytest.mark.parametrize(
    "evil",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(evil: str) -> None:
    with pytest.raises(ConfigError, match=r"refused|not valid"):
        render(evil)


@pytest.mark.parametrize(
    "evil",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ range.__class__ }}",
    ],
)
def test_what_a_template_cannot_see_is_nothing(evil: str) -> None:
    assert render(evil) == ""


def test_an_open_message_that_the_template_leaves_out() -> None:
    with pytest.raises(ConfigError, match="leaves out the end of the last message"):
        render("{{ messages[0].role }}", continue_final_message=True)
    with pytest.raises(ConfigError, match="no content to continue"):
        render(TEXT, [{"role": "user"}], continue_final_message=True)


def test_broken_template() -> None:
    with pytest.raises(ConfigError, match="Jinja"):
        ChatTemplate("{% if %}")


def test_a_chat_cannot_name_a_file(tmp_path: Path) -> None:
    """Chats come from users of a service; only the one who starts it names files."""
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    with pytest.raises(ConfigError, match="neither Jinja text nor a template of this model"):
        ChatTemplates({}, {}).render(Chat([USER], chat_template=str(path)))
