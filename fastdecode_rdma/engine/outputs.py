"""From a sampled token to an event: stop rules, text, and what remains of a sequence."""

from __future__ import annotations

from fastdecode_rdma.engine.state import EngineOptions, LiveSequence, Request
from fastdecode_rdma.errors import FastDecodeError, SamplingError
from fastdecode_rdma.sampling import SampledTokens
from fastdecode_rdma.sequence import TokenEvent


def accept_token(
    seq: LiveSequence, sampled: SampledTokens, row: int, options: EngineOptions
) -> TokenEvent:
    """Appends the token of `row` to the sequence and returns its event.

    `finish_reason` is set when it was the last. Stop rules in vLLM's order: end-of-sequence ids,
    stop_token_ids, stop strings, length.
    """
    request, params = seq.request, seq.request.params
    token_id = sampled.token_ids[row]
    seq.output_ids.append(token_id)
    seq.job.num_tokens = seq.num_tokens
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    if len(seq.output_ids) >= params.min_tokens:
        if token_id in options.eos_token_ids and not params.ignore_eos:
            finish_reason = "stop"
        elif token_id in params.stop_token_ids:
            finish_reason, stop_reason = "stop", token_id
    text = ""
    if seq.detokenizer is not None:
        text = seq.detokenizer.push(token_id, is_stop_token=finish_reason is not None)
        if finish_reason is None and seq.detokenizer.stop_string is not None:
            finish_reason, stop_reason = "stop", seq.detokenizer.stop_string
    if finish_reason is None and (
        len(seq.output_ids) >= request.max_tokens or seq.num_tokens >= options.max_model_len
    ):
        finish_reason = "length"
    if finish_reason is not None and seq.detokenizer is not None:
        text += seq.detokenizer.flush()
        if finish_reason == "length" and seq.detokenizer.stop_string is not None:
            finish_reason, stop_reason = "stop", seq.detokenizer.stop_string
    top = None if sampled.top_logprobs is None else sampled.top_logprobs[row]
    if top is not None and params.detokenize:
        top.decode_token = options.decode_token
    return TokenEvent(
        request_index=request.index,
        sample_index=seq.sample_index,
        token_id=token_id,
        text=text,
        logprob=None if sampled.logprobs is None else sampled.logprobs[row],
        top_logprobs=top,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )


def failed_by(request: Request, error: Exception) -> FastDecodeError:
    """Returns the error of a request that something outside the engine ended."""
    wrapped = FastDecodeError(f"request {request.index}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def no_token(seq: LiveSequence, error: SamplingError | None) -> FastDecodeError:
    """Returns the error of a request for which no token could be chosen."""
    if error is None:
        return non_finite(seq, "logits")
    place = len(seq.output_ids)
    wrapped = SamplingError(f"request {seq.request.index}, output token {place}: {error}")
    wrapped.__cause__ = error.__cause__
    return wrapped


def non_finite(seq: LiveSequence, where: str) -> FastDecodeError:
    """Returns the error of a request whose values overflowed."""
    return FastDecodeError(
        f"request {seq.request.index}: non-finite {where} at token {seq.num_tokens}; "
        "the weights or the KV dtype overflow (try dtype='float32' or kv_cache_dtype='fp32')"
    )
