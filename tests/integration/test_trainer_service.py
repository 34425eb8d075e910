"""The trainer service: what it trains, publishes, writes and says."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.trainer.export import export_policy
from services.trainer.records import StepScorer
from shared.config import TaskSpec, rewards_id, scorers_id
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, PolicyPointer, TrainerPosition
from shared.contracts.messages import ScoredGroup
from shared.contracts.senders import TrainerFindings
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.contracts.subjects import EVAL_KEY, FINDINGS_KEY, POLICY_KEY, TRAINER_KEY, node_bucket
from shared.policy_store import open_policy_store
from shared.run_records import CHECKPOINTS, TRAINED_FILE, read_jsonl
from shared.transport.base import NotConnected, Transport, bucket_stream
from shared.transport.connect import connect
from swarm_cli.model.evaluate import recorded_set
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.run_files import read_evaluations
from tests.full_disk import no_file_above
from tests.integration.trainer_fixtures import STREAM, model, some_batches, tokenizer, transport
from tests.integration.trainer_life import (
    NODE,
    Life,
    batch_of,
    checkpoints,
    final_state,
    metric_lines,
    mixed_batch,
    node_config,
    policy_pointer,
    put_batches,
    scored_group,
    set_up,
    trainer_position,
)
from tests.nats_server import NatsServer, own_plane
from tests.unit.sampler_groups import scored_group as sampler_group

__all__ = ["model", "tokenizer", "transport"]


async def test_it_trains_each_batch_publishes_each_policy_and_says_when_it_is_finished(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    # The texts are made up, and no policy finds them likely.
    config = node_config(model, tmp_path, trainer={"max_steps": 4, "constants": {"policy_check_fraction": 0.0}})
    await set_up(transport, some_batches(tokenizer, 6))
    life = Life(config, transport)
    await life.until_finished()

    assert life.context.status.get(StatusFigure.MAX_STEPS) == 4, "so that displays say step n of N"
    position = await trainer_position(transport)
    pointer = await policy_pointer(transport)
    assert position is not None and (position.policy_version, position.consumed_local) == (4, 8)
    assert pointer is not None and (pointer.version, pointer.consumed_local) == (4, 8)
    assert checkpoints(config).steps() == [3, 4]
    assert life.value("swarm_trainer_steps_total") == 4
    assert life.value("swarm_policy_version") == 4
    assert life.context.status.get("finished") == 1
    await life.stop()

    lines = metric_lines(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    last = lines[-1]
    assert last["reward_local"] == pytest.approx(2 / 7)
    assert last["reward_external"] == pytest.approx(2.75 / 5)
    assert (last["groups_local"], last["groups_external"], last["groups_zero_advantage"]) == (2, 2, 1)
    assert sum(last["alike_of"].values()) <= 1 and 0.0 <= last["cut_off_share"] <= 1.0
    assert (last["behaviour_share"], last["reencoded_share"]) == (0.75, 0.25)
    assert (last["staleness_mean"], last["staleness_max"]) == (1.0, 1)
    assert last["updated"] and last["grad_norm"] > 0 and last["entropy"] > 0 and last["tokens"] > 0
    assert set(last["phase_seconds"]) == {"wait", "intake", "forward_backward", "optimizer", "publish", "checkpoint"}
    trained = read_jsonl(config.node.run_dir / TRAINED_FILE)
    assert [line["step"] for line in trained] == [1, 2, 3, 4] and all(len(line["groups"]) == 4 for line in trained)
    assert [group["fate"] for group in trained[-1]["groups"]].count("no_advantage") == last["groups_zero_advantage"]
    assert lines[3]["phase_seconds"]["checkpoint"] > 0 and lines[2]["phase_seconds"]["checkpoint"] == 0


async def test_groups_that_were_scored_before_the_reward_was_changed_are_trained_on_and_told(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 1, "constants": {"policy_check_fraction": 0.0}})
    rng = random.Random(0)
    one, two, three = (scored_group(tokenizer, rng) for _ in range(3))
    present = config.tasks[0].scorer_id
    scored = [structs.replace(one, scorer="0" * 64), structs.replace(two, scorer=present), three]
    await set_up(transport, [batch_of(1, scored)])
    life = Life(config, transport)
    await life.until_finished()
    assert life.context.status.get(StatusFigure.FORMER_REWARDS) == 1, "of the third its scorer is not known"
    assert metric_lines(config)[-1]["groups_local"] == 3
    status = life.context.status.snapshot()
    node = NodeState("alpha", statuses=(status,), at=status.updated_at)
    (told,) = [words for words in node.notes if "before the reward was changed" in words]
    assert told.startswith("1 of the newest step's groups")
    await life.stop()


async def test_groups_of_a_verifier_that_alone_read_a_changed_reward_were_not_scored_before_the_change(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 3, "constants": {"policy_check_fraction": 0.0}})
    rng, present, changed = random.Random(0), config.tasks[0].scorer_id, "0" * 64
    before, *since = (scored_group(tokenizer, rng) for _ in range(4))
    now = time.time() + 3600.0  # after the trainer was started
    new = [structs.replace(group, scorer=changed, scored_at=now) for group in since]
    batches = [batch_of(1, [structs.replace(before, scorer=present)]), batch_of(2, [before, new[0]]), batch_of(3, new[1:])]
    batches[1] = structs.replace(batches[1], items=[*batches[0].items, *batches[1].items[1:]])
    await set_up(transport, batches)
    life = Life(config, transport)
    await life.until_finished()
    assert life.context.status.get(StatusFigure.FORMER_REWARDS) == 0
    assert life.context.status.snapshot().scorer == rewards_id(config.tasks), "so that displays see that the verifier's differs"
    assert [line["groups"] for line in life.logged("other_rewards")] == [1], "once"
    scorers = [line["scorer"] for line in metric_lines(config)]
    assert scorers == [scorers_id(config.tasks), None, scorers_id(config.tasks, {present: changed})]
    await life.stop()


def test_which_rewards_a_step_got_is_known_of_several_sources_and_the_same_after_the_trainer_read_them() -> None:
    specs = [TaskSpec.model_validate({"dataset": name, "pass_at": rate}) for name, rate in (("gcd", 0.5), ("chain_sum", 0.9))]
    a, b = (spec.scorer_id for spec in specs)
    new = "d" * 64
    scorer = StepScorer(specs)

    def of(*groups: tuple[str, str | None]) -> str | None:
        return scorer.of([scored_by(dataset, scored) for dataset, scored in groups])

    own = scorers_id(specs)
    assert of(("gcd", new)) is None, "whose place it took is not known"
    assert of(("gcd", a), ("chain_sum", b), ("chain_sum", None)) == own
    assert of(("gcd", a), ("gcd", new)) is None
    assert of(("chain_sum", b), ("gcd", new)) == scorers_id(specs, {a: new}) != own
    assert of(("chain_sum", b)) == scorers_id(specs, {a: new}), "no group of the source says otherwise"
    assert of(("gcd", a)) == own


def scored_by(dataset: str, scorer: str | None) -> ScoredGroup:
    return structs.replace(sampler_group(1, dataset=dataset), scorer=scorer)


async def test_the_published_file_is_the_checkpointed_policy_under_hugging_face_names(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 2})
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    pointer = await policy_pointer(transport)
    assert pointer is not None
    store = open_policy_store(config.policy_store_uri, transport, NODE)
    published = load_file(await store.fetch(pointer, tmp_path / "fetched"))
    exported = AutoModelForCausalLM.from_pretrained(export_policy(config.node.run_dir, tmp_path / "export").folder)
    state = exported.state_dict()
    assert "lm_head.weight" not in published and "lm_head.weight" in state
    assert all(torch.equal(published[name], state[name]) for name in published)
    assert set(state) - set(published) == {"lm_head.weight"}
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert not torch.equal(published["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


async def test_a_stopped_trainer_writes_a_checkpoint_and_goes_on_to_the_same_weights(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    batches = some_batches(tokenizer, 8)
    whole = node_config(model, tmp_path / "whole", trainer={"max_steps": 8})
    await set_up(transport, batches)
    life = Life(whole, transport)
    await life.until_finished()
    await life.stop()

    other = await own_plane()
    parts = node_config(model, tmp_path / "parts", trainer={"max_steps": 8})
    await set_up(other)
    for first, count in ((1, 2), (3, 2), (5, 4)):
        await put_batches(other, batches[first - 1 : first - 1 + count])
        life = Life(parts, other)
        await life.until_step(first + count - 1)
        assert await life.stop() < 4.0
        assert checkpoints(parts).steps()[-1] == first + count - 1
    assert final_state(parts) == final_state(whole)
    assert [line["step"] for line in metric_lines(parts)] == list(range(1, 9))


async def test_a_batch_without_any_advantage_counts_as_a_step_and_leaves_the_weights(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 1, "constants": {"weight_decay": 0.5}})
    await set_up(transport, [batch_of(1, [scored_group(tokenizer, random.Random(1), rewards=(1.0, 1.0))])])
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    (line,) = metric_lines(config)
    assert line["updated"] is False and line["updates"] == 0
    nothing_measured = ("loss", "grad_norm", "entropy", "kl_behaviour", "importance_ratio", "importance_ratio_max", "clip_fraction")
    assert {line[name] for name in nothing_measured} == {None}, "0 would be a claim"
    gauges = [f"swarm_trainer_{name}" for name in ("loss", "grad_norm", "entropy_nats", "kl_behaviour_nats")]
    assert [life.context.registry.get_sample_value(name) for name in gauges] == [None] * len(gauges)
    assert life.value("swarm_trainer_unchanged_steps_total") == 1
    checkpoint, _ = checkpoints(config).newest()
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert checkpoint is not None
    assert all(torch.equal(value, base[name]) for name, value in checkpoint.state.weights.items())
    pointer = await policy_pointer(transport)
    assert pointer is not None and pointer.version == 1


async def test_the_batch_log_is_purged_up_to_the_oldest_kept_checkpoint_but_never_its_newest_batch(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.batch_log.KEPT_TO_READ_BYTES", 0)
    config = node_config(model, tmp_path, trainer={"max_steps": 6, "checkpoint_every": 2, "keep_checkpoints": 2})
    await set_up(transport, some_batches(tokenizer, 6))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    assert checkpoints(config).steps() == [4, 6]
    assert (await transport.stream_state(STREAM)).first_seq == 5

    alone = node_config(model, tmp_path / "alone", trainer={"max_steps": 1, "checkpoint_every": 1, "keep_checkpoints": 1})
    other = await own_plane()
    await set_up(other, some_batches(tokenizer, 1))
    life = Life(alone, other)
    await life.until_finished()
    await life.stop()
    assert (await other.stream_state(STREAM)).messages == 1


async def test_the_newest_batches_stay_in_the_log_for_who_looks_at_their_groups_afterwards(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.batch_log.KEPT_TO_READ", 4)
    config = node_config(model, tmp_path, trainer={"max_steps": 6, "checkpoint_every": 1, "keep_checkpoints": 1})
    await set_up(transport, some_batches(tokenizer, 6))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    assert (await transport.stream_state(STREAM)).first_seq == 3


async def test_the_checkpoint_of_the_best_evaluation_is_kept(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 1, "keep_checkpoints": 1}, eval={"every_versions": 1})
    await set_up(transport)
    life = Life(config, transport)
    for step, pass_rate in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.4)):
        report = EvalReport(
            node=NODE, policy_version=step, created_at=1.0, n=10, pass_rate=pass_rate, mean_reward=0.5, per_task={}, seconds=1.0
        )
        await transport.kv.put(node_bucket(NODE), EVAL_KEY, encode(report))
        await put_batches(transport, [mixed_batch(tokenizer, step)])
        await life.until(lambda step=step: checkpoints(config).steps()[-1:] == [step])
    await life.stop()
    assert checkpoints(config).steps() == [2, 4]
    export_policy(config.node.run_dir, tmp_path / "best", best=True)
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "best").state_dict()
    kept = checkpoints(config).read(2)
    assert all(torch.equal(best[name], value) for name, value in kept.state.weights.items())


async def test_a_full_disk_leaves_checkpoint_and_policy_as_they_were_and_both_are_written_later(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 1})
    await set_up(transport, some_batches(tokenizer, 1))
    life = Life(config, transport)
    await life.until(lambda: checkpoints(config).steps() == [1])
    before = final_state(config)
    with no_file_above(20_000):
        await put_batches(transport, some_batches(tokenizer, 1, first=2))
        await life.until(lambda: life.value("swarm_trainer_write_failures_total", kind="checkpoint") >= 1)
        await life.until(lambda: life.value("swarm_trainer_write_failures_total", kind="policy") >= 1)
        assert final_state(config) == before
        pointer = await policy_pointer(transport)
        assert pointer is not None and pointer.version == 1
    failure = life.logged("write_failed")[0]
    assert "remedy" in failure and ("too large" in failure["reason"] or str(errno.EFBIG) in failure["reason"])

    async def published() -> bool:
        pointer = await policy_pointer(transport)
        return pointer is not None and pointer.version == 2

    await life.until(published)
    await life.until(lambda: checkpoints(config).steps()[-1] == 2)
    await life.stop()
    assert [line["step"] for line in metric_lines(config)] == [1, 2]


async def test_checkpoints_that_fail_are_tried_ever_more_rarely_told_once_and_shown_until_one_succeeds(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 1}, tracking={"trackers": []})
    await set_up(transport, some_batches(tokenizer, 1))
    life = Life(config, transport)
    await life.until(lambda: checkpoints(config).steps() == [1])
    since, count = FigureFamily.FAILING_SINCE.of("checkpoint"), FigureFamily.WRITE_FAILURES.of("checkpoint")
    with no_file_above(20_000):
        for step in range(2, 14):
            await put_batches(transport, some_batches(tokenizer, 1, first=step))
            await life.until_trained(step)
        await life.until(lambda: life.value("swarm_trainer_write_failures_total", kind="checkpoint") >= 2)
        assert life.value("swarm_trainer_write_failing", kind="checkpoint") == 1.0
        figures = life.context.status.snapshot().figures
        assert time.time() - 60.0 < figures[str(since)] < time.time() and figures[str(count)] >= 2
    tries = life.value("swarm_trainer_write_failures_total", kind="checkpoint")
    assert tries <= 5, "at most one try after 0, 1, 3, 7 and 15 s"
    failed = [line for line in life.logged("write_failed") if line["kind"] == "checkpoint"]
    assert [line["failures"] for line in failed] == [1]
    await life.until(lambda: checkpoints(config).steps()[-1] == 13)
    await life.until(lambda: life.value("swarm_trainer_write_failing", kind="checkpoint") == 0.0)
    (ended,) = [line for line in life.logged("write_succeeded") if line["kind"] == "checkpoint"]
    assert ended["failures"] >= tries
    assert str(since) not in life.context.status.snapshot().figures
    await life.stop()


async def test_a_published_policy_newer_than_the_whole_log_is_taken_back_with_a_warning(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path)
    await set_up(transport, some_batches(tokenizer, 2))
    lost = PolicyPointer(version=5, sha256="0" * 64, size_bytes=1, uri="file:///x", consumed_local=10, created_at=1.0)
    await transport.kv.put(node_bucket(NODE), POLICY_KEY, encode(lost))
    life = Life(config, transport)

    async def back() -> bool:
        pointer = await policy_pointer(transport)
        return pointer is not None and pointer.version == 2

    await life.until(back)
    await life.stop()
    assert [line["level"] for line in life.logged("policy_steps_back")] == ["warning"]


async def test_a_trainer_that_lost_its_newest_checkpoint_says_the_step_that_it_resumes_at_before_it_takes_one(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 2})
    await set_up(transport, some_batches(tokenizer, 4))
    life = Life(config, transport)
    await life.until_step(4)
    await life.stop()
    newest = max((config.node.run_dir / CHECKPOINTS).iterdir())
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(b"torn")
    life = Life(config, transport)
    await life.until(lambda: life.context.status.get(StatusFigure.STEP) == 4)
    await life.stop()
    written = await transport.read(bucket_stream(node_bucket(NODE)), 1, 1000)
    values = [each.inline for each in written if each.subject.endswith(f".{TRAINER_KEY}") and each.inline]
    told = [decode(value, TrainerPosition).policy_version for value in values]
    assert 2 in told[told.index(4) :], told


async def test_it_outlives_its_server_and_goes_on_where_it_was(
    model: Path, tokenizer: PreTrainedTokenizerFast, nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = nats_server()
    transport = await connect(server.url, name="test-trainer")
    config = node_config(model, tmp_path, policy_store={"uri": "nats://"})
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_step(2)
    server.kill()
    await asyncio.sleep(0.5)
    server.start()

    async def stored() -> bool:
        try:
            await put_batches(transport, some_batches(tokenizer, 2, first=3))
        except NotConnected:
            return False
        return True

    await life.until(stored)
    await life.until_step(4)
    pointer = await policy_pointer(transport)
    assert pointer is not None and pointer.version == 4
    store = open_policy_store(config.policy_store_uri, transport, NODE)
    assert load_file(await store.fetch(pointer, tmp_path / "fetched"))
    assert await life.stop() < 4.0
    assert [line["step"] for line in metric_lines(config)] == [1, 2, 3, 4]
    await transport.close()


async def test_a_server_that_stays_away_does_not_keep_the_trainer_from_stopping(
    model: Path, tokenizer: PreTrainedTokenizerFast, nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = nats_server()
    transport = await connect(server.url, name="test-trainer")
    config = node_config(model, tmp_path)
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_step(2)
    server.kill()
    await asyncio.sleep(0.3)
    assert await life.stop() < 2.0
    assert checkpoints(config).steps() == [2]


async def test_absurd_answers_of_others_are_told_to_the_nodes_verifiers(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(
        model, tmp_path, trainer={"max_steps": 2, "constants": {"policy_check_fraction": 1.0, "min_foreign_logprob": 0.0}}
    )
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_finished()
    entry = await transport.kv.get(node_bucket(NODE), FINDINGS_KEY)
    assert entry is not None
    found = decode(entry.value, TrainerFindings).found
    assert [(each.batch, each.sender, each.absurd, each.answers) for each in found] == [(1, "beta", 2, 2), (2, "beta", 2, 2)]
    await life.stop()


async def test_after_a_restore_evaluations_of_policies_that_are_gone_do_not_count_and_nothing_is_promised_of_lost_batches(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 2})
    await set_up(transport, some_batches(tokenizer, 3))
    life = Life(config, transport)
    await life.until_step(3)
    await life.until(lambda: len(metric_lines(config)) == 3)
    life.kill()
    folder, now = config.node.run_dir, time.time()
    steps = "".join(json.dumps({"step": step, "time": now}) + "\n" for step in range(1, 61))
    lines = [{"policy_version": at, "pass_rate": at / 100, "n": 20, "time": now} for at in (0, 3, 4, 31, 60)]
    (folder / "metrics.jsonl").write_text(steps)
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # The sampler goes on at once, with a batch that was never trained on.
    await put_batches(transport, [structs.replace(batch, created_at=now + 1) for batch in some_batches(tokenizer, 1, first=4)])
    again = Life(config, transport)
    await again.until_step(4)
    await again.stop()
    (told,) = again.logged("steps_trained_again")
    assert told["same_until"] == 3 and told["level"] == "warning"
    assert [each.policy_version for each in read_evaluations(folder)] == [0, 3]
    assert (recorded := recorded_set(folder)) is not None and recorded.n == 20
    assert len((folder / "eval.jsonl").read_text().splitlines()) == len(lines) + 1, "the lines stay on record"
    with (folder / "eval.jsonl").open("a") as file:
        file.write(json.dumps({"policy_version": 4, "pass_rate": 0.5, "n": 20, "time": now + 2}) + "\n")
    assert [(each.policy_version, each.score) for each in read_evaluations(folder)][-1] == (4, 0.5)


async def test_after_a_kill_evaluations_of_policies_that_the_log_gives_again_count(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 2})
    await set_up(transport, some_batches(tokenizer, 3))
    life = Life(config, transport)
    await life.until_step(3)
    await life.until(lambda: len(metric_lines(config)) == 3)
    life.kill()
    folder = config.node.run_dir
    (folder / "eval.jsonl").write_text(json.dumps({"policy_version": 3, "pass_rate": 0.3, "n": 20, "time": time.time()}) + "\n")
    again = Life(config, transport)
    await again.until(lambda: bool(again.logged("training")))
    await again.stop()
    (told,) = again.logged("steps_trained_again")
    assert told["same_until"] == 3
    assert [each.policy_version for each in read_evaluations(folder)] == [3]
