"""Converts between text and token ids, the same way for every service: renders a prompt, encodes
and decodes answers, checks the tokens that other nodes send, and identifies a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

from shared.contracts.messages import PromptMessage
from shared.model.chat_template import TemplateError, rendered, takes_tools
from shared.model.configuration import ModelLoadError


class PromptError(ModelLoadError):
    """The chat template cannot write one question. Others may be asked."""


def conversation(prompt: Sequence[PromptMessage], system_prompt: str = "") -> list[dict[str, str]]:
    """The messages of a prompt as objects with role and content. `system_prompt` is that of a
    prompt without a system message of its own.
    """
    messages = [{"role": message.role, "content": message.text} for message in prompt]
    has_system = not system_prompt or any(message.role == "system" for message in prompt)
    return messages if has_system else [{"role": "system", "content": system_prompt}, *messages]


def render_prompt(tokenizer: Any, prompt: Sequence[PromptMessage], system_prompt: str = "", tools: str = "") -> list[int]:
    """Token ids of a prompt up to where the answer starts. `prompt` and `system_prompt` are those
    of `conversation`. `tools`: JSON of what the model may call
    (`shared.environment_files.Schema`). A template without a place for tools gets them as text in
    front of the first message of the prompt.

    With a chat template: its messages and the assistant's opening. A base model without one gets
    their texts as they are, after the tokens with which its tokenizer begins a text.

    Raises:
        PromptError: the chat template cannot write this prompt as it is.
    """
    messages = conversation(prompt, system_prompt)
    schemas = json.loads(tools) if tools else []
    if schemas and not takes_tools(tokenizer):
        first = len(messages) - len(prompt)
        messages[first] = {**messages[first], "content": f"{_tools_text(schemas)}\n\n{messages[first]['content']}"}
        schemas = []
    if tokenizer.chat_template:
        question = messages[-1]["content"]
        try:
            text = rendered(tokenizer, messages, tools=schemas)
        except TemplateError as error:
            raise PromptError(
                f"the model's chat template cannot write the question {question[:60]!r} ({error}): correct the template "
                "(chat_template.jinja), or remove it, so that questions are plain text"
            ) from None
        for question in (each.text for each in prompt if each.text.strip() not in text):
            raise PromptError(
                f"the model's chat template changes or leaves out the question {question[:60]!r}, so that the model would be asked "
                "something else: correct the template (chat_template.jinja), or remove it, so that questions are plain text"
            )
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    text = "\n\n".join(each["content"] for each in messages)
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    # Some tokenizers also append an end token, after which nothing would be left to answer.
    control = set(tokenizer.all_special_ids)
    while ids and ids[-1] in control:
        ids.pop()
    return ids


def _tools_text(schemas: Sequence[Any]) -> str:
    """Describe tools, in front of a question, to a model whose template has no place for them. It
    may call one as Python does.
    """
    lines = []
    for function in (schema["function"] for schema in schemas):
        given = ", ".join(f"{name}: {kind.get('type', 'any')}" for name, kind in function["parameters"]["properties"].items())
        lines.append(f"{function['name']}({given}): {function['description']}")
    return "\n".join(["You can call these functions. To call one, write the call and nothing else.", *lines])


def encode_answer(tokenizer: Any, text: str, *, ended: bool, end_token_id: int | None) -> list[int]:
    """Token ids of an answer that was sampled with another tokenizer, followed by the end token if
    its author ended it.

    The text is plain: the characters `<|im_end|>` in it become the tokens of these characters,
    never the control token.
    """
    ids = [int(token) for token in tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]]
    return [*ids, end_token_id] if ended and end_token_id is not None else ids


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text that is scored and shared for sampled tokens: without control tokens, with spaces
    unchanged.
    """
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) over vocabulary, added tokens, the model behind them (merges), chat template
    and end token.

    The place that a tokenizer was loaded from, its padding and its truncation are not included.
    Nodes with equal hashes may use each other's token ids and behaviour logprobs.
    """
    identity = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "added": sorted((int(index), _added_token(token)) for index, token in tokenizer.added_tokens_decoder.items()),
        "model": _model_json(tokenizer),
        "chat_template": tokenizer.chat_template or "",
        "eos_token_id": tokenizer.eos_token_id,
    }
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _added_token(token: Any) -> list[object]:
    flags = (token.special, token.lstrip, token.rstrip, token.normalized, token.single_word)
    return [str(token), *map(bool, flags)]


def _model_json(tokenizer: Any) -> object:
    """The model in a fast tokenizer's JSON; a slow tokenizer has no such JSON and is identified by
    its class.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__
    model = json.loads(backend.to_str())["model"]
    # Loaders write "no prefix" as null or as an empty string; the vocabulary is hashed separately.
    return {key: value for key, value in model.items() if key != "vocab" and value not in (None, "")}


# What an environment says between two turns of the policy. The policy's tokens stay as they were
# sampled: no conversation is ever rendered again, so a template that would write earlier turns
# otherwise cannot change them.

_ANSWER, _REPLY = "teapot lid", 'Said "teal": 4 < 5\n{it\'s}'
_THOUGHT = "<think>\nbasil leaf\n</think>\n\n"


