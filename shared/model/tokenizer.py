"""The toy base policy's tokenizer: byte-level BPE that separates digits and merges whole template
phrases.

Every byte has a token, so any text round-trips. Reasoning-gym questions are long fixed phrases
around a few numbers. Text is not split into words, so merges span spaces and a phrase takes only a
handful of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train on questions and wrap the result for transformers: `<|im_end|>` ends a completion,
    `<|pad|>` pads.

    `vocab_size` must have room for the 256 bytes and 3 special tokens; raises ValueError otherwise.
    """
    if vocab_size < 256 + 3:
        raise ValueError(f"vocab_size {vocab_size}: at least 259 are needed for every byte and the special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n"] * 1000
    bpe.train_from_iterator([*roles, *texts], trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    )
