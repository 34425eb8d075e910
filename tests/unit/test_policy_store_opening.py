"""A policy store of an installed package that cannot be opened is told in a sentence with its name,
and ends its services for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.generator.policy_follower import PolicyFollower
from shared.config import load_config
from shared.policy_store import PolicyStoreError, open_policy_store
from shared.runtime import FatalError
from tests.installed_packages import forget, install

URI = "mine:///tmp/x"
UNFINISHED = """
class mine:
    def __init__(self, place): pass
    async def publish(self, weights_file, version): pass
    async def fetch(self, pointer, into): pass
    async def prune(self, keep): pass
"""
WHOLE = f"{UNFINISHED}    def begin_again(self): pass"


@pytest.fixture(autouse=True)
def _forget_packages() -> Iterator[None]:
    yield
    forget()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("mine = 'a store'", "is a str: its entry point must name a function"),
        ("def mine(place): return None", "made a NoneType: .* returns a PolicyStore"),
        (UNFINISHED, "made a mine: .* returns a PolicyStore, with all its methods"),
        ("def mine(): pass", ".*takes 0 positional arguments"),
        ("raise SystemExit", "cannot be loaded: SystemExit"),
        ("def mine(place): raise RuntimeError('no disk')", "cannot be opened: RuntimeError: no disk"),
        ("def mine(place): raise PermissionError(13, 'denied')", "cannot be opened: PermissionError: .*denied"),
    ],
)
def test_what_is_no_store_is_told_with_its_name_and_its_package(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.policy_stores", "mine", code)
    with pytest.raises(PolicyStoreError, match=f"policy store mine of the package my-package:? {words}.*set policy_store.uri to"):
        open_policy_store(URI, None, "alpha")
    config = load_config(None, {"tasks": [{"dataset": "gcd"}], "policy_store": {"uri": URI}})
    with pytest.raises(FatalError, match=f"policy store mine of the package my-package:? {words}"):
        PolicyFollower(cast(Any, SimpleNamespace(node=None)), config, cast(Any, None), cast(Any, None))


def test_a_store_with_all_methods_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "swarm.policy_stores", "mine", WHOLE)
    assert type(open_policy_store(URI, None, "alpha")).__name__ == "mine"


@pytest.mark.parametrize("uri", ["my_store:///tmp/x", "Upper:///tmp/x"])
def test_a_scheme_that_a_configuration_refuses_opens_no_store(uri: str) -> None:
    with pytest.raises(PolicyStoreError, match="cannot be the scheme of a URI"):
        open_policy_store(uri, None, "alpha")
