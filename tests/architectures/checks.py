"""What engine and trainer make of an architecture: the same numbers as one plain pass a sequence,
or a refusal.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.generator.engines.base import SamplingParams
from services.generator.engines.batching import Batching, UnsafeModel, batches, choose_batching
from services.generator.engines.transformers_engine import sample_completions
from services.trainer.gradient.forward import CompletionLogprobs, plain_rows_reason, set_training_modes, silence
from services.trainer.gradient.rows import CompletionRows, TokenGroup
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients, scored_loss, step_normaliser
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.policy_model import UntrainableModel, check_trainable
from tests.architectures.tiny import WINDOW, NotSmall, tiny_model
from tests.objectives import configured

PAD, END = 0, 2
CONTEXT = 120
PROMPTS = [[5, 6, 7], list(range(10, 10 + 2 * WINDOW)), [40, 41, 42], list(range(60, 60 + WINDOW - 1))]
"""Unequal but for two, inside the window and beyond it; every answer goes past it."""
NEW_TOKENS = 2 * WINDOW + 4
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """What one side does with an architecture. way: how it computes, empty where it refuses.
    reason: why it refuses, or why so.
    """

    way: str
    reason: str = ""


def reference_model(kind: str) -> PreTrainedModel:
    """The same weights with the plainest attention there is, where the architecture has it."""
    try:
        return tiny_model(kind, attention="eager")
    except NotSmall:
        return tiny_model(kind)


def alone(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Logprobs of an answer's tokens: one sequence, no padding, no cache, none of our code.
    `(len(answer),)`.
    """
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(answer)), torch.tensor(answer)]


def findings(kind: str) -> tuple[Finding, Finding]:
    """Return what the engine and the trainer do with `kind`.

    Raises:
        AssertionError: numbers are wrong, and nothing refused them.
        NotSmall: there is no small model to try.
    """
    model, reference = tiny_model(kind), reference_model(kind)
    return engine_finding(kind, model, reference), trainer_finding(kind, model, reference)


def engine_finding(kind: str, model: PreTrainedModel, reference: PreTrainedModel) -> Finding:
    """Return how the engine samples; raises AssertionError where the logprobs that it gives are not
    those of `alone`.
    """
    try:
        way = choose_batching(model, context_length=CONTEXT, pad_token_id=PAD)
    except UnsafeModel as error:
        return Finding("", str(error))
    worst = _worst_sampled(model, reference, way)
    if worst > TOLERANCE:
        # Long sums of float32 may round this far; what is still there in float64 is an error.
        worst = _worst_sampled(_exact(model), _exact(reference), way)
    assert worst <= TOLERANCE, f"{kind}: sampled {way.name}, logprobs are off by {worst:.2g}"
    return Finding(way.name)


def _exact(model: PreTrainedModel) -> PreTrainedModel:
    exact = copy.deepcopy(model).double()
    # Fast products of all experts at once know no float64.
    exact.set_experts_implementation("eager")
    return exact


