"""Logprobs and entropy of rollout groups under N stacked policies, each prompt computed once for
all its completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.stacked_model import Leaves, Packing, StackedDecoder, attend_behind_prompt, causal_bias, padding_bias, prompt_pass
from services.trainer.gradient.forward import CompletionLogprobs
from services.trainer.gradient.rows import CompletionRows, TokenGroup


@dataclass(frozen=True, slots=True)
class StackedGroups:
    """The groups of N nodes as tensors. Completion c of a node's group g is its row `g x L + c`.

    prompt_ids: (N, G, P). prompt_lengths: (N, G). completion_ids: (N, G, L, C). completion_lengths:
    (N, G, L). rows: each node's completions, in the order of `rows.sequences`. row_places: the row
    `g x L + c` of each.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_lengths: Tensor
    rows: list[CompletionRows]
    row_places: list[Tensor]

    @property
    def padded_tokens(self) -> int:
        """Number of row positions of all nodes, including padding."""
        return self.prompt_ids.numel() + self.completion_ids.numel()


def stack_groups(groups: Sequence[Sequence[TokenGroup]], wanted: Sequence[Sequence[int]], device: torch.device) -> StackedGroups:
    """Stack `groups[node][g]` for the g in `wanted[node]`; `rows.sequences` counts all of a node's
    groups.
    """
    chosen = [[node_groups[g] for g in numbers] for node_groups, numbers in zip(groups, wanted, strict=True)]
    flat = [group for node_groups in chosen for group in node_groups]
    most = max(map(len, chosen))
    count = max(len(group.completions) for group in flat)
    width = max(len(group.prompt_ids) for group in flat)
    longest = max(length for group in flat for length in group.completion_lengths)
    prompt_ids = torch.zeros(len(groups), most, width, dtype=torch.int64)
    prompt_lengths = torch.zeros(len(groups), most, dtype=torch.int64)
    completion_ids = torch.zeros(len(groups), most, count, longest, dtype=torch.int64)
    completion_lengths = torch.zeros(len(groups), most, count, dtype=torch.int64)
    rows, row_places = [], []
    for node, node_groups in enumerate(chosen):
        sequences: list[tuple[int, int]] = []
        places: list[int] = []
        for place, (number, group) in enumerate(zip(wanted[node], node_groups, strict=True)):
            prompt_ids[node, place, : len(group.prompt_ids)] = torch.tensor(list(group.prompt_ids))
            prompt_lengths[node, place] = len(group.prompt_ids)
            for completion, tokens in enumerate(group.completions):
                completion_ids[node, place, completion, : len(tokens)] = torch.tensor(list(tokens))
                completion_lengths[node, place, completion] = len(tokens)
                sequences.append((number, completion))
                places.append(place * count + completion)
        lengths = completion_lengths[node].flatten()[places]
        mask = torch.arange(longest) < lengths.unsqueeze(1)
        rows.append(CompletionRows(mask=mask.to(device), sequences=sequences))
        row_places.append(torch.tensor(places, dtype=torch.int64, device=device))
    return StackedGroups(
        prompt_ids.to(device),
        prompt_lengths.to(device),
        completion_ids.to(device),
        completion_lengths.to(device),
        rows,
        row_places,
    )


def group_logprobs(
    model: StackedDecoder, leaves: Leaves, stacked: StackedGroups, temperatures: Sequence[float]
) -> list[CompletionLogprobs]:
    """`completion_logprobs` of each node's rows, at each node's temperature; with gradients unless
    they are turned off.
    """
    nodes, groups, count, longest = stacked.completion_ids.shape
    width = stacked.prompt_ids.shape[2]
    device = stacked.prompt_ids.device
    prompt, prompt_packing = prompt_pass(model, leaves, stacked.prompt_ids, stacked.prompt_lengths)
    hidden = prompt.hidden
    own_packing: Packing | None = None
    if longest > 1:
        own_hidden, own_packing = _completion_pass(model, leaves, stacked, prompt.keys, prompt.values)
        hidden = torch.cat([hidden, own_hidden], dim=1)

    # The token before a completion's first is its prompt's last; the one before its k-th is its own
    # (k-1)-th.
    starts = torch.arange(groups, device=device) * width
    before_first = prompt_packing.places.gather(1, starts + (stacked.prompt_lengths - 1).clamp(min=0))
    sources = before_first[:, :, None, None].expand(nodes, groups, count, 1)
    if own_packing is not None:
        own = own_packing.places.view(nodes, groups, count, longest - 1) + prompt.hidden.shape[1]
        sources = torch.cat([sources, own], dim=3)
    present = torch.arange(longest, device=device) < stacked.completion_lengths.unsqueeze(3)
    wanted = Packing.of(present.flatten(1))
    index = sources.flatten(1).gather(1, wanted.slots)
    logits = model.logits(leaves, hidden.gather(1, index.unsqueeze(2).expand(*index.shape, hidden.shape[2])))
    scale = torch.tensor(list(temperatures), device=device, dtype=logits.dtype).view(-1, 1, 1)
    logits = logits / scale
    log_partition = logits.logsumexp(dim=-1, keepdim=True)
    targets = stacked.completion_ids.flatten(1).gather(1, wanted.slots)
    logprobs = (logits.gather(-1, targets.unsqueeze(2)) - log_partition).squeeze(2)
    with torch.no_grad():
        log_probabilities = logits.detach() - log_partition.detach()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return [
        CompletionLogprobs(
            logprobs=_rows_of(logprobs, wanted, node, stacked.row_places[node], longest, mask),
            entropy=_rows_of(entropy, wanted, node, stacked.row_places[node], longest, mask),
        )
        for node, mask in enumerate(rows.mask for rows in stacked.rows)
    ]


def _completion_pass(
    model: StackedDecoder, leaves: Leaves, stacked: StackedGroups, prompt_keys: list[Tensor], prompt_values: list[Tensor]
) -> tuple[Tensor, Packing]:
    """Hidden states of all completion tokens but each one's last, packed."""
    nodes, groups, count, longest = stacked.completion_ids.shape
    shape, steps, device = model.architecture, longest - 1, stacked.prompt_ids.device
    present = torch.arange(steps, device=device) < (stacked.completion_lengths - 1).unsqueeze(3)
    packing = Packing.of(present.flatten(1))
    ids = stacked.completion_ids[:, :, :, :-1].flatten(1).gather(1, packing.slots)
    begin = stacked.prompt_lengths[:, :, None, None].expand(nodes, groups, count, steps)
    positions = (begin + torch.arange(steps, device=device)).flatten(1).gather(1, packing.slots)
    bias, causal = padding_bias(stacked.prompt_lengths, stacked.prompt_ids.shape[2]), causal_bias(steps, device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = packing.to_rows(torch.cat([q, k, v], dim=2)).view(nodes * groups, count, steps, -1, shape.head_size)
        q, k, v = torch.split_with_sizes(rows, [shape.heads, shape.kv_heads, shape.kv_heads], dim=3)
        out = attend_behind_prompt(
            q.contiguous(), k.transpose(2, 3), v.transpose(2, 3), prompt_keys[layer], prompt_values[layer], bias, causal
        )
        return packing.to_packed(out.reshape(nodes, groups * count * steps, shape.heads, shape.head_size))

    hidden = model.body(leaves, model.embed(leaves, ids), positions, attend)
    return hidden, packing


def _rows_of(packed: Tensor, packing: Packing, node: int, places: Tensor, longest: int, mask: Tensor) -> Tensor:
    rows = packed[node].index_select(0, packing.places[node]).view(-1, longest)
    return rows.index_select(0, places).masked_fill(~mask, 0.0)
