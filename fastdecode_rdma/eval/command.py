"""`fastdecode lm-eval`: the harness's own command line, which then knows our model."""

from __future__ import annotations

import argparse
import sys

from fastdecode_rdma.errors import ConfigError

EPILOG = """\
example:
  fastdecode lm-eval run --model fastdecode --model_args pretrained=DIR --tasks hellaswag
Workers are given as workers='tcp://host1:18815;tcp://host2:18815', or as a JSON list.
`fastdecode lm-eval run --help` is the harness's own help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything goes to the harness as it is."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="run|ls|validate …",
        help="the subcommand of lm-eval, and its arguments",
    )


def run(args: argparse.Namespace) -> int:
    """Hands over to `lm_eval.__main__.cli_evaluate`."""
    if not args.arguments:
        raise ConfigError("lm-eval needs a subcommand: run, ls or validate")
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ConfigError(
            f"the lm-evaluation-harness cannot be imported ({error}); install it with "
            "`pip install 'fastdecode_rdma[eval]'`"
        ) from error
    from fastdecode_rdma.eval.model import FastDecodeLM  # registers itself by the name fastdecode

    assert FastDecodeLM is not None
    before = sys.argv
    sys.argv = ["lm-eval", *args.arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
