"""README.md is true: its examples run as written, its first two commands are one line each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from fastdecode_rdma import Generator, QueueFullError, SamplingParams
from fastdecode_rdma.cli import COMMANDS

README = Path(__file__).resolve().parents[1] / "README.md"
PLACEHOLDER = '"path/to/model"'


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def is_server(source: str) -> bool:
    """Whether an example is a web application, which runs when it is asked something."""
    return "FastAPI()" in source


GENERATION, SCORING = (source for source in blocks("python") if not is_server(source))


def run_example(source: str, model_dir: Path) -> dict[str, Any]:
    """Runs an example as written, but for the model's path; returns its names."""
    assert PLACEHOLDER in source
    names: dict[str, Any] = {}
    exec(compile(source.replace(PLACEHOLDER, repr(str(model_dir))), str(README), "exec"), names)
    return names


def test_the_first_two_commands_are_one_line_each_and_use_the_tested_torch() -> None:
    main, tests = blocks("sh")[:2]
    for block in (main, tests):
        assert block.count("\n") == 1 and block.endswith("\n")
        assert "-c constraints.txt" in block and "venv" in block
    assert "fastdecode demo" in main
    assert "[test]" in tests and "pytest" in tests
    constraints = (README.parent / "constraints.txt").read_text()
    assert "torch==" in constraints


def test_the_ci_runs_the_readmes_test_command() -> None:
    script = (README.parent / ".ci" / "run").read_text()
    assert "README.md" in script and 'bash -c "$(readme_command 2)"' in script


GEMMA_TURNS = """{{ bos_token }}{% for message in messages -%}
<start_of_turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@pytest.fixture
def gemma3_chat_dir(gemma3_dir: Path, tmp_path: Path) -> Path:
    """Gemma 3 270M with Gemma's chat format: its GGUF file comes without a template."""
    for path in gemma3_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(GEMMA_TURNS)
    return tmp_path


@pytest.mark.parametrize("model", ["smollm2_dir", "gemma3_chat_dir"])
def test_generation_runs_as_written(
    model: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chat of the example goes through the model's own template."""
    names = run_example(GENERATION, request.getfixturevalue(model))
    printed = capsys.readouterr().out
    assert model != "smollm2_dir" or "Paris" in printed, printed
    assert [len(output.token_ids) > 3 for output in names["result"].outputs] == [True, True]


def test_scoring_runs_as_written(smollm2_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_example(SCORING, smollm2_dir)
    assert names["pair"].is_greedy and len(capsys.readouterr().out.splitlines()) == 2


@pytest.fixture(scope="module")
def server(smollm2_dir: Path) -> Iterator[dict[str, Any]]:
    (source,) = filter(is_server, blocks("python"))
    names = run_example(source, smollm2_dir)
    with names["gen"]:
        yield names


class Client:
    """One request to an ASGI application, without a network in between."""

    def __init__(self, app: Any, *, leaves_after: int | None = None) -> None:
        """`leaves_after`: messages from the application after which the client is gone."""
        self.app, self.leaves_after = app, leaves_after
        self.sent: list[dict[str, Any]] = []

    def ask(self, method: str, path: str, **query: object) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": urlencode(query).encode(), "headers": [], "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        asyncio.run(asyncio.wait_for(self._run(scope), 60))

    async def _run(self, scope: dict[str, Any]) -> None:
        leaves, bodies = asyncio.Event(), iter([b""])

        async def receive() -> dict[str, Any]:
            if next(bodies, None) is not None:
                return {"type": "http.request", "body": b"", "more_body": False}
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)
            if len(self.sent) == self.leaves_after:
                leaves.set()

        await self.app(scope, receive, send)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def kind(self) -> str:
        return dict(self.sent[0]["headers"])[b"content-type"].decode()

    @property
    def parts(self) -> list[str]:
        return [part.decode() for m in self.sent[1:] if (part := m.get("body", b""))]

    @property
    def text(self) -> str:
        return "".join(self.parts)


def ask(server: dict[str, Any], method: str, path: str, **query: object) -> Client:
    client = Client(server["app"])
    client.ask(method, path, **query)
    return client


def test_the_server_streams_text_and_says_how_it_fares(server: dict[str, Any]) -> None:
    answer = ask(server, "POST", "/generate", prompt="The capital of France is", max_tokens=8)
    assert answer.status == 200 and answer.kind.startswith("text/plain")
    assert len(answer.parts) > 1 and len(answer.text) > 8  # streamed, not at once
    for query in ({"prompt": "a", "max_tokens": 0}, {"prompt": ""}):
        refused = ask(server, "POST", "/generate", **query)
        assert refused.status == 400
    assert "the prompt is empty" in refused.text
    metrics = ask(server, "GET", "/metrics")
    assert metrics.status == 200 and metrics.kind.startswith("text/plain")
    assert re.search(
        r"^fastdecode_generation_tokens_total\{.*\} [1-8]$", metrics.text, re.MULTILINE
    )


def test_a_client_that_leaves_the_server_frees_its_memory(
    server: dict[str, Any], wait_until_free: Callable[..., None]
) -> None:
    gen, client = server["gen"], Client(server["app"], leaves_after=5)
    aborted = gen.stats().request_success_total["abort"]
    client.ask("POST", "/generate", prompt="Once upon a time", max_tokens=4000)
    assert client.status == 200 and 5 <= len(client.sent) < 100
    wait_until_free(gen)
    assert gen.stats().request_success_total["abort"] == aborted + 1


def test_a_full_server_says_so(
    server: dict[str, Any], wait_until_free: Callable[..., None]
) -> None:
    gen = server["gen"]
    with ExitStack() as stack:
        with pytest.raises(QueueFullError):
            while True:
                stack.enter_context(gen.submit([1], SamplingParams(max_tokens=500)))
        answer = ask(server, "POST", "/generate", prompt="a")
    assert answer.status == 503 and "try again later" in answer.text
    wait_until_free(gen)
    assert ask(server, "POST", "/generate", prompt="a", max_tokens=2).status == 200


def test_there_is_an_example_and_it_is_public() -> None:
    (example, *_) = blocks("python")
    assert "from fastdecode_rdma import Generator, SamplingParams" in example
    assert example.count("with Generator.from_pretrained(") == 1


def test_commands_and_arguments_named_in_the_text_exist() -> None:
    text = README.read_text()
    named = set(re.findall(r"(?:^|`|/)fastdecode ([a-z]+(?:-[a-z]+)*)", text, re.MULTILINE))
    assert named and named <= set(COMMANDS), named - set(COMMANDS)
    arguments = set(
        re.findall(r"\b(\w+)=", " ".join(re.findall(r"from_pretrained\((.*?)\)", text, re.DOTALL)))
    )
    known = set(Generator.from_pretrained.__func__.__annotations__)
    assert arguments <= known, arguments - known
