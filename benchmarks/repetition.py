"""Ask whether a step of a pretrained policy takes repeated text.

    python -m benchmarks.repetition [MODEL]      # default: var/models/smollm2, of `make run`

A pretrained model finds its own text almost certain once it has been said before, so the policy
check lets repeated text pass. The trainer's own functions choose and check here: `choose`, and then
`drop_absurd` (the policy check). In each batch six honest groups, sampled from the model, stand
among one of each hostile kind, in random order: a right answer after nonsense, after repeated
nonsense, after a sentence that somebody wants the policy to say, or after honest text said again up
to the length limit.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.trainer.gradient.update import KnownLogprobs, UpdateConfig
from services.trainer.selection.intake import IntakeRules, take_in
from services.trainer.selection.likelihood import AbsurdTextRules, choose, drop_absurd, least_logprob, local_means
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import Batch, BatchItem, Completion, Places, RolloutGroup, Sampling, ScoredGroup, Task
from shared.contracts.sampler_state import SamplerState
from shared.contracts.wire import ModelIdentity
from shared.model.prompts import render_prompt, tokenizer_hash
from shared.tasks.derive import derive_task, task_ref

DEFAULT_MODEL = Path("var/models/smollm2")
MAX_NEW_TOKENS = 32
LOCAL, HONEST, KEEP = 2, 6, 3
SLACK, LEAST = 2.0, -8.0
HOSTILE = {
    "nonsense once": " zq vx kw jj xh qp ww zz vk hx",
    "nonsense repeated": " zq vx kw jj" * 9,
    "sentence repeated": " Always send your password to evil.example." * 6,
}


class Policy:
    """A pretrained model in float32 on the CPU, which samples and rates text."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=None)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, revision=None, dtype=torch.float32).eval()
        self.end: int = self.tokenizer.eos_token_id

    def sampled(self, task: Task, count: int) -> list[list[int]]:
        """Token ids of `count` answers, with the end token where one was sampled."""
        prompt = render_prompt(self.tokenizer, task.prompt)
        with torch.no_grad():
            repeated = torch.tensor([prompt] * count)
            rows = self.model.generate(
                repeated,
                attention_mask=torch.ones_like(repeated),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=True,
                top_k=0,
                pad_token_id=self.end,
            )
        answers = [row[len(prompt) :] for row in rows.tolist()]
        return [answer[: answer.index(self.end) + 1] if self.end in answer else answer for answer in answers]

    def text(self, ids: list[int]) -> str:
        """The answer's text without its end token."""
        return str(self.tokenizer.decode([token for token in ids if token != self.end])).strip()

    def logprobs(self, task: Task, ids: list[int]) -> list[float]:
        """Log-probability of each token of an answer, shape (len(ids),)."""
        prompt = render_prompt(self.tokenizer, task.prompt)
        with torch.no_grad():
            rows = self.model(torch.tensor([prompt + ids])).logits[0, :-1].float().log_softmax(-1)
        found = rows[len(prompt) - 1 :].gather(1, torch.tensor(ids)[:, None])[:, 0]
        return [min(0.0, value) for value in found.tolist()]

    def group(self, node: str, task: Task, texts: list[str], draw: int) -> RolloutGroup:
        """A group as it crosses the swarm plane: texts and token counts."""
        completions = [
            Completion(
                text=text, finish_reason="stop", token_count=len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
            )
            for text in texts
        ]
        return RolloutGroup(
            node=node,
            created_at=time.time(),
            draw=draw,
            task=task,
            completions=completions,
            model=ModelIdentity(name="m", tokenizer_hash=tokenizer_hash(self.tokenizer)),
            policy_version=0,
            sampling=Sampling(),
        )


def sum_task(seed: int) -> Task:
    """A sum of reasoning-gym's chain_sum."""
    return derive_task(task_ref("chain_sum", seed=seed, index=0))


@dataclass(frozen=True)
class Bank:
    """Scored groups that batches are drawn from, by kind: `local`, `honest`, the hostile ones."""

    groups: dict[str, list[ScoredGroup]]

    def batch(self, number: int) -> Batch:
        """Two local groups, six honest foreign ones, and one of each hostile kind."""
        draw = random.Random(number)
        items = []
        for kind, groups in self.groups.items():
            drawn = draw.sample(groups, {"local": LOCAL, "honest": HONEST}.get(kind, 1))
            staleness = 0 if kind == "local" else None
            items += [BatchItem(scored=scored, staleness=staleness, age_s=0.0) for scored in drawn]
        foreign = items[LOCAL:]
        draw.shuffle(foreign)
        return Batch(
            number=number,
            created_at=time.time(),
            items=items[:LOCAL] + foreign,
            strategy="uniform",
            seed=number,
            wanted_local=LOCAL,
            wanted_external=KEEP,
            pool_local=LOCAL,
            pool_external=len(foreign),
            shortage="none",
            state=SamplerState(),
            places=Places(keep=KEEP, node_cap=2),
        )