class TurnTokens:
    """The tokens between two turns of the policy: the rest of what the template writes after an
    answer's end token, the environment's words, and what opens the next turn.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Collection[int], *, tools: bool) -> None:
        """tools: whether the environment's words are results of calls.

        Raises:
            PromptError: the template writes no second turn after an answer as it is.
        """
        self._tokenizer = tokenizer
        self.role, self._before, self._after = self._found({*end_token_ids, tokenizer.eos_token_id}, tools)

    def between(self, reply: str) -> list[int]:
        """Token ids between a turn that has its end token and the next one."""
        return [*self._before, *encode_answer(self._tokenizer, reply, ended=False, end_token_id=None), *self._after]

    @property
    def drops_thoughts(self) -> bool:
        """Check whether the template leaves thoughts out of earlier turns. Here they stay."""
        if not self._tokenizer.chat_template:
            return False
        try:
            return _THOUGHT not in self._rendered(_THOUGHT + _ANSWER, self.role)
        except TemplateError:
            return False

    def _found(self, ends: Collection[int], tools: bool) -> tuple[str, list[int], list[int]]:
        """The role under which the environment speaks, and the tokens around its words."""
        if not self._tokenizer.chat_template:
            around = self._ids("\n\n")
            return "user", around, around
        roles = ("tool", "user") if tools and takes_tools(self._tokenizer) else ("user",)
        why = ""
        for role in roles:
            try:
                text = self._rendered(_ANSWER, role)
            except TemplateError as error:
                why = str(error)
                continue
            before, found, after = text.partition(_ANSWER)[2].partition(_REPLY)
            ids = self._ids(before)
            if not found:
                why = "it leaves out an answer or what follows it, or writes that otherwise"
            elif not ids or ids[0] not in ends:
                why = f"it ends an answer with {before[:20]!r}, which is no end token of the model"
            else:
                return role, ids[1:], self._ids(after)
        raise PromptError(
            f"the model's chat template cannot go on after an answer ({why}), which several turns need: use a model for "
            "conversations, correct the template (chat_template.jinja), or remove environment and tools from [[tasks]]"
        )

    def _rendered(self, answer: str, role: str) -> str:
        said = [("user", "q"), ("assistant", answer), (role, _REPLY)]
        return rendered(self._tokenizer, [{"role": each, "content": content} for each, content in said])

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]


_REPLACEMENT = "\ufffd"
_ANCHORS = ("a", "x", "1", ".")


class AnswerTokens:
    """Checks and encodes answers' tokens with one tokenizer. Results for single tokens are cached.

    Args:
        tokenizer: the trained model's.
        end_token_ids: every token that ends an answer; `encode` appends the first one to an answer
            that ended.
        vocabulary_size: rows of the model's embedding.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Sequence[int], vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._ends = tuple(end_token_ids)
        self._vocabulary_size = vocabulary_size
        added = tokenizer.added_tokens_decoder
        special = {int(number) for number, token in added.items() if token.special} | set(map(int, tokenizer.all_special_ids))
        self._control = frozenset(special | set(self._ends))
        unknown = getattr(tokenizer, "unk_token_id", None)
        self._unknown: Collection[int] = () if unknown is None else (int(unknown),)
        self._shows: dict[int, bool] = {}
        self._anchor: int | None = None

    def says(self, token_ids: Sequence[int], text: str, *, ended: bool) -> bool:
        """Check whether `token_ids` are one way to write `text`, and nothing else.

        ended: whether the answer's author states that it ended it. If so, and only then, the last
        token must be an end token. No other control token may occur. If the text contains U+FFFD,
        which stands for any broken bytes, only the tokens that `encode` gives pass.
        """
        body = list(token_ids)
        if ended and (not body or body.pop() not in self._ends):
            return False
        if any(not 0 <= token < self._vocabulary_size or token in self._control for token in body):
            return False
        if answer_text(self._tokenizer, token_ids) != text:
            return False
        if _REPLACEMENT not in text and self._all_show(body, text):
            return True
        return body == encode_answer(self._tokenizer, text, ended=False, end_token_id=None)

    def is_end(self, token_ids: Sequence[int]) -> bool:
        """Check whether these tokens are one that ends an answer."""
        return len(token_ids) == 1 and token_ids[0] in self._ends

    def encode(self, text: str, *, ended: bool) -> list[int] | None:
        """Encode the text as plain text, followed by an end token if the author ended it; None if
        that gives a control token.
        """
        end = self._ends[0] if self._ends else None
        ids = encode_answer(self._tokenizer, text, ended=ended, end_token_id=end)
        plain = ids[:-1] if ended and end is not None else ids
        return None if self.control_tokens(plain) else ids

    def control_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of control tokens among the ids. If a prompt has more of them than its
        template, the rest come from the question's text.
        """
        return sum(token in self._control and token not in self._unknown for token in token_ids)

    def _all_show(self, body: list[int], text: str) -> bool:
        # Each token stands for at least one byte of the text. Decoders trim at the ends of a text,
        # so the first and last token are tested in place.
        if len(body) > len(text.encode()) or not all(map(self._is_visible, body)):
            return False
        decode = self._tokenizer
        return len(body) < 2 or (answer_text(decode, body[1:]) != text and answer_text(decode, body[:-1]) != text)

    def _is_visible(self, token: int) -> bool:
        """Check whether one and two occurrences of the token inside a text each change the text."""
        if token not in self._shows:
            anchor = self._anchor_token()
            without, once, twice = (answer_text(self._tokenizer, [anchor, *[token] * count, anchor]) for count in range(3))
            self._shows[token] = len({without, once, twice}) == 3
        return self._shows[token]

    def _anchor_token(self) -> int:
        if self._anchor is None:
            for text in _ANCHORS:
                for token in encode_answer(self._tokenizer, text, ended=False, end_token_id=None):
                    if token not in self._control and answer_text(self._tokenizer, [token]):
                        self._anchor = token
                        return token
            raise ValueError(f"the tokenizer writes none of {_ANCHORS} as plain text: it cannot read answers")
        return self._anchor
