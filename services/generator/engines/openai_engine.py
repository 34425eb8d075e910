"""Engine over any server with OpenAI's completions interface, for policies that are not trained
here.

Requests and responses use token ids, so the server must support `return_token_ids`, as vLLM does.
For behaviour logprobs at temperatures other than 1 start vLLM with
`--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from services.generator.engines.base import Engine, EngineError, EngineSettings, Sample, SamplingParams, UnsupportedByEngine
from services.generator.engines.model_folder import ModelFolder, derived_seed, read_model_folder

_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


class OpenAiEngine(Engine):
    """Samples over HTTP.

    Args:
        model_path: folder or hub name of the same model, read for its tokenizer and end tokens.
        revision: commit of a hub name.
        base_url: the server's address with its version, such as `http://localhost:8000/v1`.
        served_model: the model's name on the server; None takes the only one it lists.
        api_key: sent as a bearer token when given.
        max_model_len: most tokens of prompt and completion together.
        request_timeout_s: deadline of one prompt's request, retries included.
        max_connections: most requests at a time.
    """

    name = "openai"
    loads_policies = False
    shares_device = False

    def __init__(
        self,
        model_path: str,
        *,
        revision: str = "",
        base_url: str,
        served_model: str | None = None,
        api_key: str | None = None,
        max_model_len: int = 2048,
        request_timeout_s: float = 120.0,
        max_connections: int = 64,
    ) -> None:
        self._model_path = model_path
        self._revision = revision
        self._base_url = base_url.rstrip("/")
        self._served_model = served_model
        self._max_model_len = max_model_len
        self._request_timeout_s = request_timeout_s
        self._folder: ModelFolder | None = None
        self._turns = asyncio.Semaphore(max_connections)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(request_timeout_s, connect=10.0),
            limits=httpx2.Limits(max_connections=max_connections),
        )

    async def start(self) -> None:
        """Read the tokenizer and make sure that the server serves the model."""
        self._folder = await asyncio.to_thread(
            read_model_folder, self._model_path, max_model_len=self._max_model_len, revision=self._revision
        )
        served = [str(model["id"]) for model in (await self._request("GET", "/models"))["data"]]
        wanted = self._served_model or (served[0] if len(served) == 1 else None)
        if wanted not in served:
            raise EngineError(f"{self._base_url} serves {served}, not {wanted}: set the served model to one of these")
        self._served_model = wanted

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` says, one request a prompt; how repeatable that is depends on
        the server.
        """
        if self._folder is None:
            raise EngineError("the openai engine has not started: await start() first")
        folder, greedy = self._folder, params.temperature == 0.0
        n_asked = 1 if greedy else n
        limits = folder.new_token_limits(prompts, params.max_new_tokens)
        bodies = [
            {
                "model": self._served_model,
                "prompt": list(prompt),
                "n": n_asked,
                "max_tokens": limit,
                "temperature": params.temperature,
                "top_p": 1.0 if greedy else params.top_p,
                "seed": derived_seed(seed, index),
                "logprobs": 1,
                # Not OpenAI's own. Said even when off: vLLM would take them from the model's
                # generation_config.
                "top_k": 0 if greedy else params.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": list(folder.end_token_ids),
                "return_token_ids": True,
            }
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        answers = await asyncio.gather(*(self._request("POST", "/completions", body) for body in bodies))
        return [self._samples(answer, n_asked, folder) * (n // n_asked) for answer in answers]

    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Refuse: the server's weights are not this node's to change."""
        raise UnsupportedByEngine(
            f"policy {version}: the openai engine cannot load weights into {self._base_url}: "
            "use engine vllm or transformers for a policy that trains, or run this node without a trainer"
        )

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Refuse: the interface cannot score given tokens."""
        raise UnsupportedByEngine("the openai engine cannot score given tokens: use engine vllm or transformers")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _samples(self, answer: dict[str, Any], n: int, folder: ModelFolder) -> list[Sample]:
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != n:
            raise EngineError(f"{self._base_url} returned {len(choices)} completions of {n}: use a server that supports n")
        return [_sample(choice, folder, self._base_url) for choice in choices]

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask until there is an answer, with growing pauses, up to the deadline."""
        url = self._base_url + path
        give_up_at = time.monotonic() + self._request_timeout_s
        pause_s = _FIRST_PAUSE_S
        for tries in range(1, 1_000_000):
            try:
                async with self._turns, asyncio.timeout(max(give_up_at - time.monotonic(), 0.001)):
                    answer = await self._client.request(method, url, json=body)
                if answer.is_success:
                    return dict(answer.json())
                cause = f"status {answer.status_code}: {answer.text[:300]}"
                retry = answer.status_code in _RETRY_STATUS
            except (httpx2.TransportError, TimeoutError) as error:
                cause, retry = f"{type(error).__name__}: {error}", True
            except ValueError as error:
                raise EngineError(
                    f"{method} {url}: the answer is not JSON ({error}): is this an OpenAI-compatible server?"
                ) from error
            if not retry:
                raise EngineError(f"{method} {url}: refused with {cause}: check the server's address, key, model and version")
            if time.monotonic() + pause_s >= give_up_at:
                raise EngineError(
                    f"{method} {url}: no answer after {tries} tries in {self._request_timeout_s:g} s ({cause}): "
                    "start the server, correct its address or raise the request timeout"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("unreachable: the deadline ends the loop")


def _sample(choice: dict[str, Any], folder: ModelFolder, base_url: str) -> Sample:
    token_ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if token_ids is None or logprobs is None or len(token_ids) != len(logprobs):
        raise EngineError(
            f"{base_url} returned no token ids with their logprobs: use a server that supports return_token_ids, such as vLLM"
        )
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineError(f"{base_url} ended a completion with {choice['finish_reason']}: see the server's log")
    return Sample(
        token_ids=tuple(token_ids),
        text=folder.text(token_ids),
        finish_reason=choice["finish_reason"],
        logprobs=tuple(float(logprob) for logprob in logprobs),
    )


def open_engine(settings: EngineSettings) -> OpenAiEngine:
    """The engine that `generator.engine = "openai"` asks for. Raises `EngineError` without a
    server's address.
    """
    if settings.base_url is None:
        raise EngineError("engine openai: no server address: set base_url, such as http://localhost:8000/v1")
    return OpenAiEngine(
        settings.model_path,
        revision=settings.revision,
        base_url=settings.base_url,
        served_model=settings.served_model,
        api_key=settings.api_key,
        max_model_len=settings.max_model_len,
        request_timeout_s=settings.request_timeout_s,
    )
