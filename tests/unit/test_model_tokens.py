"""Prompts, answers read back, and the hash that says whether token ids may be shared."""

from __future__ import annotations

import copy
import gc
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from shared.contracts.messages import Part, PromptMessage, user_prompt
from shared.model import chat_template
from shared.model.base_policy import train_tokenizer
from shared.model.chat_template import template_problem
from shared.model.configuration import ModelLoadError
from shared.model.prompts import PromptError, encode_answer, render_prompt, tokenizer_hash
from shared.model.reading import check_tokenizer
from tests.engines.tiny_models import byte_tokenizer

TEXTS = ["What is 12 + 34?", "Find the greatest common divisor", "Answer the question"] * 5


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(TEXTS, 300)


def test_the_hash_survives_saving_and_loading(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "once")
    once = AutoTokenizer.from_pretrained(tmp_path / "once")
    once.save_pretrained(tmp_path / "twice")
    twice = AutoTokenizer.from_pretrained(tmp_path / "twice")
    assert tokenizer_hash(tokenizer) == tokenizer_hash(once) == tokenizer_hash(twice)
    assert tokenizer_hash(train_tokenizer(TEXTS, 300)) == tokenizer_hash(tokenizer)


def test_padding_and_truncation_are_not_part_of_the_hash(tokenizer: Any) -> None:
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before


def test_whatever_changes_what_ids_mean_changes_the_hash(tokenizer: Any) -> None:
    hashes = {tokenizer_hash(tokenizer), tokenizer_hash(train_tokenizer(TEXTS, 290)), tokenizer_hash(byte_tokenizer())}
    tokenizer.chat_template += " "
    hashes.add(tokenizer_hash(tokenizer))
    tokenizer.eos_token = "<|im_start|>"
    hashes.add(tokenizer_hash(tokenizer))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    hashes.add(tokenizer_hash(tokenizer))
    assert len(hashes) == 6


def test_a_prompt_is_the_chat_template_up_to_where_the_answer_starts(tokenizer: Any) -> None:
    ids = render_prompt(tokenizer, user_prompt("What is 1 + 1?"), "Be brief.")
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "system" not in tokenizer.decode(render_prompt(tokenizer, user_prompt("What is 1 + 1?")))


def test_a_tokenizer_without_a_chat_template_gets_the_question_as_it_is() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(render_prompt(tokenizer, user_prompt("1 + 1?"))) == "1 + 1?"
    assert tokenizer.decode(render_prompt(tokenizer, user_prompt("1 + 1?"), "Be brief.")) == "Be brief.\n\n1 + 1?"


CONVERSATION = [
    PromptMessage(role="system", parts=[Part(text="Be kind.")]),
    *user_prompt("What is 1 + 1?"),
    PromptMessage(role="assistant", parts=[Part(text="2")]),
    PromptMessage(role="user", parts=[Part(text="And 2 "), Part(text="+ 2?")]),
]


def test_messages_are_written_in_order_and_their_system_message_wins_over_the_nodes(tokenizer: Any) -> None:
    assert tokenizer.decode(render_prompt(tokenizer, CONVERSATION, "Be brief.")) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = "Be kind.\n\nWhat is 1 + 1?\n\n2\n\nAnd 2 + 2?"
    assert byte_tokenizer().decode(render_prompt(byte_tokenizer(), CONVERSATION, "Be brief.")) == plain


def test_a_template_that_leaves_out_an_earlier_message_is_told_which(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ModelLoadError, match="leaves out the question 'Be kind.'"):
        render_prompt(tokenizer, CONVERSATION)


@pytest.mark.parametrize(
    "content",
    [
        "(message['content'] | truncate(20, true))",
        "message['content'].lower()",
        "message['content'].replace('7', '')",
        "(message['content'] if 'What' in message['content'] else '')",
    ],
)
def test_a_question_that_the_chat_template_changes_is_not_asked(content: str) -> None:
    tokenizer = train_tokenizer(TEXTS, 290)
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", content)
    with pytest.raises(ModelLoadError, match="the question 'Add 17 to the NUMBER.*: correct the template"):
        render_prompt(tokenizer, user_prompt("Add 17 to the NUMBER of the beast."))


def test_white_space_at_the_ends_of_a_question_is_the_templates_to_take(tokenizer: Any) -> None:
    trimming = train_tokenizer(TEXTS, 290)
    trimming.chat_template = trimming.chat_template.replace("message['content']", "(message['content'] | trim)")
    assert render_prompt(trimming, user_prompt(" 1 + 1?\n")) == render_prompt(trimming, user_prompt("1 + 1?"))


ANY_SIZE = Qwen2Config(vocab_size=1000)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", normalizers.Replace(Regex("[0-9]"), "0")),
        ("normalizer", normalizers.Replace(Regex("[0-9]"), "")),
        ("normalizer", normalizers.Replace("z", "s")),
        *(("normalizer", normalizers.Replace(sign, ".")) for sign in "+-*/=<>()[]"),
        ("decoder", decoders.WordPiece()),
        ("decoder", decoders.Sequence([decoders.ByteLevel(), decoders.Strip("T", 1, 0)])),
    ],
)
def test_a_tokenizer_that_gives_back_other_letters_or_digits_is_refused(tokenizer: Any, part: str, value: Any) -> None:
    check_tokenizer(tokenizer, ANY_SIZE, "models/odd")
    setattr(tokenizer.backend_tokenizer, part, value)
    with pytest.raises(ModelLoadError, match="models/odd: its tokenizer changes text.*copy the model's own"):
        check_tokenizer(tokenizer, ANY_SIZE, "models/odd")


