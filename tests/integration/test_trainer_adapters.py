"""What a trainer of adapters publishes and what is exported of it: adapters alone or merged, in
which precision, and what rounding loses.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.generator.engines import SamplingParams
from services.generator.engines.transformers_engine import TransformersEngine
from services.trainer.export import export_adapter, export_policy
from shared.policy_store import open_policy_store
from shared.transport.base import Transport
from swarm_cli.errors import CommandError
from swarm_cli.model.commands import export, export_node
from tests.integration.trainer_fixtures import model, some_batches, tokenizer, transport
from tests.integration.trainer_life import NODE, Life, checkpoints, node_config, policy_pointer, set_up
from tests.nats_server import own_plane

__all__ = ["model", "tokenizer", "transport"]


async def test_lora_publishes_adapters_alone_which_an_engine_answers_with_as_the_merged_export_does(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
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
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
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
        transport = await own_plane()
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
    transport: Transport,
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
        export(str(run_dir.parent), NODE, tmp_path / "both", dtype="float32", adapter=True, var_dir=tmp_path)


async def test_a_policy_that_was_trained_whole_is_exported_as_its_float32_weights_and_has_no_adapter(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
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
