"""Keeps the engine on the newest policy: watches the pointer, fetches the weights, checks and swaps
them, and reads the version back.

If a swap fails or exceeds its deadline, the old policy stays in use, and the swap is counted and
retried. Each further try may take twice as long as the one before it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from services.generator.engines.base import Engine, PolicyLoadError
from services.generator.figures import Figures
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.control import PolicyPointer, PolicyRefusal
from shared.contracts.status_figures import GENERATING, LOADING_POLICY
from shared.contracts.subjects import POLICY_KEY, POLICY_REFUSED_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.policy_store import PolicyDamagedError, PolicyStoreError, open_policy_store
from shared.runtime import FatalError, ServiceContext
from shared.transport.base import TransportError

_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_MAX_REASON_CHARS = 1000
_MAX_DEADLINES = 32
"""Times its deadline that a load may take at most: a machine that is slower is not only busy."""


class PolicyFollower:
    """Follows one node's policy pointer for one engine."""

    def __init__(self, context: ServiceContext, config: NodeConfig, engine: Engine, figures: Figures) -> None:
        """Raises FatalError if the policy store cannot be opened."""
        self._context = context
        self._figures = figures
        self._engine = engine
        self._bucket = node_bucket(config.node.id)
        try:
            self._store = open_policy_store(config.policy_store_uri, context.node, config.node.id)
        except PolicyStoreError as error:
            raise FatalError(str(error)) from None
        self._folder = config.node.run_dir / f"generator-{config.node.replica}"
        self._timeout_s = config.generator.policy_load_timeout_s
        self._loaded = asyncio.Event()
        self.swaps = asyncio.Lock()
        """Held while the weights are replaced, and by whoever needs them to stay."""
        self.pointer: PolicyPointer | None = None
        """The newest pointer seen; the engine may still be on an older policy."""
        self.loaded: PolicyPointer | None = None
        """Pointer of the policy that the engine uses; None while it is the base policy."""

    async def follow(self) -> None:
        """Loop for ever and load each new policy."""
        newest: PolicyPointer | None = None
        changed = asyncio.Event()

        async def watch() -> None:
            nonlocal newest
            async for entry in self._context.node.kv.watch(self._bucket, POLICY_KEY):
                try:
                    newest = decode(entry.value, PolicyPointer)
                except MessageError as error:
                    self._context.log.error("policy_pointer_unreadable", reason=str(error), consequence="staying on the old policy")
                    continue
                self.pointer = newest
                changed.set()

        watching = asyncio.create_task(watch())
        try:
            while True:
                await changed.wait()
                changed.clear()
                failures = 0
                while newest is not None and not self._answers(newest):
                    if await self._load(newest, failures):
                        failures = 0
                    else:
                        await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                        failures += 1
        finally:
            await cancel_and_wait(watching)

    async def wait_for_first(self, timeout_s: float) -> None:
        """Return when a published policy is loaded, or after `timeout_s` if none exists yet (then
        the base policy is used).
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._loaded.wait()
        except TimeoutError:
            return

    def _answers(self, pointer: PolicyPointer) -> bool:
        """Check whether the engine is known to use this policy. An abandoned load may have
        succeeded after all, and a trainer that goes back a few steps publishes other bytes under
        the same version.
        """
        if self.loaded is None:
            return pointer.version == self._engine.policy_version == 0
        return (pointer.version, pointer.sha256) == (self._engine.policy_version, self.loaded.sha256)

    async def _load(self, pointer: PolicyPointer, failures: int) -> bool:
        """Load a policy after so many tries of it have failed. Returns whether it is in use."""
        started = time.monotonic()
        timeout_s = self._timeout_s * min(2**failures, _MAX_DEADLINES)
        log = self._context.log.bind(policy_version=pointer.version)
        had = self._engine.policy_version
        if is_told := self.loaded is None or failures > 0:
            self._context.status.state(_loading(pointer.version, failures))
        try:
            async with asyncio.timeout(timeout_s):
                weights = await self._store.fetch(pointer, self._folder)
            left_s = timeout_s - (time.monotonic() - started)
            async with self.swaps, self._engine.turn(), asyncio.timeout(left_s):
                await self._engine.load_policy(weights, pointer.version)
        except (PolicyStoreError, PolicyLoadError, TimeoutError, OSError) as error:
            # The deadline may pass when everything is done but the return; then the policy is
            # loaded.
            if not self._engine.policy_version == pointer.version != had:
                late = isinstance(error, TimeoutError)
                reason = str(error) or f"not done within {timeout_s:.0f} s"
                longest_s = _MAX_DEADLINES * self._timeout_s
                remedy = {"remedy": f"wait: the next try has longer, up to {longest_s:.0f} s; or free this machine"}
                log.warning("policy_swap_failed", reason=reason, still_on=self._engine.policy_version, **(remedy if late else {}))
                self._figures.policy_load_failed()
                self._context.status.state(_loading(pointer.version, failures + 1))
                if failures and isinstance(error, PolicyDamagedError):
                    await self._tell(pointer, reason)
                return False
        if self._engine.policy_version != pointer.version:
            log.error("policy_swap_not_taken", engine_says=self._engine.policy_version)
            self._figures.policy_load_failed()
            return False
        self.loaded = pointer
        _forget_others(self._folder, weights)
        seconds = time.monotonic() - started
        self._figures.policy_loaded(pointer.version, seconds)
        self._loaded.set()
        if is_told:  # else the state is of what goes on meanwhile, such as an evaluation
            self._context.status.state(GENERATING)
        log.debug("policy_loaded", seconds=round(seconds, 4))
        return True

    async def _tell(self, pointer: PolicyPointer, reason: str) -> None:
        """Tell the trainer, which publishes a full copy. Once is usually enough, but a server that
        was unreachable may have lost it.
        """
        refusal = PolicyRefusal(
            version=pointer.version, sha256=pointer.sha256, reason=reason[:_MAX_REASON_CHARS], refused_at=time.time()
        )
        try:
            await self._context.node.kv.put(self._bucket, POLICY_REFUSED_KEY, encode(refusal))
        except TransportError as error:
            self._context.log.warning("policy_refusal_not_told", reason=str(error), consequence="tried again")


def _loading(version: int, failures: int) -> str:
    """State of a generator that loads this policy, after so many failed tries."""
    tried = f", tried {failures} time{'s' if failures > 1 else ''}" if failures else ""
    return f"{LOADING_POLICY} {version}{tried}"


def _forget_others(folder: Path, keep: Path) -> None:
    if folder.is_dir():
        for file in folder.glob("*.safetensors"):
            if file != keep:
                file.unlink(missing_ok=True)