def test_a_tokenizer_without_the_tokens_of_letters_and_digits_is_refused(tokenizer: Any) -> None:
    words = {word: number for number, word in enumerate(["<unk>", "<|end|>", "What", "is", "1", "+", "?"])}
    poor = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    poor.pre_tokenizer = pre_tokenizers.Whitespace()
    for unknown in ({}, {"unk_token": "<unk>"}):
        with pytest.raises(ModelLoadError, match="its tokenizer changes text"):
            check_tokenizer(PreTrainedTokenizerFast(tokenizer_object=poor, **unknown), ANY_SIZE, "models/odd")


def test_a_tokenizer_that_samples_its_merges_is_refused(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.model.dropout = 0.5
    with pytest.raises(ModelLoadError, match="with other tokens each time.*set dropout to null"):
        check_tokenizer(tokenizer, ANY_SIZE, "models/odd")


def test_a_tokenizer_may_take_case_white_space_and_punctuation(tokenizer: Any) -> None:
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[\\s?,:]+"), " ")])
    check_tokenizer(tokenizer, ANY_SIZE, "models/lower")


def test_an_answer_keeps_its_end_token_only_when_it_ended(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    ended = encode_answer(tokenizer, "42", ended=True, end_token_id=end)
    cut_off = encode_answer(tokenizer, "42", ended=False, end_token_id=end)
    assert ended == [*cut_off, end] and tokenizer.decode(cut_off) == "42"
    assert encode_answer(tokenizer, "", ended=True, end_token_id=end) == [end]


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{% set n = namespace(x='a' * 64) %}{% for a in range(31) %}{% set n.x = n.x + n.x %}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "cause"),
    [
        (SLOW, "2 s of processor time"),
        ("{{ 7 ** (messages | length * 10 ** 9) }}", "2 s of processor time"),  # one call, which no handler interrupts
        (LARGE, "256 MiB of memory"),
        ("{{ 'a' * (messages | length * 10 ** 7) }}", "writes more than 1,0"),
        ("{{ raise_exception('no numbers') }}", "no numbers"),
    ],
)
def test_a_question_on_which_the_template_never_ends_costs_seconds_and_no_other_question(
    tokenizer: Any, work: str, cause: str
) -> None:
    before = {question: render_prompt(tokenizer, user_prompt(question)) for question in ("a", "What is 1 + 1?")}
    tokenizer.chat_template += "{% if '\u00df' in messages[-1].content %}" + work + "{% endif %}"
    assert not template_problem(tokenizer)
    started = time.monotonic()
    with pytest.raises(PromptError) as refused:
        render_prompt(tokenizer, user_prompt("Add \u00df."))
    assert cause in str(refused.value) and time.monotonic() - started < 30
    assert {question: render_prompt(tokenizer, user_prompt(question)) for question in before} == before


def test_a_prompt_has_the_tokens_that_transformers_gives_it(tokenizer: Any) -> None:
    for system in ("", "Be brief."):
        for question in ("", " 1 + 1?\n", "\U0001f642 \ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace")):
            turns = [{"role": "system", "content": system}] if system else []
            turns.append({"role": "user", "content": question})
            meant = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            assert render_prompt(tokenizer, user_prompt(question), system) == meant


def test_a_fork_of_this_process_renders_for_itself(tokenizer: Any) -> None:
    meant = render_prompt(tokenizer, user_prompt("x"))
    child = os.fork()
    if child == 0:
        os._exit(render_prompt(tokenizer, user_prompt("x")) != meant)
    assert os.waitpid(child, 0)[1] == 0 and render_prompt(tokenizer, user_prompt("x")) == meant


def renderer() -> psutil.Process:
    """The process that renders the template that was used last."""
    return psutil.Process(list(chat_template._RENDERERS.values())[-1].process_id)


def test_the_process_that_renders_is_started_again_when_somebody_ends_it(tokenizer: Any) -> None:
    tokenizer.chat_template += "{# ended #}"
    meant = render_prompt(tokenizer, user_prompt("x"))
    for process in (renderer(), *renderer().children()):
        process.kill()
    assert render_prompt(tokenizer, user_prompt("x")) == meant


@pytest.mark.slow
@pytest.mark.parametrize("work", ["{{ 7 ** (messages | length * 10 ** 9) }}", LARGE])
def test_this_process_is_not_forked_again_for_a_question_that_takes_too_much(tokenizer: Any, work: str) -> None:
    """A fork beside weights would keep the memory of all that change."""
    tokenizer.chat_template += "{% if '\u00df' in messages[-1].content %}" + work + "{% endif %}"
    render_prompt(tokenizer, user_prompt("x"))
    before = renderer()
    gc.collect()
    open_files = psutil.Process().num_fds()
    for question in ("Add \u00df.", "Take \u00df."):
        with pytest.raises(PromptError):
            render_prompt(tokenizer, user_prompt(question))
    render_prompt(tokenizer, user_prompt("y"))
    started = time.monotonic()
    with pytest.raises(PromptError):
        render_prompt(tokenizer, user_prompt("Add \u00df."))
    assert time.monotonic() - started < 1.0, "the same question was tried again"
    # Fewer, if files of an earlier test were closed meanwhile.
    assert renderer() == before and psutil.Process().num_fds() <= open_files


def test_two_tokenizers_of_one_model_have_one_process_and_there_are_few(tokenizer: Any) -> None:
    meant = render_prompt(tokenizer, user_prompt("x"))
    first = renderer()
    assert render_prompt(copy.deepcopy(tokenizer), user_prompt("x")) == meant and renderer() == first
    for number in range(4):
        tokenizer.chat_template += f"{{# {number} #}}"
        render_prompt(tokenizer, user_prompt("x"))
    gc.collect()
    assert not first.is_running()
