"""Tests exercise the installed distribution (wheel or editable), never the bare checkout.

Fixtures here are shared by several rooms: real worker processes, small and real models.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != CHECKOUT]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch's own threads (transformers, the oracles) must give way to worker processes while they wait.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For torch: where matrices are tiny, a second thread only waits for the first."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class WorkerProcess:
    """A real `fastdecode worker` on loopback."""

    process: subprocess.Popen[bytes]
    address: str

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def start_workers(tmp_path: Path) -> Iterator[Callable[..., list[WorkerProcess]]]:
    """Starts worker processes; they end with the test."""
    started: list[WorkerProcess] = []

    def start(count: int, *, memory: str = "512MiB", threads: int = 1) -> list[WorkerProcess]:
        ready_files = []
        processes = []
        for _ in range(count):
            ready_files.append(tmp_path / f"ready{len(started) + len(processes)}")
            command = [sys.executable, "-m", "fastdecode_rdma.cli", "worker"]
            command += ["--listen", "127.0.0.1:0", "--memory", memory, "--threads", str(threads)]
            command += ["--no-touch", "--ready-file", str(ready_files[-1])]
            processes.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL))
        mine = []
        for process, ready in zip(processes, ready_files, strict=True):
            deadline = time.monotonic() + 60
            while not (ready.exists() and ready.read_text().endswith("\n")):
                assert process.poll() is None, "the worker ended before it was ready"
                assert time.monotonic() < deadline, "the worker was not ready within 60 s"
                time.sleep(0.02)
            address = next(w for w in ready.read_text().split() if w.startswith("tcp://"))
            mine.append(WorkerProcess(process, address))
        started.extend(mine)
        return mine

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait(10)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, converted once into the user's cache."""
    from fastdecode_rdma.hub.demo_models import demo_model_dir

    return demo_model_dir("smollm2")


@pytest.fixture(scope="session")
def gemma3_dir() -> Path:
    """Gemma 3 270M, converted once into the user's cache."""
    from fastdecode_rdma.hub.demo_models import demo_model_dir

    return demo_model_dir("gemma3-270m")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once per name) tiny random checkpoints with a byte-level tokenizer of 300 tokens."""
    made: dict[str, tuple[Path, dict[str, object]]] = {}

    def make(name: str, **changes: object) -> Path:
        if name not in made:
            path = _save_tiny(tmp_path_factory.mktemp(name), name.split("-")[0], changes)
            made[name] = path, changes
        path, made_with = made[name]
        assert not changes or changes == made_with, f"{name!r} is another model's name: {made_with}"
        return path

    return make


def _save_tiny(path: Path, family: str, changes: dict[str, object]) -> Path:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    common = {
        "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257,
        "pad_token_id": 258,
    }  # fmt: skip
    llama = {"num_key_value_heads": 2, "intermediate_size": 80, "head_dim": 16}
    families = {
        "llama": (transformers.LlamaConfig, llama),
        "gemma3": (
            transformers.Gemma3TextConfig,
            {**llama, "num_hidden_layers": 7, "sliding_window": 20, "query_pre_attn_scalar": 16},
        ),
        "gemma2": (
            transformers.Gemma2Config,
            {
                **llama,
                "sliding_window": 20,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0,
            },
        ),
        "opt": (
            transformers.OPTConfig,
            {"ffn_dim": 80, "word_embed_proj_dim": 48, "num_attention_heads": 3},
        ),
    }
    kind, own = families[family]
    config = kind(**{**common, **own, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight_name, parameter in model.named_parameters():
        if "norm" not in weight_name:
            # larger than the usual initialisation: logits spread, greedy choices have a margin
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    _save_byte_tokenizer(path)
    return path


def _save_byte_tokenizer(path: Path) -> None:
    """Byte-level BPE without merges: 256 bytes, then <s>, </s>, <pad>; ids up to 299 are unused."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )


TEXTS = [
    "",
    "a",
    " leading and trailing ",
    "def f(x):\n\treturn x ** 2  # it's\r\n\r\n",
    "Grüße, naïve café — 12345 3.14",
    "日本語のテキスト 한국어 텍스트 नमस्ते",
    "😀👨‍👩‍👧🏳️‍🌈 𐍈𝄞",
    "\u0000\u200b\ufeff\ufffd",
    "the quick brown fox jumps over the lazy dog the the END of it",
]


