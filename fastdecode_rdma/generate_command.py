"""`fastdecode generate`: prompts from the command line, or a file of requests, one a line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fastdecode_rdma.batch.files import STANDARD, LineSource, LineWriter, check_output
from fastdecode_rdma.command_line import (
    messages_on_stderr,
    split_workers,
    unwinding_on_signals,
)
from fastdecode_rdma.errors import ConfigError, FastDecodeError
from fastdecode_rdma.sequence import SamplingParams

if TYPE_CHECKING:
    from fastdecode_rdma.generator import Generator

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
  id: text or an integer, no two alike; the line's number is shown if absent. sampling_params win
  over the options here, and these over the model's generation_config.json; a sampling parameter
  outside of them is an error. With messages: tools, documents, chat_template_kwargs,
  chat_template, add_generation_prompt, continue_final_message. Other keys are carried to the
  output. Lines of a pipe are answered while it is open, long requests hold up no short ones.

output, one JSON object a line, in the order in which requests finish:
  {"id": …, "line": N, "text": …, "finish_reason": "stop" or "length", "stop_reason": …,
   "usage": {"prompt_tokens": N, "completion_tokens": N}, …}     logprobs, token_ids when asked for
  {"id": …, "line": N, "error": {"type": …, "message": …}, …}    a request that failed
  With n > 1 in sampling_params: "outputs": [{"index": 0, "text": …, …}, …].
  Lines are complete and in the file as soon as they are written, also after Ctrl-C or SIGTERM. An
  output file that holds something is not touched without --overwrite.

exit status: 0 all requests succeeded, 1 some failed or were not run, 2 bad usage, 130 interrupted,
143 ended by SIGTERM
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--model", required=True, metavar="DIR", help="a model directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", nargs="+", action="extend", metavar="TEXT", help="prompts; answers are printed"
    )
    what.add_argument("--input", metavar="FILE", help="a file of requests, or - (see below)")
    parser.add_argument(
        "--output", metavar="FILE", help="where results go (default: -, standard output)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an output file that holds something"
    )
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
    _add_engine_arguments(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        metavar="A,B",
        help="attention workers, HOST[:PORT], comma-separated (default: one in this process)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of one sequence")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences run at once")
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="auto, fp32, fp16, bf16, …")
    parser.add_argument(
        "--quantization", metavar="NAME", help="int8: weights rounded as they are loaded"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits in any batch, on any workers"
    )


def run(args: argparse.Namespace) -> int:
    """Answers prompts or a file of requests."""
    with messages_on_stderr(), unwinding_on_signals():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from fastdecode_rdma.batch.records import override
    from fastdecode_rdma.engine.options import resolve_model_dir
    from fastdecode_rdma.engine.sampling_defaults import SamplingDefaults
    from fastdecode_rdma.generator import Generator

    given = {name: getattr(args, name) for name in (*SAMPLING_OPTIONS, "stop")}
    directory = resolve_model_dir(args.model)
    defaults = SamplingDefaults(directory).params()
    params = override(defaults, given)
    _say_defaults(defaults, given)
    to_file = args.input is not None or args.output is not None
    source = None if args.input is None else LineSource(args.input)
    output = args.output or STANDARD
    if to_file:
        check_output(output, source, overwrite=args.overwrite)
    elif args.token_ids or args.logprobs is not None or args.overwrite:
        raise ConfigError("--token-ids, --logprobs and --overwrite need --output")
    with Generator.from_pretrained(directory, **_engine_options(args)) as generator:
        if not to_file:
            return _print_answers(generator, args.prompt, params, is_chat=args.chat)
        return _run_file(generator, args, source, params, output)


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


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    workers = None
    if args.workers is not None:
        workers = split_workers(args.workers)
    elif args.token_file is not None:
        raise ConfigError("--token-file is for --workers")
    named = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
    }
    return {
        "workers": workers,
        "token_file": args.token_file,
        "deterministic": args.deterministic,
        **{name: value for name, value in named.items() if value is not None},
    }


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


def _run_file(
    generator: Generator,
    args: argparse.Namespace,
    source: LineSource | None,
    params: SamplingParams,
    output: str,
) -> int:
    from fastdecode_rdma.batch.records import PromptLines
    from fastdecode_rdma.batch.runner import BatchRun

    with ExitStack() as stack:
        writer = LineWriter(output, overwrite=args.overwrite)
        stack.callback(writer.close)
        batch = BatchRun(
            generator,
            source if source is not None else PromptLines(args.prompt),
            writer,
            params,
            is_chat=args.chat,
            with_token_ids=args.token_ids,
        )
        try:
            batch.run()
        except BrokenPipeError:
            raise
        except (KeyboardInterrupt, SystemExit):  # the latter by a signal
            _say(f"interrupted: {batch.counts.summary()}; all are in {writer.name}")
            raise
        except (OSError, FastDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            print(f"fastdecode: error: {reason}", file=sys.stderr)
            _say(f"stopped: {batch.counts.summary()}; all are in {writer.name}")
            return 1
    _say(batch.counts.summary())
    return 1 if batch.counts.failed else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
