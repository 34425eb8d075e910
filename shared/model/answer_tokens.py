"""Checks whether foreign token ids represent exactly the text that was scored, under one tokenizer.

Decoding loses information: control tokens vanish, bytes that are not UTF-8 all become U+FFFD, and
ids above the vocabulary become nothing. A sender could use what decoding loses to train the model
on tokens that nobody sees. So ids pass only if every one of them contributes to the text, except
for one end token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from shared.model.prompts import answer_text, encode_answer

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
