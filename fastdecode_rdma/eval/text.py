"""Text of the harness <-> tokens, and its chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode_rdma.chat import Chat
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.eval.arguments import tell_once
from fastdecode_rdma.tokenizer import Tokenizer

Message = Mapping[str, str]


class HarnessText:
    """A tokenizer with the harness's habits.

    add_bos_token: whether text gets the BOS token; None is the tokenizer's habit. template_args:
    more variables of the chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, add_bos_token: bool | None, template_args: dict[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._add_bos_token = add_bos_token
        self._template_args = template_args
        self._template_name: str | None = None

    def encode(self, string: str, add_special_tokens: bool | None) -> list[int]:
        """Returns the ids of `string`, with one BOS at most; None does what was asked for once."""
        special = self._add_bos_token if add_special_tokens is None else add_special_tokens
        ids = self._tokenizer.encode(string, add_special_tokens=special is not False)
        bos = self._tokenizer.bos_token_id
        if add_special_tokens is None and special and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]  # asked for, and not the tokenizer's habit
        return ids

    def tell_bos(self, name: str, prefix_token_id: int | None) -> None:
        """A model that was trained with BOS is far off without: what happens is said."""
        bos = self._tokenizer.bos_token_id
        adds = bos is not None and self.encode("a", None)[:1] == [bos]
        tell_once(
            f"{name}: text {'begins' if adds else 'does not begin'} with BOS "
            f"({'add_bos_token' if self._add_bos_token is not None else 'as its tokenizer does'}); "
            f"without context the prefix token is {prefix_token_id}"
        )

    def chat(self, history: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Returns a chat as one text; without add_generation_prompt its last message stays open.

        Raises:
            ConfigError: the template refuses the messages, without those of the system, too.
        """
        try:
            return self._render(history, add_generation_prompt)
        except ConfigError as error:
            others = [message for message in history if message["role"] != "system"]
            if len(others) == len(history):
                raise
            tell_once(f"the chat template refuses the system's message, it is left out: {error}")
            return self._render(others, add_generation_prompt)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return self._tokenizer.render_chat(
            Chat(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                chat_template=self._template_name,
                chat_template_kwargs=self._template_args,
            )
        )

    def choose_template(self, chat_template: bool | str | None) -> str | None:
        """Chooses one of the model's templates by name (True: the default) and returns its text;
        None where there is none or it is not wanted.

        Raises:
            ConfigError: the model has none of that name.
        """
        if chat_template is False or chat_template is None:
            return None
        sources = self._tokenizer.chat_templates
        if chat_template is True:
            return sources.get("default")
        if chat_template not in sources:
            names = ", ".join(map(repr, sorted(sources))) or "none"
            raise ConfigError(f"the model has no chat template {chat_template!r}; it has {names}")
        self._template_name = chat_template
        return sources[chat_template]
