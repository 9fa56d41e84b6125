"""From a sampled token to an event: stop rules, text, and what remains of a sequence."""

from __future__ import annotations

from fastdecode_rdma.engine.state import LiveSequence
from fastdecode_rdma.sequence import Logprob, TokenEvent


def accept_token(
    seq: LiveSequence,
    token_id: int,
    logprob: float | None,
    top_logprobs: dict[int, Logprob] | None,
    max_model_len: int,
) -> TokenEvent:
    """Appends a token to the sequence and returns its event; `finish_reason` is set when it was the last.

    Stop rules in vLLM's order: end-of-sequence ids, stop_token_ids, stop strings, length.
    """
    request, params = seq.request, seq.request.params
    seq.output_ids.append(token_id)
    num_output = len(seq.output_ids)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    may_stop = num_output >= params.min_tokens
    text = ""
    if may_stop and not params.ignore_eos and token_id in request.eos_token_ids:
        finish_reason = "stop"
    elif may_stop and token_id in params.stop_token_ids:
        finish_reason, stop_reason = "stop", token_id
    if seq.detokenizer is not None:
        # the token that stopped us is no text, unless the caller wants special tokens shown
        text = seq.detokenizer.push(token_id, is_stop_token=finish_reason is not None)
        if finish_reason is None and seq.detokenizer.stop_string is not None:
            finish_reason, stop_reason = "stop", seq.detokenizer.stop_string
    if finish_reason is None and (
        num_output >= request.max_tokens or seq.num_tokens >= max_model_len
    ):
        finish_reason = "length"
    if finish_reason is not None and seq.detokenizer is not None:
        text += seq.detokenizer.flush()
    return TokenEvent(
        request_index=request.index,
        sample_index=seq.sample_index,
        token_id=token_id,
        text=text,
        logprob=logprob,
        top_logprobs=top_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