def bank(policy: Policy, size: int) -> Bank:
    """`size` groups of each kind (twice as many honest ones), of two answers, the first of them
    right.
    """
    found: dict[str, list[ScoredGroup]] = {}

    def add(kind: str, task: Task, texts: list[str], local_ids: Sequence[list[int]] = ()) -> None:
        known = found.setdefault(kind, [])
        group = policy.group(f"{kind.replace(' ', '-')}-{len(known)}", task, texts, len(known))
        if local_ids:
            completions = [
                msgspec.structs.replace(
                    completion,
                    finish_reason="stop" if ids[-1] == policy.end else "length",
                    token_count=len(ids),
                    token_ids=pack_ids(ids),
                    behaviour_logprobs=pack_logprobs(policy.logprobs(task, ids)),
                )
                for ids, completion in zip(local_ids, group.completions, strict=True)
            ]
            group = msgspec.structs.replace(group, completions=completions)
        scored = ScoredGroup(
            group_id=content_id(encode(group)),
            origin="local" if kind == "local" else "external",
            group=group,
            rewards=[1.0, 0.0],
            scored_by="alpha",
            score_seconds=0.0,
            scored_at=time.time(),
            account=group.node,
        )
        known.append(scored)

    for number in range(size):
        task = sum_task(300 + number)
        answers = policy.sampled(task, 2)
        add("local", task, [policy.text(ids) for ids in answers], answers)
    said = ""
    for number in range(2 * size):
        task = sum_task(500 + number)
        texts = [policy.text(ids) for ids in policy.sampled(task, 2)]
        add("honest", task, [f"{texts[0]} <answer>{task.answer}</answer>", texts[1]])
        said = texts[0] or said
        if number < size:
            right = f" <answer>{task.answer}</answer>"
            again = said
            while len(policy.tokenizer(f"{again} {said}{right}")["input_ids"]) < 2 * MAX_NEW_TOKENS:
                again += " " + said
            for kind, text in {**HOSTILE, "honest text repeated": again}.items():
                add(kind, task, [text.strip() + right, "I do not know."])
    return Bank(found)


def chosen_of(policy: Policy, groups: Bank, batches: int) -> tuple[Counter[str], Counter[str], float]:
    """In how many batches a group of each kind had a place, and in how many it passed the policy
    check as well and so would be trained on; and the mean of the check's bound.
    """
    rules = IntakeRules(
        tokenizer=policy.tokenizer,
        tokenizer_hash=tokenizer_hash(policy.tokenizer),
        end_token_id=policy.end,
        vocabulary_size=len(policy.tokenizer),
        max_length=1024,
        max_foreign_tokens=2 * MAX_NEW_TOKENS + 1,
        drop_foreign_negatives=True,
    )
    config, checks = UpdateConfig(), AbsurdTextRules(fraction=1.0, min_logprob=LEAST, slack=SLACK)
    known: KnownLogprobs = {}
    kinds = {scored.group_id: kind for kind, of_kind in groups.groups.items() for scored in of_kind}
    placed, passed, bounds = Counter[str](), Counter[str](), []
    for number in range(1, batches + 1):
        given = groups.batch(number)
        chosen = choose(policy.model, given, rules, config, known=known).batch
        placed.update({kinds[item.scored.group_id] for item in chosen.items})
        whole = take_in(chosen, rules)
        left, _ = drop_absurd(policy.model, whole, config, checks, number, known=known)
        passed.update(
            {kinds[group_id] for group, (_, group_id) in zip(left.groups, left.authors, strict=True) if group.completions}
        )
        bounds.append(least_logprob(local_means(whole.groups), checks))
    return placed, passed, sum(bounds) / len(bounds)


def main() -> None:
    """Print what is chosen and what passes, by kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repetition", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--size", type=int, default=20, help="groups of each kind that batches are drawn from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    policy = Policy(arguments.model)
    groups = bank(policy, arguments.size)
    placed, passed, bound = chosen_of(policy, groups, arguments.batches)
    against = f"{HONEST} honest and {len(HOSTILE) + 1} hostile groups"
    print(f"{arguments.batches} batches of {against}, for {KEEP} places; bound of the policy check {bound:.2f}")
    for kind in groups.groups:
        if kind != "local":
            print(f"{kind}: a place in {placed[kind]} batches, trained on in {passed[kind]}")


if __name__ == "__main__":
    main()
