"""`fastdecode generate`: prompts from the command line, or a file of requests, one a line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_rdma.batch.files import RawLine
from fastdecode_rdma.command_line import messages_on_stderr, unwinding_on_signals
from fastdecode_rdma.errors import ConfigError, FastDecodeError
from fastdecode_rdma.sequence import SamplingParams

if TYPE_CHECKING:
    from fastdecode_rdma.batch.intake import FormatFor
    from fastdecode_rdma.batch.job import Job
    from fastdecode_rdma.batch.records import LineFormat
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.tokenizer import Tokenizer

SAMPLING_OPTIONS: dict[str, tuple[type, str, str]] = {
    "max_tokens": (int, "N", "new tokens at most (default: as many as fit)"),
    "temperature": (float, "X", "0 is greedy"),
    "top_p": (float, "X", "smallest set of tokens with this probability"),
    "top_k": (int, "N", "the N most probable tokens; 0 for all"),
    "min_p": (float, "X", "probability relative to the most probable token"),
    "repetition_penalty": (float, "X", "above 1 against tokens of prompt and answer"),
    "presence_penalty": (float, "X", "above 0 against tokens of the answer"),
    "frequency_penalty": (float, "X", "the same, for each time"),
    "seed": (int, "N", "the same seed gives the same answer"),
    "logprobs": (int, "N", "log-probabilities of each token and of the N most probable ones"),
}
"""SamplingParams that are options of the same names; a file's sampling_params know the others."""

EPILOG = """\
input, one JSON object a line (- is standard input):
  {"id": …, "prompt": text or token ids, "sampling_params": {"max_tokens": 64, …}, …}
  {"id": …, "messages": [{"role": "user", "content": …}], "tools": […], …}
  or a Parquet or CSV file (.parquet, .csv, .tsv; extra `batch`) with these columns, a row a line
  id: text or an integer, no two alike; the line's number is shown if absent. sampling_params win
  over the options here, and these over the model's generation_config.json; a sampling parameter
  outside of them is an error. With messages: tools, documents, chat_template_kwargs,
  chat_template, add_generation_prompt, continue_final_message. Other keys are carried to the
  output. A line without a seed has one made of --seed and its id. Lines of a pipe are answered
  while it is open, long requests hold up no short ones.
  A file whose first line has "custom_id" is one of OpenAI's batch files: /v1/completions and
  /v1/chat/completions, answered as OpenAI and `vllm run-batch` do.

output, one JSON object a line, in the order in which requests finish (or --ordered):
  {"id": …, "line": N, "text": …, "finish_reason": "stop" or "length", "stop_reason": …,
   "usage": {"prompt_tokens": N, "completion_tokens": N}, …}     logprobs, token_ids when asked for
  {"id": …, "line": N, "error": {"type": …, "message": …}, …}    a request that failed
  With n > 1 in sampling_params: "outputs": [{"index": 0, "text": …, …}, …].
  Lines are complete and in the file as soon as they are written. An output file that holds
  something is not touched without --overwrite or --resume. --resume goes on after any end (Ctrl-C,
  kill -9, a full disk): every line of the input is then in the output once. FILE.job, beside it,
  says which input, model and parameters began it; with others --resume refuses.
  An output named .parquet, .csv or .tsv (extra `batch`) is made of these lines at the end; they
  stay beside it, in FILE.jsonl, for a job that goes on.

exit status: 0 all requests succeeded, 1 stopped before the end (see the message; --resume goes on),
2 bad usage, 3 finished, and some requests failed, 130 interrupted, 143 ended by SIGTERM
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    from fastdecode_rdma.batch.arguments import (
        add_engine_arguments,
        add_file_arguments,
        add_ray_arguments,
    )

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--model", required=True, metavar="DIR", help="a model directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", nargs="+", action="extend", metavar="TEXT", help="prompts; answers are printed"
    )
    what.add_argument("--input", "-i", metavar="FILE", help="a file of requests, or - (see below)")
    add_file_arguments(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send text prompts through the model's chat template, as a user's message",
    )
    for name, (kind, metavar, text) in SAMPLING_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--stop", nargs="+", action="extend", metavar="TEXT", help="texts that end an answer"
    )
    parser.add_argument("--token-ids", action="store_true", help="add token_ids to results")
    add_engine_arguments(parser)
    add_ray_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answers prompts or a file of requests."""
    with messages_on_stderr(), unwinding_on_signals():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from fastdecode_rdma.batch.arguments import check_ray, engine_options
    from fastdecode_rdma.batch.command import Work, run_file
    from fastdecode_rdma.batch.records import PromptLines, override
    from fastdecode_rdma.batch.runner import BatchRun
    from fastdecode_rdma.batch.tables import open_source
    from fastdecode_rdma.engine.options import resolve_model_dir
    from fastdecode_rdma.engine.sampling_defaults import SamplingDefaults
    from fastdecode_rdma.generator import Generator

    check_ray(args)
    given = {name: getattr(args, name) for name in (*SAMPLING_OPTIONS, "stop")}
    directory = resolve_model_dir(args.model)
    defaults = SamplingDefaults(directory).params()
    params = override(defaults, given)
    load = partial(Generator.from_pretrained, directory, **engine_options(args))
    if args.input is None and args.output is None:
        _refuse_without_output(args)
        _say_defaults(defaults, given)
        with load() as generator:
            return _print_answers(generator, args.prompt, params, is_chat=args.chat)
    params = replace(params, seed=None)  # each line has one of its own
    source = PromptLines(args.prompt) if args.input is None else open_source(args.input)
    facts = {name: value for name, value in given.items() if name != "seed"}
    facts |= {"chat": args.chat, "token_ids": args.token_ids}
    work = Work(
        "generate", directory, facts, args.seed, load, partial(_formats, args, params), BatchRun
    )
    _say_defaults(defaults, given)
    return run_file(args, source, work)


