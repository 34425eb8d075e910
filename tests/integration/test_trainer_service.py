"""The trainer service over the in-memory transport: what it trains, publishes, writes and says."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.generator.engines import SamplingParams
from services.generator.engines.transformers_engine import TransformersEngine
from services.trainer.durable.export import export_adapter, export_policy
from services.trainer.learner import Learner
from services.trainer.records import StepRecord
from shared.config.sections import ModelSection
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, PolicyPointer
from shared.contracts.messages import Batch
from shared.contracts.senders import FINDINGS_KEY, TrainerFindings
from shared.contracts.subjects import EVAL_KEY, POLICY_KEY, node_batches_stream, node_bucket
from shared.device_turns import DeviceTurns, turns_file
from shared.json_lines import read_jsonl
from shared.model.reading import load_tokenizer
from shared.policy_store import open_policy_store
from shared.run_records import TRAINED_FILE
from shared.runtime import FatalError
from shared.transport.base import NotConnected
from shared.transport.connect import connect
from shared.transport.memory.server import MemoryServer
from shared.transport.memory.transport import MemoryTransport
from swarm_cli.errors import CommandError
from swarm_cli.model.commands import Dtype, export, export_node
from tests.full_disk import no_file_above
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
    tiny_policy,
    trainer_position,
)
from tests.nats_server import NatsServer

STREAM = node_batches_stream(NODE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelSection(path=str(model)))


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport(MemoryServer())


def some_batches(tokenizer: PreTrainedTokenizerFast, count: int, first: int = 1) -> list[Batch]:
    return [mixed_batch(tokenizer, number) for number in range(first, first + count)]


async def test_it_trains_each_batch_publishes_each_policy_and_says_when_it_is_finished(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    # The texts are made up, and no policy finds them likely.
    config = node_config(model, tmp_path, trainer={"max_steps": 4, "policy_check_fraction": 0.0})
    await set_up(transport, some_batches(tokenizer, 6))
    life = Life(config, transport)
    await life.until_finished()

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
    assert (last["behaviour_share"], last["reencoded_share"]) == (0.75, 0.25)
    assert (last["staleness_mean"], last["staleness_max"]) == (1.0, 1)
    assert last["updated"] and last["grad_norm"] > 0 and last["entropy"] > 0 and last["tokens"] > 0
    assert set(last["phase_seconds"]) == {"wait", "intake", "forward_backward", "optimizer", "publish", "checkpoint"}
    trained = read_jsonl(config.node.run_dir / TRAINED_FILE)
    assert [line["step"] for line in trained] == [1, 2, 3, 4] and all(len(line["groups"]) == 4 for line in trained)
    assert [group["fate"] for group in trained[-1]["groups"]].count("no_advantage") == last["groups_zero_advantage"]
    assert lines[3]["phase_seconds"]["checkpoint"] > 0 and lines[2]["phase_seconds"]["checkpoint"] == 0


async def test_the_published_file_is_the_checkpointed_policy_under_hugging_face_names(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
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
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    batches = some_batches(tokenizer, 8)
    whole = node_config(model, tmp_path / "whole", trainer={"max_steps": 8})
    await set_up(transport, batches)
    life = Life(whole, transport)
    await life.until_finished()
    await life.stop()

    other = MemoryTransport(MemoryServer())
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


async def test_a_trainer_that_waits_for_its_turn_on_the_device_stops_with_a_checkpoint_of_what_it_trained(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, model_section={"device_turns": True})
    others = DeviceTurns(turns_file(tmp_path, "cpu"), "generator of beta")
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_step(2)
    async with others.turn():
        await put_batches(transport, some_batches(tokenizer, 1, first=3))
        await life.until(others.wanted)
        assert await life.stop() < 10.0
    assert checkpoints(config).steps()[-1] == 2
    life = Life(config, transport)
    await life.until_step(3)
    await life.stop()


async def test_a_turn_that_cannot_be_had_is_a_fatal_error_with_a_remedy(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    turns_file(tmp_path, "cpu").mkdir()
    await set_up(transport, some_batches(tokenizer, 1))
    with pytest.raises(FatalError, match="no turn on the device .* unset model.device_turns"):
        await Life(node_config(model, tmp_path, model_section={"device_turns": True}), transport).end()


class FullDevice(Learner):
    """A learner for whose steps there is no memory. Stands in for a GPU, which tests cannot count
    on.
    """

    def step(self, batch: Batch) -> StepRecord:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("in_turns", [False, True])
async def test_a_step_that_does_not_fit_is_fatal_unless_others_may_have_the_memory_yet(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path, in_turns: bool
) -> None:
    """One that was killed in its turn gives its memory back a moment after its turn: then a
    supervisor starts the trainer again.
    """
    config = node_config(model, tmp_path, model_section={"device_turns": in_turns})
    await set_up(transport, some_batches(tokenizer, 1))
    with pytest.raises((FatalError, RuntimeError), match="step 1 does not fit .*2.00 GiB.*lower trainer.token_budget") as raised:
        await Life(config, transport, learn=FullDevice).end()
    assert isinstance(raised.value, FatalError) != in_turns
    async with asyncio.timeout(120), DeviceTurns(turns_file(tmp_path, "cpu"), "the next").turn():
        pass


async def test_a_batch_without_any_advantage_counts_as_a_step_and_leaves_the_weights(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 1, "weight_decay": 0.5})
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


async def test_a_broken_newest_checkpoint_is_put_aside_and_the_one_before_gives_the_same_end(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 8})
    await set_up(transport, some_batches(tokenizer, 8))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    expected = final_state(config)
    newest = checkpoints(config).folder / "step-00000008" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])

    life = Life(config, transport)
    await life.until(lambda: bool(life.logged("finished")))
    await life.stop()
    (warning,) = life.logged("checkpoint_broken")
    assert "torn or altered" in warning["reason"] and life.value("swarm_trainer_corrupt_checkpoints_total") == 1
    assert final_state(config) == expected
    assert [line["step"] for line in metric_lines(config)] == list(range(1, 9))
    assert not life.logged("policy_published_again")


async def test_when_no_checkpoint_is_whole_it_refuses_to_start_and_says_what_to_do(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 4})
    await set_up(transport, some_batches(tokenizer, 4))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    for step in checkpoints(config).steps():
        (checkpoints(config).folder / f"step-{step:08d}" / "manifest.json").write_text("{}")
    with pytest.raises(FatalError, match="no checkpoint in .* can be used .* restore one .* node.run"):
        await Life(config, transport).end()


async def test_batches_that_are_gone_from_the_log_are_a_fatal_error_with_a_remedy(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 9})
    await set_up(transport, some_batches(tokenizer, 5))
    await transport.purge(STREAM, 2)
    with pytest.raises(
        FatalError, match="batch 1 is missing .* the log continues with batch 3, and there is no checkpoint. Restore"
    ):
        await Life(config, transport).end()
    await transport.purge(STREAM, 5)
    with pytest.raises(FatalError, match="nothing is left of it"):
        await Life(config, transport).end()


async def test_a_message_that_is_no_batch_is_a_fatal_error(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    await set_up(transport)
    await transport.publish(f"node.{NODE}.batches", encode(mixed_batch(tokenizer, 1))[:-9], stream=STREAM, message_id="x")
    with pytest.raises(FatalError, match="is not a batch that this version can read .*malformed"):
        await Life(node_config(model, tmp_path), transport).end()


async def test_a_missing_model_is_a_fatal_error_with_a_remedy(transport: MemoryTransport, tmp_path: Path) -> None:
    await set_up(transport)
    config = node_config(tmp_path / "nowhere", tmp_path)
    with pytest.raises(FatalError, match="is not a folder: check the spelling, import a model with"):
        await Life(config, transport).end()


async def test_the_batch_log_is_purged_up_to_the_oldest_kept_checkpoint_but_never_its_newest_batch(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 6, "checkpoint_every": 2, "keep_checkpoints": 2})
    await set_up(transport, some_batches(tokenizer, 6))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    assert checkpoints(config).steps() == [4, 6]
    assert (await transport.stream_state(STREAM)).first_seq == 5

    alone = node_config(model, tmp_path / "alone", trainer={"max_steps": 1, "checkpoint_every": 1, "keep_checkpoints": 1})
    other = MemoryTransport(MemoryServer())
    await set_up(other, some_batches(tokenizer, 1))
    life = Life(alone, other)
    await life.until_finished()
    await life.stop()
    assert (await other.stream_state(STREAM)).messages == 1


async def test_the_checkpoint_of_the_best_evaluation_is_kept(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
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
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
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


async def test_a_published_policy_newer_than_the_whole_log_is_taken_back_with_a_warning(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
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


async def test_lora_publishes_adapters_alone_which_an_engine_answers_with_as_the_merged_export_does(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    trainer = {"max_steps": 3, "learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 32.0}}
    config = node_config(model, tmp_path, trainer=trainer)
    await set_up(transport, some_batches(tokenizer, 3))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    pointer = await policy_pointer(transport)
    assert pointer is not None
    store = open_policy_store(config.policy_store_uri, transport, NODE)
    fetched = await store.fetch(pointer, tmp_path / "fetched")
    assert {value.dtype for value in load_file(fetched).values()} == {torch.float32}
    assert all(".lora_" in name for name in load_file(fetched))
    assert life.context.registry.get_sample_value("swarm_trainer_delta_lost_ratio") is None

    async def scores(folder: Path, policy: Path | None) -> list[list[float]]:
        engine = TransformersEngine(str(folder), device="cpu", max_model_len=128)
        await engine.start()
        if policy is not None:
            await engine.load_policy(policy, pointer.version)
        found = await engine.score([[72, 105]], [[40, 41, 42, 43]], SamplingParams(temperature=1.0, max_new_tokens=8))
        await engine.close()
        return found

    base, published = await scores(model, None), await scores(model, fetched)
    exported = await scores(export_policy(config.node.run_dir, tmp_path / "export").folder, None)
    assert published[0] == pytest.approx(exported[0], abs=1e-4)
    assert base[0] != pytest.approx(exported[0], abs=1e-2)


async def test_lora_trains_adapters_only_and_publishes_and_exports_them_merged_where_that_is_asked_for(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 3, "lora": {"rank": 4, "publish": "merged"}})
    await set_up(transport, some_batches(tokenizer, 3))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    checkpoint, _ = checkpoints(config).newest()
    assert checkpoint is not None and all("lora_" in name for name in checkpoint.state.weights)
    pointer = await policy_pointer(transport)
    assert pointer is not None
    store = open_policy_store(config.policy_store_uri, transport, NODE)
    published = load_file(await store.fetch(pointer, tmp_path / "fetched"))
    exported = AutoModelForCausalLM.from_pretrained(export_policy(config.node.run_dir, tmp_path / "export").folder).state_dict()
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert set(base) - set(published) == {"lm_head.weight"} and set(published) < set(base)
    assert all(torch.equal(published[name], exported[name]) for name in published)
    changed = {name for name in published if not torch.equal(published[name], base[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}


async def test_a_delta_that_bfloat16_rounds_away_is_told_with_cause_and_remedy_and_float32_keeps_it(
    model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    published = {}
    for dtype in ("auto", "float32"):
        trainer = {"max_steps": 3, "learning_rate": 1e-5, "lora": {"rank": 4, "publish": "merged"}, "publish_dtype": dtype}
        config = node_config(model, tmp_path / dtype, model_section={"dtype": "bfloat16"}, trainer=trainer)
        transport = MemoryTransport(MemoryServer())
        await set_up(transport, some_batches(tokenizer, 3))
        life = Life(config, transport)
        await life.until_finished()
        await life.stop()
        lost = life.context.registry.get_sample_value("swarm_trainer_delta_lost_ratio")
        assert lost is not None
        pointer = await policy_pointer(transport)
        assert pointer is not None
        store = open_policy_store(config.policy_store_uri, transport, NODE)
        fetched = await store.fetch(pointer, tmp_path / f"fetched-{dtype}")
        published[dtype] = load_file(fetched)
        shutil.copy(fetched, tmp_path / f"{dtype}.safetensors")
        if dtype == "float32":
            assert abs(lost) < 0.01 and not life.logged("delta_rounded_away")
            continue
        assert lost > 0.8
        (line,) = life.logged("delta_rounded_away")
        assert (line["level"], line["version"], line["dtype"]) == ("warning", 1, "bfloat16") and line["lost_ratio"] > 0.8
        assert "do not move in bfloat16" in line["reason"] and "publish_dtype" in line["remedy"]
    assert {value.dtype for value in published["auto"].values()} == {torch.bfloat16}
    assert all(torch.equal(value, published["float32"][name].bfloat16()) for name, value in published["auto"].items())
    # What docs/models.md says of generators: one in bfloat16 rounds again, one in float32 has the
    # policy that is trained.
    for dtype, sees_a_difference in (("bfloat16", False), ("float32", True)):
        engine = TransformersEngine(str(model), dtype=dtype, device="cpu", max_model_len=128)
        await engine.start()
        scores = []
        for kind in ("auto", "float32"):
            await engine.load_policy(tmp_path / f"{kind}.safetensors", 3)
            scores.append(await engine.score([[72, 105]], [[40, 41, 42, 43]], SamplingParams(temperature=1.0, max_new_tokens=8)))
        await engine.close()
        assert (scores[0] != scores[1]) == sees_a_difference


async def test_exports_merge_in_float32_say_what_rounding_loses_and_write_float32_or_the_adapter_alone(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    transport: MemoryTransport,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = {"max_steps": 3, "learning_rate": 1e-5, "lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}}
    config = node_config(model, tmp_path, model_section={"dtype": "bfloat16"}, trainer=trainer)
    await set_up(transport, some_batches(tokenizer, 3))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    run_dir = config.node.run_dir

    usual = export_policy(run_dir, tmp_path / "usual")
    exact = export_policy(run_dir, tmp_path / "exact", dtype="float32")
    assert usual.dtype == "bfloat16" and usual.rounding is not None and usual.rounding.lost_ratio > 0.8
    assert exact.dtype == "float32" and exact.rounding is not None and abs(exact.rounding.lost_ratio) < 0.01
    wide = AutoModelForCausalLM.from_pretrained(exact.folder)
    narrow = AutoModelForCausalLM.from_pretrained(usual.folder)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert all(torch.equal(value.bfloat16(), narrow.state_dict()[name]) for name, value in wide.state_dict().items())

    alone = export_adapter(run_dir, tmp_path / "adapter")
    assert not (alone.folder / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float()
    merged = PeftModel.from_pretrained(base, alone.folder).merge_and_unload().state_dict()
    assert all(torch.allclose(merged[name], value, rtol=0, atol=1e-7) for name, value in wide.state_dict().items())

    def said(out: str, *options: str) -> str:
        export(str(run_dir.parent), NODE, tmp_path / out, var_dir=tmp_path, **dict.fromkeys(options, True))
        return capsys.readouterr().err

    assert re.search(r"rounding to bfloat16 lost [89]\d% .*--dtype float32 or --adapter keeps it", said("by-command"))
    assert "lost" not in said("adapter-by-command", "adapter")
    with pytest.raises(CommandError, match="omit --dtype"):
        export(str(run_dir.parent), NODE, tmp_path / "both", dtype=Dtype.FLOAT32, adapter=True, var_dir=tmp_path)


async def test_a_policy_that_was_trained_whole_is_exported_as_its_float32_weights_and_has_no_adapter(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, model_section={"dtype": "bfloat16"}, trainer={"max_steps": 2})
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    checkpoint, _ = checkpoints(config).newest()
    assert checkpoint is not None
    exported = export_policy(config.node.run_dir, tmp_path / "export", dtype="float32")
    state = AutoModelForCausalLM.from_pretrained(exported.folder).state_dict()
    assert exported.rounding is None
    assert all(torch.equal(state[name], value) for name, value in checkpoint.state.weights.items())
    with pytest.raises(CommandError, match="trained without adapters .* export the whole policy"):
        export_node(config.node.run_dir, tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()


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
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: MemoryTransport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 2, "policy_check_fraction": 1.0, "min_foreign_logprob": 0.0})
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_finished()
    entry = await transport.kv.get(node_bucket(NODE), FINDINGS_KEY)
    assert entry is not None
    found = decode(entry.value, TrainerFindings).found
    assert [(each.batch, each.sender, each.absurd, each.answers) for each in found] == [(1, "beta", 2, 2), (2, "beta", 2, 2)]
    await life.stop()
