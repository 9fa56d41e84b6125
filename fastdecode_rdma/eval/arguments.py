"""The harness's model arguments -> those of `Generator.from_pretrained`.

They come as text from `--model_args`, cut at commas, and with some that nobody asked for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from fastdecode_rdma.errors import ConfigError

logger = logging.getLogger(__name__)

_told: set[str] = set()

NEUTRAL: dict[str, tuple[object, ...]] = {
    "revision": (None, "main"),
    "tokenizer_revision": (None, "main"),
    "trust_remote_code": (None, False),
    "use_fast_tokenizer": (None, True),
    "backend": (None, "default", "causal"),
    "parallelize": (None, False),
    "softmax_dtype": (None, "float32"),
}
"""Arguments of the harness's other models that change nothing here with these values."""


def tell_once(message: str) -> None:
    """Logs what a user should know but cannot change, once per process."""
    if message not in _told:
        _told.add(message)
        logger.warning(message)


def generator_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of the rest of the model arguments goes to `Generator.from_pretrained`.

    Raises:
        ConfigError: a part of a list of addresses that was cut at its commas, or a value that
            means something to another model.
    """
    kept = {}
    for name, value in arguments.items():
        if looks_like_address(name):
            raise ConfigError(
                f"model argument {name!r} looks like a worker's address: the harness cuts "
                "model_args at commas; separate workers by ';', as in workers=tcp://a:1;tcp://b:1, "
                "or give all model_args as one JSON object"
            )
        if name in NEUTRAL and value in NEUTRAL[name]:
            continue
        kept[name] = value
    return kept


def looks_like_address(name: str) -> bool:
    """Whether a name can only be a part of `workers`."""
    bare = name.strip().strip("\"'[]")
    return ":" in bare or "/" in bare or bare.count(".") == 3


def worker_addresses(value: object) -> list[str] | None:
    """Returns workers as addresses: a list, a JSON list, or text separated by ';'.

    Raises:
        ConfigError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, str):
        raise ConfigError(f"workers must be a list of addresses, got {value!r}")
    text = value.strip()
    if text.startswith("["):
        try:
            return list(json.loads(text))
        except ValueError as error:
            raise ConfigError(
                f"workers={value!r} is no JSON list ({error}); the harness cuts model_args at "
                "commas where they are given as one text: separate workers by ';'"
            ) from error
    return [address.strip() for address in text.split(";") if address.strip()]


def usable_device(device: object) -> str | None:
    """Returns the generator's device. The harness's command line says "cuda:0" unasked: that is the
    CPU, where there is no such device and where there is one, which a generator does not take."""
    if device is None:
        return None
    if str(device).split(":")[0] == "cuda":
        why = "is not used by this version" if torch.cuda.is_available() else "is not there"
        tell_once(f"device={device!r}: a CUDA device {why}, the dense layers run on the CPU")
        return "cpu"
    return str(device)


def note_batch_size(batch_size: object, max_batch_size: object) -> None:
    """Says why batch sizes are not used."""
    for name, value in (("batch_size", batch_size), ("max_batch_size", max_batch_size)):
        if value is not None:
            tell_once(
                f"{name}={value} is ignored: requests are packed by tokens "
                "(max_num_batched_tokens), and as many generate at once as there are seats "
                "(max_num_seqs)"
            )


def as_int(name: str, value: object, *, low: int = 0) -> int | None:
    """Returns a whole number of model_args, which may come as text.

    Raises:
        ConfigError: it is none.
    """
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None
    if number < low:
        raise ConfigError(f"{name} must be at least {low}, got {number}")
    return number


def as_dict(name: str, value: object) -> dict[str, Any]:
    """Returns a dict of model_args, which may come as JSON.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} must be a JSON object, got {value!r} ({error})") from error
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a dict, got {value!r}")
    return dict(value or {})