def _refuse_without_output(args: argparse.Namespace) -> None:
    asked = args.token_ids or args.logprobs is not None or args.overwrite
    if asked or args.resume or args.ordered or args.limit or args.dry_run:
        raise ConfigError(
            "--token-ids, --logprobs and what concerns files (--overwrite, --resume, --ordered, "
            "--limit, --dry-run) need --output"
        )


def _formats(
    args: argparse.Namespace, params: SamplingParams, job: Job, tokenizer: Tokenizer | None
) -> FormatFor:
    """Returns what chooses the kind of lines by the first of them."""
    from fastdecode_rdma.batch.openai_lines import OpenAILines, is_openai
    from fastdecode_rdma.batch.records import OwnLines

    def choose(first: RawLine) -> LineFormat:
        if args.input is not None and is_openai(first):
            name = Path(args.model).name
            return OpenAILines(params, job.seed, job.digest, job.created, name, tokenizer)
        return OwnLines(params, job.seed, is_chat=args.chat, with_token_ids=args.token_ids)

    return choose


def _say_defaults(defaults: SamplingParams, given: Mapping[str, Any]) -> None:
    """Names the values of the model's own that hold because nothing else was said."""
    neutral = SamplingParams()
    names = [field.name for field in fields(defaults) if given.get(field.name) is None]
    own = {
        name: getattr(defaults, name)
        for name in names
        if getattr(defaults, name) != getattr(neutral, name)
    }
    if own:
        values = ", ".join(f"{name}={value!r}" for name, value in own.items())
        _say(f"by the model's generation_config.json: {values}")


def _print_answers(
    generator: Generator, texts: Sequence[str], params: SamplingParams, *, is_chat: bool
) -> int:
    from fastdecode_rdma.terminal import print_stream

    prompts: list[Any] = [[{"role": "user", "content": t}] if is_chat else t for t in texts]
    started = time.monotonic()
    stream = generator.generate(prompts, params)
    try:
        with stream:
            num_tokens = print_stream(texts, stream, with_headings=len(texts) > 1)
    except FastDecodeError as error:  # nothing was wrong with the usage
        print(f"\nfastdecode: error: {error}", file=sys.stderr)
        return 1
    elapsed_s = max(time.monotonic() - started, 1e-9)
    _say(f"{num_tokens} tokens in {elapsed_s:.1f} s, {num_tokens / elapsed_s:.1f} tokens/s")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
