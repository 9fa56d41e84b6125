"""Renders chat templates as `transformers` does: sandboxed Jinja, with the names they expect.

A template comes with the model: it cannot reach files or objects and cannot change what it is
given, but its time and memory are not bounded.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from fastdecode_rdma.chat import Chat, shortened
from fastdecode_rdma.errors import ConfigError

_DEFAULT, _TOOL_USE = "default", "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CUT = "HERE_ENDS_THE_LAST_MESSAGE "


class ChatTemplates:
    """A model's chat templates by name, compiled when they are first needed.

    `special_tokens` are variables of every template: "bos_token" and the like.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """Returns the prompt's text.

        Raises:
            ConfigError: there is no such template, or it refuses the messages.
        """
        template = compile_template(self._select(chat))
        return template.render(chat, self._special_tokens)

    def _select(self, chat: Chat) -> str:
        """The template's text: the chat's own, or by name, as transformers chooses."""
        named = ", ".join(repr(name) for name in sorted(self.sources))
        given = chat.chat_template
        if given is not None:
            if given in self.sources:
                return self.sources[given]
            if "{" in given:  # every template has braces
                return given
            raise ConfigError(
                f"chat_template={shortened(given)} is neither Jinja text nor a template of this "
                f"model (it has {named or 'none'})"
            )
        if chat.tools is not None and _TOOL_USE in self.sources:
            return self.sources[_TOOL_USE]
        if _DEFAULT in self.sources:
            return self.sources[_DEFAULT]
        if named:
            raise ConfigError(
                f"this model's chat templates are {named}, and none is the default; choose one "
                "with chat_template="
            )
        raise ConfigError("this model has no chat template; pass chat_template=, or a text prompt")


class ChatTemplate:
    """A compiled template.

    Raises:
        ConfigError: it is no valid template.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _SafeNamespace
        try:
            self._takes_parts = _iterates_over_content(environment.parse(source))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as exc:
            raise ConfigError(f"the chat template is not valid Jinja: {exc}") from exc

    def render(self, chat: Chat, special_tokens: Mapping[str, str]) -> str:
        """Returns the prompt's text.

        Raises:
            ConfigError: the template refuses the messages.
        """
        try:
            messages = [self._message(n, m) for n, m in enumerate(chat.messages)]
            if chat.continue_final_message:
                _mark_end(messages[-1])
            text = self._template.render(
                {
                    **special_tokens,
                    **_plain(chat.chat_template_kwargs or {}, "chat_template_kwargs"),
                    "messages": messages,
                    "tools": _plain(chat.tools, "tools"),
                    "documents": _plain(chat.documents, "documents"),
                    "add_generation_prompt": (
                        not chat.continue_final_message
                        if chat.add_generation_prompt is None
                        else chat.add_generation_prompt
                    ),
                }
            )
        except ConfigError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as exc:
            # Templates compute on what the user gave: a wrong type in a message surfaces as these.
            raise ConfigError(f"the chat template refused the messages: {exc}") from exc
        return _cut_at_mark(text) if chat.continue_final_message else text

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """What the template sees of a message: None counts as left out, as in transformers."""
        plain = _plain(message, f"message {number}")
        plain = {key: value for key, value in plain.items() if value is not None}
        if isinstance(plain.get("content"), (list, tuple)):
            parts = [_text_part(number, part) for part in plain["content"]]
            # A template that knows only text would print the list.
            plain["content"] = (
                parts if self._takes_parts else "\n".join(part["text"] for part in parts)
            )
        for name in _REASONING:
            if name in plain:
                plain = {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
                break
        return plain


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Returns the compiled template of `source`.

    Raises:
        ConfigError: it is no valid template.
    """
    return ChatTemplate(source)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """`namespace()` without attributes that Python itself uses."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _refuse_private(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether some loop goes over a message's content, so that it may be a list of parts."""
    arguments = {arg.name for macro in tree.find_all(nodes.Macro) for arg in macro.args}
    aliases = arguments & {"content"}

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in aliases
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            key = getattr(node.arg, "value", None)
            return key == "content" or (not isinstance(key, str) and is_content(node.node))
        if isinstance(node, nodes.CondExpr):
            return is_content(node.expr1) or (node.expr2 is not None and is_content(node.expr2))
        return isinstance(node, nodes.Filter) and node.node is not None and is_content(node.node)

    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            aliases.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _text_part(number: int, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type", "text") == "text":
        if isinstance(part.get("text"), str):
            return part
        raise ConfigError(f"message {number}: a part of type 'text' needs a 'text'")
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ConfigError(f"message {number}: content may hold parts of type 'text' only, got {kind!r}")


def _mark_end(message: dict[str, Any]) -> None:
    """Puts a mark behind the text of `message`, in place."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CUT
    elif content:
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CUT}]
    else:
        raise ConfigError("continue_final_message: the last message has no content to continue")


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CUT.rstrip())
    if place < 0:
        raise ConfigError(
            "continue_final_message: the chat template leaves out the end of the last message"
        )
    # A template that trims the message took the mark's space, and would take spaces before it.
    return text[:place] if text.startswith(_CUT, place) else text[:place].rstrip()


def _plain(value: Any, what: str) -> Any:
    """Returns `value` as plain data: objects have methods that a sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enum, say; its own __str__ may say something else
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, what): _plain(item, what) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item, what) for item in value)
    if isinstance(value, list):
        return [_plain(item, what) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: _plain(getattr(value, name), what) for name in names}
    if callable(getattr(value, "model_dump", None)):  # pydantic
        return _plain(value.model_dump(), what)
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0:  # numpy scalars
        return _plain(value.item(), what)
    raise ConfigError(f"{what}: {shortened(value)} is no plain data (text, numbers, lists, dicts)")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML and sorts keys.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else tuple(separators),
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
