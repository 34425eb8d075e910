"""Policies that consist of adapters, in vLLM: each is written to a folder that vLLM reads, and
replaces the previous one.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from services.generator.engines.adapters import warn_of_dtype
from services.generator.engines.base import PolicyLoadError
from services.generator.engines.policy_gate import PolicyGate
from services.generator.engines.vllm_process import MERGED, VllmProcess
from shared.cancelling import cancel_and_wait
from shared.model.adapter_file import Adapters, write_peft_folder


class VllmAdapters:
    """The adapters in use, if any, and their folders on disk.

    Args:
        process: vLLM, started with room for adapters of `rank`.
        gate: Keeps calls out during a swap.
        rank: The highest rank that vLLM was started for.
        swap_timeout_s: Deadline for running calls to end before a swap, and again for the swap
            itself.
    """

    def __init__(self, process: VllmProcess, gate: PolicyGate, *, rank: int, swap_timeout_s: float) -> None:
        self._process = process
        self._gate = gate
        self._rank = rank
        self._swap_timeout_s = swap_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="swarm-adapters-", ignore_cleanup_errors=True)
        self._forgetting: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self.request: Any = None
        """vLLM's `LoRARequest` of the current adapters; None: the base model without adapters."""

    @asynccontextmanager
    async def loaded(self, weights_file: Path, version: int, adapters: Adapters, modules: list[str]) -> AsyncIterator[None]:
        """Use these adapters. The block runs before any call samples from them. Raises
        `PolicyLoadError`; the old ones then stay in use.
        """
        from vllm.lora.request import LoRARequest

        if adapters.rank > self._rank:
            raise PolicyLoadError(
                f"policy file {weights_file}: adapters of rank {adapters.rank}, but this vLLM was started for rank "
                f"{self._rank}: use the same trainer.lora settings for trainer and generator"
            )
        number = next(self._numbers)
        folder = Path(self._folder.name) / str(number)
        request = LoRARequest(lora_name=f"policy-{version}-{number}", lora_int_id=number, lora_path=str(folder))
        try:
            await asyncio.to_thread(write_peft_folder, weights_file, adapters, modules, folder)
            async with self._gate.swapping(self._swap_timeout_s):
                await self.add(request, version)
                if self.request is None:
                    warn_of_dtype(adapters, self._process.vllm.model_config.dtype)
                old, self.request = self.request, request
                yield
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise PolicyLoadError(f"policy {version}: its adapters cannot be kept in {folder} ({error})") from error
            raise
        if old is not None:
            # Not part of this load: a deadline that passes here must not fail a policy that is
            # already loaded.
            self._forgetting = asyncio.create_task(self._forget(old))

    async def add(self, request: Any, version: int) -> None:
        """Load `request` next to the adapters in use. Raises `PolicyLoadError` if vLLM fails or
        would ignore one of them.
        """
        try:
            async with asyncio.timeout(self._swap_timeout_s):
                if not await self._process.vllm.add_lora(request):
                    raise RuntimeError("it said no")
                unused = {name for names in await self._unused(request.lora_int_id) for name in names}
        except TimeoutError:
            raise PolicyLoadError(f"policy {version}: vLLM did not load its adapters within {self._swap_timeout_s:.0f} s") from None
        except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
            raise PolicyLoadError(
                f"policy {version}: vLLM failed to load its adapters ({type(error).__name__}: {error}): {MERGED}"
            ) from error
        if unused:
            with suppress(Exception):
                await self._process.vllm.remove_lora(request.lora_int_id)
            raise PolicyLoadError(
                f"policy {version}: vLLM would ignore {len(unused)} of its adapted layers, first {min(unused)}: {MERGED}"
            )

    async def close(self) -> None:
        """Delete all folders; vLLM itself is about to end."""
        await cancel_and_wait(self._forgetting)
        self._folder.cleanup()

    async def _unused(self, number: int) -> list[list[str]]:
        found: list[list[str]] = await self._process.vllm.collective_rpc("unused_adapters", args=(number,))
        return found

    async def _forget(self, request: Any) -> None:
        with suppress(Exception):  # vLLM evicts it when the next adapters are loaded.
            await self._process.vllm.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)