def _worst_sampled(model: PreTrainedModel, reference: PreTrainedModel, way: Batching) -> float:
    """The largest error of a sampled logprob, relative to 1 + |logprob|."""
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for numbers in batches(PROMPTS, way, len(PROMPTS)):
        rows = sample_completions(
            model,
            [PROMPTS[number] for number in numbers],
            3,
            SamplingParams(max_new_tokens=NEW_TOKENS),
            [NEW_TOKENS] * len(numbers),
            way=way,
            generator=generator,
            end_token_ids=[END],
            pad_token_id=PAD,
            keep_on=lambda *_: None,
        )
        for place, row in enumerate(rows):
            with torch.no_grad():
                expected = alone(reference, PROMPTS[numbers[place // 3]], row.token_ids)
            worst = max(worst, float(((torch.tensor(row.logprobs) - expected).abs() / (1.0 + expected.abs())).max()))
    return worst


GROUPS = [
    TokenGroup(
        prompt_ids=[5, 6, 7],
        completions=[[11, 12, 2], list(range(20, 20 + NEW_TOKENS)), [30, 0, 31, 32, 2]],
        behaviour_logprobs=[[-4.0, -4.5, -5.0], None, [-4.2] * 5],
        advantages=[1.0, -0.5, 0.25],
    ),
    TokenGroup(
        prompt_ids=list(range(40, 40 + 2 * WINDOW)),
        completions=[[50, 51, 52, 53], list(range(60, 60 + WINDOW))],
        behaviour_logprobs=[[-4.4] * 4, [-4.7] * WINDOW],
        advantages=[-1.0, 1.0],
    ),
]
"""Unequal prompts and answers, inside the window and beyond it, one answer with the padding token
in it.
"""
OBJECTIVES = ("grpo", "gspo")


def trainer_finding(kind: str, model: PreTrainedModel, reference: PreTrainedModel) -> Finding:
    """Return how the trainer computes the model; raises AssertionError where a gradient is not that
    of autograd over `alone`.
    """
    silence(model)
    set_training_modes(model)
    try:
        check_trainable(model)
    except UntrainableModel as error:
        return Finding("", str(error))
    reason = plain_rows_reason(model)
    proximal = _proximal(reference)
    expected = {name: _expected_gradients(reference, configured(name), proximal) for name in OBJECTIVES}
    ways = {"plain rows": False} if reason else {"plain rows": False, "packed rows": True}
    for way, packed in ways.items():
        for name in OBJECTIVES:
            config = UpdateConfig(objective=configured(name), packed=packed)
            _check_gradients(f"{kind}: {way}, {name}", model, reference, config, proximal, expected[name])
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        set_training_modes(model)
        try:
            check_trainable(model)
        except UntrainableModel:
            reason = "; ".join(filter(None, [reason, "refused with gradient checkpointing"]))
        else:
            config = UpdateConfig(objective=configured(OBJECTIVES[0]))
            _check_gradients(f"{kind}: gradient checkpointing", model, reference, config, proximal, expected[OBJECTIVES[0]])
    return Finding(list(ways)[-1], reason)


def _check_gradients(
    said: str,
    model: PreTrainedModel,
    reference: PreTrainedModel,
    config: UpdateConfig,
    proximal: list[list[Tensor]],
    expected: dict[str, Tensor],
) -> None:
    found = _gradients(model, config, proximal)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    missing = [key for key in expected.keys() - found.keys() if expected[key].any()]
    assert norm > 1e-6 and not missing, f"{said}: no gradient for {missing or 'anything'}"
    apart = _apart(found, expected)
    if apart > TOLERANCE:
        expected = _expected_gradients(_exact(reference), config.objective, proximal)
        apart = _apart(_gradients(_exact(model), config, proximal), expected)
    assert apart <= TOLERANCE, f"{said}: gradients are off by {apart:.2g}"


def _gradients(model: PreTrainedModel, config: UpdateConfig, proximal: list[list[Tensor]]) -> dict[str, Tensor]:
    model.zero_grad()
    accumulate_gradients(model, GROUPS, config, proximal=proximal)
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference, relative to that of `expected`, all parameters together."""
    differences = [(found[key] - gradient).norm() for key, gradient in expected.items() if key in found]
    return float(torch.stack(differences).norm() / torch.stack([gradient.norm() for gradient in expected.values()]).norm())


def _proximal(reference: PreTrainedModel) -> list[list[Tensor]]:
    """Logprobs of a policy near this one, so that ratios differ from 1 and some are clipped."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        return [
            [
                alone(reference, list(group.prompt_ids), list(answer)) + 0.2 * torch.randn(len(answer), generator=generator)
                for answer in group.completions
            ]
            for group in GROUPS
        ]


def _expected_gradients(
    reference: PreTrainedModel, objective: ConfiguredObjective, proximal: list[list[Tensor]]
) -> dict[str, Tensor]:
    config = UpdateConfig(objective=objective)
    sequences = [(group, number) for group, texts in enumerate(GROUPS) for number in range(len(texts.completions))]
    answers = [list(GROUPS[group].completions[number]) for group, number in sequences]
    mask = torch.arange(max(map(len, answers))) < torch.tensor([len(answer) for answer in answers])[:, None]
    reference.zero_grad()
    logprobs = [alone(reference, list(GROUPS[g].prompt_ids), answer) for (g, _), answer in zip(sequences, answers, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
    loss, _, _ = scored_loss(
        GROUPS,
        CompletionRows(mask=mask, sequences=sequences),
        CompletionLogprobs(logprobs=padded, entropy=torch.zeros_like(padded)),
        config,
        step_normaliser(GROUPS, config, proximal),
        proximal,
        None,
    )
    loss.backward()
    return {key: parameter.grad.clone() for key, parameter in reference.named_parameters() if parameter.grad is not None}