@pytest.fixture(scope="session")
def hf_tokenizer() -> Callable[[Path], Any]:
    """Loads what transformers makes of a directory, once: Gemma's vocabulary takes a while."""
    import transformers

    return cache(transformers.PreTrainedTokenizerFast.from_pretrained)


@pytest.fixture(scope="session")
def real_tokenizer(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Returns our tokenizer of the model "smollm2" or "gemma3", loaded once."""
    from fastdecode_rdma.tokenizer import Tokenizer

    return cache(lambda name: Tokenizer.from_directory(request.getfixturevalue(f"{name}_dir")))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """What text may hold: scripts of one to four bytes a character, joined emoji, odd spaces."""
    return TEXTS


@pytest.fixture(scope="session")
def text_backend() -> Callable[[str], tokenizers.Tokenizer]:
    """Makes a small tokenizer of a kind in _BACKEND_MAKERS, with <s> before each text.

    "llama2" strips the leading space that it adds; "no_decoder" puts a space between tokens.
    """
    return lambda kind: _with_bos(_BACKEND_MAKERS[kind]())


def _byte_level() -> tokenizers.Tokenizer:
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens(["[tool call]"])
    return backend


def _sentencepiece(*, strip: bool) -> tokenizers.Tokenizer:
    """Byte fallback over a few pieces, as Llama 2 (strip) and Gemma have it."""
    from tokenizers import decoders, models, normalizers

    space = "\u2581"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [space, *"thequickbrownDENfx", "th", "the", f"{space}the", f"{space}{space}", "日"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("th", "e"), (space, "the"), (space, space)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", space)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(space), replace]) if strip else replace
    )
    steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["[tool call]"])
    return backend


def _word_piece(*, has_decoder: bool) -> tokenizers.Tokenizer:
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    if has_decoder:
        backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_tokens(["[tool call]"])
    return backend


def _metaspace() -> tokenizers.Tokenizer:
    """As T5 has it: no bytes, the space before the first word is dropped."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens(["[tool call]"])
    return backend


def _with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


_BACKEND_MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": _byte_level,
    "gemma": lambda: _sentencepiece(strip=False),
    "llama2": lambda: _sentencepiece(strip=True),
    "word_piece": lambda: _word_piece(has_decoder=True),
    "metaspace": _metaspace,
    "no_decoder": lambda: _word_piece(has_decoder=False),
}


@pytest.fixture(scope="module", params=[*_BACKEND_MAKERS, "smollm2", "gemma3"])
def tokenizer(
    request: pytest.FixtureRequest,
    text_backend: Callable[[str], tokenizers.Tokenizer],
    real_tokenizer: Callable[[str], Any],
) -> Any:
    """Our tokenizer of every small kind, and those of the real models."""
    from fastdecode_rdma.tokenizer import Tokenizer

    if request.param in _BACKEND_MAKERS:
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        return Tokenizer(text_backend(request.param), special_tokens=special)
    return real_tokenizer(request.param)


@pytest.fixture(scope="module")
def long_generator(tiny_models: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """Opens deterministic generators of a tiny model with 131072 positions, for the module."""
    from fastdecode_rdma import Generator

    path = tiny_models("llama-long", max_position_embeddings=1 << 17)
    with ExitStack() as opened:
        yield lambda **options: opened.enter_context(
            Generator.from_pretrained(path, deterministic=True, **options)
        )


@pytest.fixture
def wait_until_free() -> Callable[..., None]:
    """Waits until a generator with an embedded worker holds no sequence and no KV memory."""

    def wait(gen: object) -> None:
        deadline = time.monotonic() + 5
        while True:
            stats, worker = gen.stats(), gen._parts.backend._workers[0].session.stats()
            held = (
                gen._parts.engine.has_work(), stats.num_requests_running,
                stats.num_requests_waiting, stats.workers[0].kv_cache_bytes,
                worker["sequences"], worker["kv_bytes_used"],
            )  # fmt: skip
            if not any(held):
                return
            assert time.monotonic() < deadline, f"something was not freed: {held}"
            time.sleep(0.005)

    return wait
