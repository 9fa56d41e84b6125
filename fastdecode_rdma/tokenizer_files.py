"""The files of a Hugging Face tokenizer and what each may look like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json
from fastdecode_rdma.param_checks import eos_ids

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class TokenizerFiles:
    """A directory with a tokenizer. `special_tokens`: "bos_token" and the like -> its text.

    Raises:
        ConfigError: a file cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._config = _read_optional(directory / "tokenizer_config.json")
        self.special_tokens = _special_tokens(
            self._config, _read_optional(directory / "special_tokens_map.json")
        )

    def load_backend(self) -> tokenizers.Tokenizer | None:
        """Loads tokenizer.json, or vocab.json and merges.txt; None when there is neither.

        Raises:
            ConfigError: a file cannot be read.
        """
        whole, vocab, merges = (
            self.directory / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
        )
        try:
            if whole.is_file():
                return self._complete(tokenizers.Tokenizer.from_file(str(whole)))
            if not (vocab.is_file() and merges.is_file()):
                return None
            backend = tokenizers.Tokenizer(BPE.from_file(str(vocab), str(merges)))
        except Exception as exc:  # the package raises bare Exception for what it cannot read
            raise ConfigError(f"the tokenizer in {self.directory} cannot be read: {exc}") from exc
        return self._complete_gpt2(backend)

    def _complete(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """Adds what tokenizer_config.json says of tokens, as transformers does; whether BOS and EOS
        are put around a text is tokenizer.json's alone (its add_bos_token is not looked at).
        """
        known = {t.content: t for t in backend.get_added_tokens_decoder().values()}
        declared = self._declared_tokens()
        named = [
            token
            for token in self.special_tokens.values()
            # One that the model has no id for would get an id beyond its embeddings.
            if token not in known and backend.token_to_id(token) is not None
        ]
        for token in [*declared, *(tokenizers.AddedToken(t, special=True) for t in named)]:
            if repr(token) != repr(known.get(token.content)):
                backend.add_tokens([token])
        return backend

    def _declared_tokens(self) -> list[tokenizers.AddedToken]:
        """added_tokens_decoder: id -> what an added token is."""
        entries = self._config.get("added_tokens_decoder") or {}
        try:
            by_id = sorted(
                (int(token_id), number, e) for number, (token_id, e) in enumerate(entries.items())
            )
            flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
            return [
                tokenizers.AddedToken(**{key: entry[key] for key in flags if key in entry})
                for _, _, entry in by_id
            ]
        except (AttributeError, TypeError, ValueError) as exc:
            raise ConfigError(
                f"{self.directory}: added_tokens_decoder in tokenizer_config.json is malformed: "
                f"{exc}"
            ) from exc

    def _complete_gpt2(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """GPT-2's scheme, which OPT's checkpoints ship without a tokenizer.json."""
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(token, special=True, normalized=False)
                for token in dict.fromkeys(self.special_tokens.values())
            ]
        )
        bos = self.special_tokens.get("bos_token")
        if self._config.get("add_bos_token") and bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))]
            )
        return backend

    def explain_missing(self) -> str:
        """Returns why there is no tokenizer here, and what to do."""
        if not self.directory.is_dir():
            return f"no such directory: {self.directory}"
        if (self.directory / "tokenizer.model").is_file():
            return (
                f"{self.directory} has only tokenizer.model; save it once with transformers "
                "(AutoTokenizer.from_pretrained(dir).save_pretrained(dir)) to get tokenizer.json"
            )
        return f"{self.directory} has no tokenizer.json (nor vocab.json and merges.txt)"

    def eos_token_ids(self) -> list[int]:
        """Returns the end-of-sequence ids of config.json and generation_config.json.

        Raises:
            ConfigError: a file cannot be read, or holds something else there.
        """
        ids: list[int] = []
        for name in ("config.json", "generation_config.json"):
            values = _read_optional(self.directory / name)
            text = values.get("text_config")
            for part in (values, text if isinstance(text, Mapping) else {}):
                try:
                    ids += eos_ids(part.get("eos_token_id"))
                except ConfigError as error:
                    raise ConfigError(f"{self.directory / name}: {error}") from None
        return [token_id for token_id in ids if token_id >= 0]  # -1 is some models' "none"

    def chat_templates(self, given: str | None) -> dict[str, str]:
        """Returns the model's Jinja texts by name; "default" is what is given: text, or the name of
        one of the model's or of a file.

        Raises:
            ConfigError: a file cannot be read.
        """
        templates = self._own_templates()
        if given is None:
            return templates
        if not given:
            raise ConfigError("chat_template is empty; give Jinja text or a file's name")
        if given in templates:
            return {**templates, "default": templates[given]}
        # Every template has braces, and hardly a file's name.
        text = given if "{" in given else _read_text(Path(given))
        return {"default": text}  # the model's others might not fit it

    def _own_templates(self) -> dict[str, str]:
        """Those of files of their own replace those of tokenizer_config.json."""
        templates: dict[str, str] = {}
        if (path := self.directory / "chat_template.jinja").is_file():
            templates["default"] = _read_text(path)
        for path in sorted((self.directory / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = _read_text(path)
        if templates:
            return templates
        value = self._config.get("chat_template")
        if value is None:
            value = _read_optional(self.directory / "chat_template.json").get("chat_template")
        if isinstance(value, list):  # several, by name
            named = [entry for entry in value if isinstance(entry, dict)]
            value = {entry.get("name"): entry.get("template") for entry in named}
        elif value is not None:
            value = {"default": value}
        for name, text in (value or {}).items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise ConfigError(f"{self.directory}: chat_template must be text, got {text!r}")
        return value or {}


def _read_optional(path: Path) -> dict[str, Any]:
    """Returns a JSON object, empty when there is no such file."""
    return read_json(path) if path.is_file() else {}


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token and the like; they are written as text or as an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        for source in sources:
            value = source.get(name)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:  # no UTF-8, or a zero byte in its name
        raise ConfigError(f"the chat template {path} cannot be read: {exc}") from exc
