"""Renders chat templates as `transformers` does: sandboxed Jinja, with the names they expect."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastdecode_rdma.errors import ConfigError


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.

    Raises:
        ConfigError: it is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(f"the chat template is not valid Jinja: {exc}") from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt's text.

        Raises:
            ConfigError: the messages are malformed, or the template refuses them.
        """
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ConfigError(f"message {number} needs a 'role', got {message!r}")
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as exc:
            # Templates compute on what the user gave: a wrong type in a message surfaces as these.
            raise ConfigError(f"the chat template refused the messages: {exc}") from exc


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML and sorts keys.
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
