"""gs:// through a proxy that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from beam_pipeline.storage import causes, gs
from tests.conftest import forget_clients
from tests.faults.proxy import FAULTS, Proxy, proxied
from tests.servers import Gcs

Through = Callable[..., Proxy]


@pytest.fixture
def through(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Through]:
    """Call it to send gs:// requests of this process through a proxy from then on."""
    monkeypatch.setattr(causes, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(causes, "_MAX_PAUSE_S", 0.1)
    monkeypatch.setattr(gs, "DEFAULT_RETRY", gs.DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.1))
    with ExitStack() as stack:

        def start(share: float, seed: int = 0, faults: tuple[str, ...] = FAULTS) -> Proxy:
            proxy = stack.enter_context(proxied(gcs.url, share, seed, faults))
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
            forget_clients()
            return proxy

        yield start
    monkeypatch.undo()
    forget_clients()
