"""What a model's generation_config.json recommends for requests that give no parameters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.json_files import read_json
from fastdecode_rdma.sequence import SamplingParams

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of the file that count, as in vLLM, and our names; the others are for other libraries.
`do_sample` counts as well: false is greedy."""


class SamplingDefaults:
    """The sampling values of one model's generation_config.json, read at once, checked when used:
    who passes SamplingParams does not depend on them.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the file of a model directory; a missing one recommends nothing.

        Raises:
            ConfigError: the file is no JSON object.
        """
        self._path = directory / FILE_NAME
        self._values = read_json(self._path) if self._path.exists() else {}
        self._params: SamplingParams | None = None
        self._was_logged = False

    def params(self) -> SamplingParams:
        """Returns the parameters that the file describes; SamplingParams() where it says nothing.

        Raises:
            ConfigError: a value is wrong; names file and key.
        """
        if self._params is None:
            self._params = SamplingParams(**self._checked())
        return self._params

    def apply(self) -> SamplingParams:
        """Returns `params()`, and says so in the log the first time that they matter.

        Raises:
            ConfigError: as `params`.
        """
        params = self.params()
        if params != SamplingParams() and not self._was_logged:
            self._was_logged = True
            values = ", ".join(f"{name}={value!r}" for name, value in self._checked().items())
            logger.warning(
                "no sampling parameters given: %s of %s apply; pass SamplingParams() for the "
                "neutral ones",
                values,
                self._path,
            )
        return params

    def _checked(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, name in SAMPLING_KEYS.items():
            value = self._values.get(key)
            if value is None:
                continue
            try:
                SamplingParams(**{name: value})
            except ConfigError as error:
                raise self._wrong(f"{key}={value!r}: {error}") from None
            found[name] = value
        do_sample = self._values.get("do_sample")
        if do_sample is not None and not isinstance(do_sample, bool):
            raise self._wrong(f"do_sample must be true or false, got {do_sample!r}")
        return found | {"temperature": 0.0} if do_sample is False else found

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}; correct the file, or pass SamplingParams")
