"""`fastdecode score`: how probable the continuations and texts of a file are, one a line."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from fastdecode_rdma.command_line import messages_on_stderr, unwinding_on_signals

if TYPE_CHECKING:
    from fastdecode_rdma.batch.intake import FormatFor
    from fastdecode_rdma.batch.job import Job
    from fastdecode_rdma.tokenizer import Tokenizer

EPILOG = """\
input, one JSON object a line (- is standard input):
  {"id": …, "context": text or token ids, "continuation": text or token ids, …}
  {"id": …, "text": text or token ids, …}
  or a Parquet or CSV file (.parquet, .csv, .tsv; extra `batch`) with these columns, a row a line
  Scores are those of the lm-evaluation-harness: the log-probability of the continuation after the
  context (loglikelihood), or of every token of a text (loglikelihood_rolling). What is too long for
  the model is cut off at the left, or scored in windows. Other keys are carried to the output.

output, one JSON object a line:
  {"id": …, "line": N, "logprob": …, "num_tokens": N, "is_greedy": …, …}
  token_logprobs with --token-logprobs; num_truncated where something was cut off. Logarithms are
  natural ones.
  {"id": …, "line": N, "error": {"type": …, "message": …}, …}    a line that failed

An output named .parquet, .csv or .tsv, --resume, --ordered, --limit, --dry-run and the exit status:
as `fastdecode generate --help` says.
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
    parser.add_argument(
        "--input", "-i", required=True, metavar="FILE", help="a file of lines, or - (see below)"
    )
    add_file_arguments(parser)
    parser.add_argument(
        "--token-logprobs", action="store_true", help="add token_logprobs to results"
    )
    parser.add_argument(
        "--prefix-token-id",
        type=int,
        metavar="N",
        help="the token before what has no context (default: BOS, or EOS where there is none)",
    )
    add_engine_arguments(parser)
    add_ray_arguments(parser, with_workers=False)


def run(args: argparse.Namespace) -> int:
    """Scores a file."""
    with messages_on_stderr(), unwinding_on_signals():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from fastdecode_rdma.batch.arguments import check_ray, engine_options
    from fastdecode_rdma.batch.command import Work, run_file
    from fastdecode_rdma.batch.score_runner import ScoreRun
    from fastdecode_rdma.batch.tables import open_source
    from fastdecode_rdma.engine.options import resolve_model_dir
    from fastdecode_rdma.errors import ConfigError
    from fastdecode_rdma.generator import Generator
    from fastdecode_rdma.models.config import ModelConfig

    check_ray(args)
    directory = resolve_model_dir(args.model)
    vocab_size = ModelConfig.from_hf(directory).vocab_size
    if args.prefix_token_id is not None and not 0 <= args.prefix_token_id < vocab_size:
        raise ConfigError(
            f"--prefix-token-id must be a token id below {vocab_size}, got {args.prefix_token_id}"
        )
    work = Work(
        command="score",
        directory=directory,
        facts={
            "token_logprobs": args.token_logprobs,
            "prefix_token_id": args.prefix_token_id,
        },
        seed=0,
        load=partial(Generator.from_pretrained, directory, **engine_options(args)),
        formats=partial(_formats, args),
        make_run=partial(ScoreRun, prefix_token_id=args.prefix_token_id),
        score_options={"prefix_token_id": args.prefix_token_id},
    )
    return run_file(args, open_source(args.input), work)


def _formats(args: argparse.Namespace, job: Job, tokenizer: Tokenizer | None) -> FormatFor:
    from fastdecode_rdma.batch.score_lines import ScoreLines

    return lambda first: ScoreLines(with_token_logprobs=args.token_logprobs)
