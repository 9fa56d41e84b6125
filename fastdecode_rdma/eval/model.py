"""`FastDecodeLM`: a Generator as a model of the lm-evaluation-harness."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, postprocess_generated_text
from tqdm import tqdm

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.eval.arguments import note_batch_size
from fastdecode_rdma.eval.generation import Generation, read_generation
from fastdecode_rdma.eval.settings import DEFAULT_GEN_TOKS, Settings, open_generator
from fastdecode_rdma.eval.text import HarnessText
from fastdecode_rdma.generator import Generator
from fastdecode_rdma.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

PAIRS_AT_ONCE = 4096
"""Requests between two looks at the progress bar and the harness's cache."""
TEXTS_AT_ONCE = 64
Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("fastdecode")
class FastDecodeLM(TemplateLM):
    """Scores on the dense side, generates with the attention workers."""

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | Generator | None = None,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_model_len: int | None = None,
        max_gen_toks: int = DEFAULT_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        truncation_side: str = "left",
        chat_template_args: Mapping[str, Any] | str | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        workers: Sequence[str] | str | None = None,
        **arguments: Any,
    ) -> None:
        """Opens a Generator.

        pretrained: a model directory, or a Generator that is open already; it then takes no
            argument that concerns loading.
        max_length (or max_model_len): tokens that the model sees at once.
        max_gen_toks: new tokens of a request whose task does not say how many.
        add_bos_token: whether text gets the BOS token; None is the tokenizer's habit.
        prefix_token_id: what comes before text without context; default BOS, else EOS.
        truncation_side: where prompts that are too long to be answered are cut: "left", "right" or
            "middle". What is scored is cut at the left.
        chat_template_args: more variables for the chat template; enable_thinking is one of them.
        think_end_token: only text after it counts as the answer.
        workers: addresses, as a list, a JSON list, or separated by ';'.
        device, batch_size, max_batch_size: the harness's command line gives them unasked; "cuda" on
            a machine without it is the CPU, batch sizes are not needed.
        arguments: those of `Generator.from_pretrained` (token_file, kv_cache_dtype, …).

        Raises:
            ConfigError: an argument cannot be used. TransportError: a worker cannot be reached.
        """
        super().__init__()
        if pretrained is None:
            raise ConfigError("no model: pass pretrained=DIR (--model_args pretrained=DIR)")
        note_batch_size(batch_size, max_batch_size)
        self._settings = Settings.checked(
            max_length=max_length,
            max_model_len=max_model_len,
            max_gen_toks=max_gen_toks,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
            truncation_side=truncation_side,
            chat_template_args=chat_template_args,
            enable_thinking=enable_thinking,
            think_end_token=think_end_token,
        )
        self.generator, self._name = open_generator(
            pretrained,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            max_length=self._settings.max_length,
            workers=workers,
            arguments=arguments,
        )
        assert self.generator.tokenizer is not None
        self.tokenizer: Tokenizer = self.generator.tokenizer
        self._device = torch.device("cpu")  # where the harness puts tensors of its own
        self._text = HarnessText(
            self.tokenizer,
            add_bos_token=add_bos_token,
            template_args=self._settings.template_args,
        )
        self._text.tell_bos(self._name, self.prefix_token_id)

    def close(self) -> None:
        """Closes the generator."""
        self.generator.close()

    # -- what the harness asks about

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int | None:
        """What comes before text that has no context."""
        if self._settings.prefix_token_id is not None:
            return self._settings.prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at once."""
        return self._settings.max_length or self.generator.max_model_len

    @property
    def max_gen_toks(self) -> int:
        """New tokens of a request that does not say how many."""
        return self._settings.max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return self._name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What goes into the results beside the arguments."""
        from fastdecode_rdma import __version__

        return {**self.generator.model_info, "fastdecode_rdma": __version__}

    # -- text and tokens

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the ids of `string`, with one BOS at most."""
        return self._text.encode(string, add_special_tokens)

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids."""
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a chat as one text; without add_generation_prompt its last message stays open.

        Raises:
            ConfigError: the template refuses the messages, without those of the system, too.
        """
        return self._text.chat(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Chooses one of the model's templates by name (True: the default) and returns its text;
        None where there is none or it is not wanted.

        Raises:
            ConfigError: the model has none of that name.
        """
        return self._text.choose_template(chat_template)

    # -- scoring

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns (logprob, is_greedy) of each (context, continuation)."""
        self._refuse_thinking()
        encoded: list[Request] = []
        for request in tqdm(requests, desc="Tokenizing inputs", disable=disable_tqdm):
            context, continuation = request.args
            if context.strip():
                before, after = self._encode_pair(context, continuation)
            else:  # spaces alone are the continuation's
                before = []
                after = self.tok_encode(context + continuation, add_special_tokens=False)
            encoded.append(((context, continuation), before, after))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = []
        with tqdm(
            total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm
        ) as bar:
            for start in range(0, len(requests), PAIRS_AT_ONCE):
                part = requests[start : start + PAIRS_AT_ONCE]
                results = self.generator.loglikelihood(
                    [(before, after) for _, before, after in part],
                    prefix_token_id=self.prefix_token_id,
                    max_length=self.max_length,
                )
                for (key, _, _), result in zip(part, results, strict=True):
                    answers.append((result.logprob, result.is_greedy))
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answers[-1])
                bar.update(len(part))
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each whole text."""
        self._refuse_thinking()
        texts = [request.args[0] for request in requests]
        answers: list[float] = []
        with tqdm(
            total=len(texts), desc="Running loglikelihood_rolling requests", disable=disable_tqdm
        ) as bar:
            for start in range(0, len(texts), TEXTS_AT_ONCE):
                part = texts[start : start + TEXTS_AT_ONCE]
                results = self.generator.loglikelihood_rolling(
                    part, prefix_token_id=self.prefix_token_id, max_length=self.max_length
                )
                for text, result in zip(part, results, strict=True):
                    answers.append(result.logprob)
                    self.cache_hook.add_partial("loglikelihood_rolling", (text,), result.logprob)
                bar.update(len(part))
        return answers

    def _refuse_thinking(self) -> None:
        if self._settings.template_args.get("enable_thinking"):
            raise ConfigError(
                "enable_thinking is for tasks that generate: an answer that is scored has no "
                "thoughts before it"
            )

    # -- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers to (context, generation_kwargs), as many at once as there are seats.

        Raises:
            ConfigError: a generation argument is unknown or cannot be used.
        """
        prompts, generations = [], []
        for request in requests:
            context, kwargs = request.args
            generation = read_generation(kwargs, default_max_gen_toks=self.max_gen_toks)
            prompts.append(self._prompt(context, generation))
            generations.append(generation)
        params = [
            # stop strings among the thoughts must not end them: they are cut off afterwards
            each.params if self._settings.think_end_token else replace(each.params, stop=each.until)
            for each in generations
        ]
        texts: list[list[str]] = [[] for _ in requests]
        answers = [""] * len(requests)
        with (
            tqdm(
                total=len(requests), desc="Running generate_until requests", disable=disable_tqdm
            ) as bar,
            self.generator.generate(prompts, params) as events,
        ):
            for event in events:
                index = event.request_index
                texts[index].append(event.text)
                if event.finish_reason is not None:
                    answers[index] = postprocess_generated_text(
                        "".join(texts[index]),
                        list(generations[index].until),
                        self._settings.think_end_token,
                    )
                    self.cache_hook.add_partial(
                        "generate_until", requests[index].args, answers[index]
                    )
                    bar.update(1)
        return answers

    def _prompt(self, context: str, generation: Generation) -> list[int]:
        """Returns the ids of a prompt, cut so that the answer has room."""
        room = self.max_length - generation.max_gen_toks
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={generation.max_gen_toks} leaves no room for a prompt in max_length="
                f"{self.max_length}"
            )
        ids = self.tok_encode(context)
        if not ids:
            if self.prefix_token_id is None:
                raise ConfigError("an empty prompt needs a prefix token; give prefix_token_id")
            ids = [self.prefix_token_id]
        cut, _ = maybe_truncate(
            ids,
            max_gen_toks=generation.max_gen_toks,
            max_model_len=self.max_length,
            side=self._settings.truncation_side,
        )
        return cut
