"""What a model of the harness is told once: the arguments of `FastDecodeLM`, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.eval.arguments import (
    as_dict,
    as_int,
    generator_arguments,
    usable_device,
    worker_addresses,
)
from fastdecode_rdma.generator import Generator

SIDES = ("left", "right", "middle")
DEFAULT_GEN_TOKS = 256


@dataclass(frozen=True)
class Settings:
    """max_length: tokens that the model sees at once, None is all that it can. template_args: more
    variables of the chat template."""

    max_length: int | None
    max_gen_toks: int
    add_bos_token: bool | None
    prefix_token_id: int | None
    truncation_side: str
    think_end_token: str | None
    template_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        *,
        max_length: int | None,
        max_model_len: int | None,
        max_gen_toks: int,
        add_bos_token: bool | None,
        prefix_token_id: int | None,
        truncation_side: str,
        chat_template_args: Mapping[str, Any] | str | None,
        enable_thinking: bool | None,
        think_end_token: str | None,
    ) -> Settings:
        """Returns the settings of arguments that may have come as text.

        Raises:
            ConfigError: one of them cannot be used, or two do not go together.
        """
        if truncation_side not in SIDES:
            raise ConfigError(f"truncation_side must be one of {SIDES}, got {truncation_side!r}")
        if max_length is not None and max_model_len is not None and max_length != max_model_len:
            raise ConfigError("max_length and max_model_len are the same: give one of them")
        if enable_thinking and think_end_token is None:
            raise ConfigError("enable_thinking needs think_end_token: where the answer begins")
        template_args = as_dict("chat_template_args", chat_template_args)
        if enable_thinking is not None:
            template_args["enable_thinking"] = enable_thinking
        longest = max_model_len if max_length is None else max_length
        return cls(
            max_length=as_int("max_length", longest, low=2),
            max_gen_toks=as_int("max_gen_toks", max_gen_toks, low=1) or DEFAULT_GEN_TOKS,
            add_bos_token=add_bos_token,
            prefix_token_id=as_int("prefix_token_id", prefix_token_id),
            truncation_side=truncation_side,
            think_end_token=None if think_end_token is None else str(think_end_token),
            template_args=template_args,
        )


def open_generator(
    pretrained: str | os.PathLike[str] | Generator,
    *,
    tokenizer: str | None,
    dtype: str,
    device: str | None,
    max_length: int | None,
    workers: Sequence[str] | str | None,
    arguments: Mapping[str, Any],
) -> tuple[Generator, str]:
    """Returns a generator, or the one that is open already, and a name for its tokenizer.

    Raises:
        ConfigError: an argument cannot be used. TransportError: a worker cannot be reached.
    """
    more = generator_arguments(arguments)
    if isinstance(pretrained, Generator):
        loading = {"workers": workers, "tokenizer": tokenizer}
        names = [*more, *(name for name, value in loading.items() if value is not None)]
        if names:
            raise ConfigError(f"a Generator is open already: leave out {', '.join(names)}")
        generator, name = pretrained, pretrained.stats().model_name
    else:
        generator = Generator.from_pretrained(
            pretrained,
            tokenizer=tokenizer,
            dtype=dtype,
            device=usable_device(device),
            max_model_len=max_length,
            workers=worker_addresses(workers),
            **more,
        )
        name = os.fspath(tokenizer or pretrained)
    if generator.tokenizer is None:
        raise ConfigError(f"{name} has no tokenizer; give tokenizer=, a directory")
    return generator, name
