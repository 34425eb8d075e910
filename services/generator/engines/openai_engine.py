"""Engine over any server with OpenAI's completions or chat interface, for policies that are not
trained here.

What the server can do is found out at the start, with a completion of one token:

| the server | what comes of it |
|---|---|
| takes token ids and gives them back (`return_token_ids`, as vLLM does) | groups with tokens |
| takes and gives text alone | groups of text alone |
| has a chat interface alone | the same, asked with messages |
| gives one completion a request, whatever `n` says | it is asked once for each |

Of text alone the tokens are counted with the model's own tokenizer, and no logprobs are known:
verifier and swarm take such groups, this node's trainer does not. For behaviour logprobs of
temperatures other than 1 start vLLM with `--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog
from msgspec import Meta

from services.generator.engines.base import (
    Engine,
    EngineAway,
    EngineError,
    EngineSettings,
    Prompt,
    Sample,
    SamplingParams,
    UnsupportedByEngine,
    WrongSetting,
)
from services.generator.engines.model_folder import ModelFolder, derived_seed, read_model_folder
from shared.cancelling import together
from shared.contracts.codec import MAX_LOGPROB
from shared.openai_server import OpenAiRequests, RefusedRequest, ServerAway, ServerError, UnusableAnswer

log = structlog.get_logger(__name__)

_NOT_TAKEN = (400, 404, 405, 422, 501)
"""Statuses with which servers refuse unknown fields or endpoints."""
_NO_ENTRY = (401, 403)
"""Statuses with which servers refuse a key."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of the server. `tokens`: it accepts token ids and returns them with logprobs.
    `many`: several completions per request. `chat`: it has a chat interface alone.
    """

    tokens: bool
    many: bool
    chat: bool = False


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
        self._served_model = served_model
        self._max_model_len = max_model_len
        self._folder: ModelFolder | None = None
        self._abilities = Abilities(tokens=True, many=True)
        relief = "ask it for less at a time (generator.groups_per_call)"
        self._server = OpenAiRequests(
            base_url, api_key, request_timeout_s, max_connections, setting="generator.openai_url", relief=relief
        )

    async def start(self) -> None:
        """Read the tokenizer, check that the server serves the model, and find out what it
        supports.
        """
        self._folder = await asyncio.to_thread(
            read_model_folder, self._model_path, max_model_len=self._max_model_len, revision=self._revision
        )
        with _engine_errors():
            self._served_model = await self._model_on_server()
            self._abilities = await self._probe(self._folder)
        if self._abilities.tokens:
            log.info("openai_server", model=self._served_model, tokens=True, many=self._abilities.many)
        else:
            consequence = "groups hold text alone, and this node's trainer takes none of them"
            log.warning("openai_server", model=self._served_model, tokens=False, many=self._abilities.many, consequence=consequence)

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` describes, with one request per prompt if the server gives
        several completions. How reproducible the samples are depends on the server. Prompts that
        it refuses, and those whose completions cannot be used, get none.
        """
        if self._folder is None:
            raise EngineError("the openai engine has not started: await start() first")
        folder, n_asked = self._folder, 1 if params.temperature == 0.0 else n
        limits = folder.new_token_limits(prompts, params.max_new_tokens)
        requests, per_request = (1, n_asked) if self._abilities.many else (n_asked, 1)
        bodies = [
            [
                self._body(folder, prompt, per_request, limit, params, derived_seed(seed, index * requests + number))
                for number in range(requests)
            ]
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        with _engine_errors():
            groups = await together(*(self._group(each, per_request, folder) for each in bodies))
        refusals = [group for group in groups if isinstance(group, EngineError)]
        if refusals:
            log.warning("prompts_without_answer", prompts=len(refusals), of=len(prompts), reason=str(refusals[0]))
        return [[] if isinstance(group, EngineError) else group * (n // n_asked) for group in groups]

    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Always refuses, because this node does not own the server's weights."""
        raise UnsupportedByEngine(
            f"policy {version}: the openai engine cannot load weights into {self._server.base_url}: "
            "use engine vllm or transformers for a policy that trains, or run this node without a trainer"
        )

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Always refuses, because the interface cannot score given tokens."""
        raise UnsupportedByEngine("the openai engine cannot score given tokens: use engine vllm or transformers")

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()

    async def _model_on_server(self) -> str:
        """The model's name on the server. If the server lists no models, the configured name is
        used unchecked.
        """
        try:
            listed = (await self._server.ask("GET", "/models")).get("data") or []
            served = [str(model["id"]) for model in listed]
            "".join(served).encode()  # a lone surrogate is no name
        except RefusedRequest as error:
            if self._served_model is None or error.status not in _NOT_TAKEN:
                raise
            return self._served_model
        except (KeyError, TypeError, UnicodeEncodeError) as error:
            raise EngineError(
                f"{self._server.base_url}/models: not the list of an OpenAI-compatible server ({error!r}): check the address"
            ) from None
        wanted = self._served_model or (served[0] if len(served) == 1 else None)
        if wanted is None or wanted not in served:
            raise EngineError(
                f"{self._server.base_url} serves {served}, not {wanted}: set generator.openai_model to one of these "
                "(without it, model.name is asked for)"
            )
        return wanted

    async def _probe(self, folder: ModelFolder) -> Abilities:
        """Request two completions of one token: with token ids, or if that fails, with text, or
        else as a chat.

        Raises:
            EngineError: all fail.
        """
        ids, params = folder.tokenizer.encode("1 + 1 =") or list(folder.end_token_ids[:1]), SamplingParams(max_new_tokens=1)
        prompt = Prompt(ids, [{"role": "user", "content": "1 + 1 ="}])
        for tokens, chat in ((True, False), (False, False), (False, True)):
            self._abilities = Abilities(tokens=tokens, many=True, chat=chat)
            try:
                choices = await self._complete(self._body(folder, prompt, 2, 1, params, 1))
            except RefusedRequest as error:
                if not chat and error.status in _NOT_TAKEN:
                    continue
                raise EngineError(f"{error} (a completions or a chat interface is needed)") from None
            if not choices:
                raise EngineError(
                    f"{self._server.base_url} answered without a completion: is this a server with OpenAI's completions or chat "
                    "interface?"
                )
            if not tokens or all(has_tokens(choice) for choice in choices):
                return Abilities(tokens=tokens, many=len(choices) == 2, chat=chat)
        raise AssertionError("unreachable: of a chat there is an answer or an error")

    def _body(
        self, folder: ModelFolder, prompt: Sequence[int], n: int, limit: int, params: SamplingParams, seed: int
    ) -> dict[str, Any]:
        """A request for `n` completions. Fields outside of OpenAI's interface are sent only to a
        server that knows them, or if sampling would otherwise not match the parameters.
        """
        greedy = params.temperature == 0.0
        if self._abilities.chat:
            asked: dict[str, Any] = {"messages": _messages(prompt)}
        else:
            asked = {"prompt": list(prompt) if self._abilities.tokens else _as_text(folder, prompt)}
        body: dict[str, Any] = {
            "model": self._served_model,
            **asked,
            "n": n,
            "max_tokens": limit,
            "temperature": params.temperature,
            "top_p": 1.0 if greedy else params.top_p,
            "seed": seed,
        }
        if not self._abilities.tokens:
            return body | ({"top_k": params.top_k} if params.top_k and not greedy else {})
        return body | {
            "logprobs": 1,
            # Sent even when off, because vLLM would otherwise take them from the model's
            # generation_config.
            "top_k": 0 if greedy else params.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(folder.end_token_ids),
            "return_token_ids": True,
        }

    async def _group(self, bodies: Sequence[dict[str, Any]], n: int, folder: ModelFolder) -> list[Sample] | EngineError:
        """The completions of one prompt, or why the server gives none that can be used, which says
        nothing of other prompts.
        """
        try:
            answers = await together(*(self._complete(body) for body in bodies))
            most = bodies[0]["max_tokens"]
            return [each for answer in answers for each in self._samples(answer, n, most, folder)]
        except RefusedRequest as error:
            if error.status in _NO_ENTRY:
                raise WrongSetting(str(error)) from None
            return EngineError(str(error))
        except UnusableAnswer as error:
            return EngineError(str(error))

    async def _complete(self, body: dict[str, Any]) -> list[Choice]:
        path = "/chat/completions" if self._abilities.chat else "/completions"
        answer = await self._server.ask("POST", path, body, most_bytes=most_bytes(body))
        return read_choices(answer, f"{self._server.base_url}{path}", chat=self._abilities.chat)

    def _samples(self, choices: Sequence[Choice], n: int, most: int, folder: ModelFolder) -> list[Sample]:
        if len(choices) != n:
            raise UnusableAnswer(
                f"{self._server.base_url} returned {len(choices)} completions of {n}, unlike when it was started: see the server's "
                "log; if it was replaced, restart the generator"
            )
        found = [
            sample(choice, folder, most=most, tokens=self._abilities.tokens, where=self._server.base_url) for choice in choices
        ]
        self.completions_ended += n
        self.tokens_sampled += sum(len(each.token_ids) for each in found)
        return found


def _messages(prompt: Sequence[int]) -> list[Mapping[str, str]]:
    """Raises EngineError: the prompt is no conversation."""
    if not isinstance(prompt, Prompt) or not prompt.messages:
        raise EngineError("a server with a chat interface alone takes messages, and this prompt has none: use another engine")
    return list(prompt.messages)


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except ServerAway as error:
        raise EngineAway(str(error)) from None
    except ServerError as error:
        raise EngineError(str(error)) from None


def _as_text(folder: ModelFolder, prompt: Sequence[int]) -> str:
    """The prompt's text, including control tokens, without the first one if the server's own
    tokenizer will add it again.
    """
    text: str = folder.tokenizer.decode(list(prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.removeprefix(folder.tokenizer.bos_token or "")


def open_engine(settings: EngineSettings) -> OpenAiEngine:
    """The engine for `generator.engine = "openai"`. Raises `EngineError` without a server's
    address.
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


_MOST_BYTES_PER_TOKEN = 1024
"""Of a completion, with its text, token ids and logprobs in JSON: some ten times the usual."""
_MOST_BYTES_BESIDE = 2**16
_MORE_TOKENS = 16


class Choice(msgspec.Struct):
    """One completion; what else servers send with it is ignored."""

    index: int
    text: str
    finish_reason: str | None = None
    token_ids: Any = None
    logprobs: Any = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Tokens(msgspec.Struct):
    token_ids: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[Choice]


class _Message(msgspec.Struct):
    content: str | None = None


class _Turn(msgspec.Struct):
    index: int
    message: _Message
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    choices: list[_Turn]


def read_choices(answer: dict[str, Any], where: str, *, chat: bool = False) -> list[Choice]:
    """The completions in their order; `where` is the address that was asked. chat: whether it is
    that of the chat interface. Raises `UnusableAnswer`.
    """
    try:
        if chat:
            turns = msgspec.convert(answer, _Chat).choices
            choices = [Choice(each.index, each.message.content or "", each.finish_reason) for each in turns]
        else:
            choices = msgspec.convert(answer, _Answer).choices
        for choice in choices:
            choice.text.encode()  # half of a surrogate pair, which JSON can hold and nothing else
    except ValueError as error:
        raise UnusableAnswer(f"{where}: the answer cannot be read ({error}): is this a server with OpenAI's interface?") from None
    return sorted(choices, key=lambda choice: choice.index)


def most_bytes(body: dict[str, Any]) -> int:
    """Bound the size of the answer to a request. Some servers repeat the prompt in each choice."""
    size: int = body["n"] * (_MOST_BYTES_PER_TOKEN * body["max_tokens"] + 32 * len(body.get("prompt", "")))
    return _MOST_BYTES_BESIDE + size


def has_tokens(choice: Choice) -> bool:
    """Check whether the completion comes with token ids and the logprob of each."""
    return _tokens(choice) is not None


def sample(choice: Choice, folder: ModelFolder, *, most: int, tokens: bool, where: str) -> Sample:
    """One completion of at most `most` tokens; `tokens`: whether the server gave token ids when it
    was started.

    Raises:
        UnusableAnswer: it is longer, or ended in another way than a model ends.
        EngineError: it lacks token ids.
    """
    finish: Literal["stop", "length"] | Any = choice.finish_reason
    if finish not in ("stop", "length"):
        raise UnusableAnswer(f"{where} ended a completion with {finish!r}: see the server's log")
    if not tokens:
        fits = len(choice.text) <= _MOST_BYTES_PER_TOKEN * most  # encoding a longer text takes long
        ids: Sequence[int] = folder.tokenizer.encode(choice.text, add_special_tokens=False) if fits else ()
        # Text that was cut within a character, or by another tokenizer, has some tokens more.
        if not fits or len(ids) > 2 * most + _MORE_TOKENS:
            raise UnusableAnswer(f"{where} gave a text of {len(choice.text)} characters where {most} tokens were asked for")
        return Sample((*ids, *(folder.end_token_ids[:1] if finish == "stop" else ())), choice.text, finish, None)
    found = _tokens(choice)
    if found is None:
        raise EngineError(f"{where} returned no token ids with their logprobs, unlike when it was started")
    if len(found.token_ids) > most:
        raise UnusableAnswer(f"{where} gave {len(found.token_ids)} tokens where {most} were asked for")
    return Sample(tuple(found.token_ids), folder.text(found.token_ids), finish, tuple(found.logprobs.token_logprobs))


def _tokens(choice: Choice) -> _Tokens | None:
    try:
        found = msgspec.convert({"token_ids": choice.token_ids, "logprobs": choice.logprobs}, _Tokens)
    except msgspec.ValidationError:
        return None
    logprobs = found.logprobs.token_logprobs
    sound = all(math.isfinite(logprob) and logprob <= MAX_LOGPROB for logprob in logprobs)
    return found if sound and len(found.token_ids) == len(logprobs) else None
