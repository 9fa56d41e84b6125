"""Text <-> token ids over the `tokenizers` package, with the chat template of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from fastdecode_rdma.chat import Chat
from fastdecode_rdma.chat_template import ChatTemplates, compile_template
from fastdecode_rdma.detokenizer import IncrementalDetokenizer
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.param_checks import eos_ids
from fastdecode_rdma.sequence import SamplingParams
from fastdecode_rdma.text_decoders import DecoderFactory
from fastdecode_rdma.tokenizer_files import TokenizerFiles


class Tokenizer:
    """A model's tokenizer.

    `eos_token_ids` are the union of the tokenizer's (`eos_token_id`), config.json's,
    generation_config.json's and the argument's.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        """chat_template: Jinja text, or several by name."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._decoders = DecoderFactory(backend)
        self._bos = self._special_tokens.get("bos_token")
        self.bos_token_id = None if self._bos is None else backend.token_to_id(self._bos)
        eos = self._special_tokens.get("eos_token")
        self.eos_token_id = own = None if eos is None else backend.token_to_id(eos)
        self.eos_token_ids = frozenset(eos_token_ids) | ({own} if own is not None else set())
        if isinstance(chat_template, str):
            chat_template = {"default": chat_template}
        self._templates = ChatTemplates(chat_template or {}, self._special_tokens)

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        chat_template: str | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        required: bool = True,
    ) -> Tokenizer | None:
        """Loads tokenizer.json (or vocab.json and merges.txt) and what describes it.

        chat_template: Jinja text, a file that holds it, or the name of one of the model's
            templates; becomes the default.
        Returns None when there is no tokenizer and `required` is False.

        Raises:
            ConfigError: files are missing, or cannot be read.
        """
        files = TokenizerFiles(directory)
        backend = files.load_backend()
        if backend is None:
            if not required:
                return None
            raise ConfigError(files.explain_missing())
        templates = files.chat_templates(chat_template)
        if chat_template is not None:
            compile_template(templates["default"])
        return cls(
            backend,
            special_tokens=files.special_tokens,
            eos_token_ids=[*files.eos_token_ids(), *eos_ids(eos_token_id)],
            chat_template=templates,
        )

    @property
    def chat_template(self) -> str | None:
        """The default template's text, or None if the model has none."""
        return self._templates.sources.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All templates by name."""
        return self._templates.sources

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def check_vocab_size(self, num_rows: int) -> None:
        """Checks that the model has an embedding for every ordinary token.

        Added tokens may lie beyond it (placeholders of image models do): a prompt that holds one is
        refused as it comes.

        Raises:
            ConfigError: tokenizer and model do not belong together.
        """
        # Looks past the embeddings, as far as there are tokens: faster than a dict of all of them.
        count = self._backend.get_vocab_size(with_added_tokens=True)
        outside = [
            i
            for i in range(num_rows, num_rows + count)
            if i not in self._added_ids and self._backend.id_to_token(i) is not None
        ]
        if outside:
            raise ConfigError(
                f"the tokenizer has a token {outside[0]}, the model only {num_rows} embeddings: it "
                "is another model's; pass tokenizer=, a directory with the right one"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`, with the model's special tokens around, one BOS at most.

        Raises:
            ConfigError: `text` is no text, or holds lone surrogates.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as exc:
            raise ConfigError(
                "the prompt is no valid text: it holds lone surrogates (bytes that are not UTF-8)"
                if isinstance(text, str)
                else f"the prompt is no text but {type(text).__name__}"
            ) from exc
        bos = self.bos_token_id
        if add_special_tokens and self._bos and text.startswith(self._bos) and ids[:2] == [bos] * 2:
            return ids[1:]
        return ids

    def render_chat(self, chat: Chat | Sequence[Mapping[str, Any]]) -> str:
        """Returns a chat, or a list of messages, as one text by the chat template.

        Raises:
            ConfigError: there is no template, or it refuses the messages.
        """
        return self._templates.render(chat if isinstance(chat, Chat) else Chat(chat))

    def encode_chat(self, chat: Chat | Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of a chat. The template writes all special tokens itself.

        Raises:
            ConfigError: there is no template, or it refuses the messages.
        """
        return self.encode(self.render_chat(chat), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; ids outside the vocabulary have none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token by itself (U+FFFD for a part of a character)."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def detokenizer(
        self, params: SamplingParams, *, prompt_ids: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """Returns a detokenizer for one sequence.

        With `prompt_ids` the text continues the prompt's, as in vLLM: where a tokenizer drops the
        space at the start of a text (Llama 2), the output keeps its own. It begins with its own
        first token, though: a character that the prompt left unfinished is not completed.
        """
        decoder = self._decoders.make(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            prompt_ids=prompt_ids,
        )
        return IncrementalDetokenizer(decoder, params)
