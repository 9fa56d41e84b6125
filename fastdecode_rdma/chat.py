"""A chat as a prompt: its messages, and what else the model's template may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastdecode_rdma.errors import ConfigError


@dataclass(frozen=True)
class Chat:
    """A chat as a prompt. A plain list of messages is a Chat with the defaults.

    messages: dicts with "role" and "content" (text, or a list of {"type": "text", "text": …}), and
        what else the template reads ("tool_calls", "reasoning_content", …).
    tools: the functions that the model may call, as JSON schemas; documents: {"title", "text"}.
    add_generation_prompt: ends the prompt with the head of the assistant's answer; None: yes,
        unless continue_final_message.
    continue_final_message: leaves the last message open; the answer continues it.
    chat_template: the name of one of the model's templates, or Jinja text; None: the model's own.
    chat_template_kwargs: more variables for the template (enable_thinking, …).

    Raises:
        ConfigError: an argument is malformed.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_dicts("messages", "message", self.messages)
        if not self.messages:
            raise ConfigError("a chat needs at least one message")
        for number, message in enumerate(self.messages):
            if "role" not in message:
                raise ConfigError(f"message {number} needs a 'role', got {shortened(message)}")
        for name in ("tools", "documents"):
            if getattr(self, name) is not None:
                _check_dicts(name, name[:-1], getattr(self, name))
        for name in ("add_generation_prompt", "continue_final_message"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{name} must be True or False, got {shortened(value)}")
        if self.continue_final_message and self.add_generation_prompt:
            raise ConfigError(
                "continue_final_message and add_generation_prompt exclude each other: an answer "
                "continues the last message or begins one"
            )
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ConfigError(f"chat_template must be text, got {shortened(self.chat_template)}")
        more = self.chat_template_kwargs
        if more is not None and not (
            isinstance(more, Mapping) and all(isinstance(name, str) for name in more)
        ):
            raise ConfigError(f"chat_template_kwargs must be a dict by name, got {shortened(more)}")
        for name in more or ():
            if name in _ARGUMENTS:
                raise ConfigError(f"chat_template_kwargs holds {name!r}; it is an argument itself")


_ARGUMENTS = frozenset(field.name for field in fields(Chat))


def _check_dicts(name: str, one: str, value: Any) -> None:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list of dicts, got {shortened(value)}")
    for number, item in enumerate(value):
        if callable(item):
            raise ConfigError(
                f"{one} {number} is a function; give its JSON schema "
                "(transformers.utils.get_json_schema makes one)"
            )
        if not isinstance(item, Mapping):
            raise ConfigError(f"{one} {number} must be a dict, got {shortened(item)}")


def shortened(value: object) -> str:
    """Returns `value` as an error message may show it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
