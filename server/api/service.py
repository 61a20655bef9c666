"""What routes share: the plan, the model's text side, the engine, the metrics; and the judgement whether to serve now.

Must not know: routes, requests' fields.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from server.engine.client import EngineClient
from server.engine.messages import Hello
from server.errors import NotFound, NotReady, Overloaded
from server.plan import ServePlan
from server.telemetry.metrics import Metrics
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

RETRY_AFTER_S = {"loading": 2.0, "restarting": 2.0, "draining": 5.0, "failed": 30.0}
BUSY_RETRY_AFTER_S = 1.0

_WHY = {
    "loading": "the model is being loaded",
    "restarting": "the engine failed and is started again",
    "draining": "the server is stopping",
    "failed": "the engine cannot be started",
}


@dataclass(frozen=True, slots=True)
class TextSide:
    """The model's tokenizer and chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a request is judged by: the text side and the sizes of the engine that serves."""

    text: TextSide
    hello: Hello

    @property
    def context_tokens(self) -> int:
        """The most tokens that prompt and output can have together."""
        return self.hello.max_model_len_tokens


@dataclass(frozen=True, slots=True)
class Service:
    """One for each application."""

    plan: ServePlan
    text: TextSide
    engine: EngineClient
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    _in_flight: Counter[int] = field(default_factory=Counter[int])  # API key's index -> requests

    def require_ready(self) -> Loaded:
        """Return what is served. Raises NotReady: loading, restarting, draining or failed."""
        state, hello = self.engine.state, self.engine.hello
        if state != "ready" or hello is None:
            raise self._not_ready(state)
        return Loaded(self.text, hello)

    def admit(self) -> Loaded:
        """Return what is served, for a request that generates; one that cannot be taken now is counted. Raises as
        `require_ready` does.
        """
        try:
            return self.require_ready()
        except NotReady as error:
            self.metrics.rejected("draining" if error.code == "draining" else "not_ready")
            raise

    def check_model(self, name: str | None) -> str:
        """Return the name that the response carries. Raises NotFound for one that is not served, listing what is."""
        served = self.plan.served_names
        if name is None or name in served:
            return name or served[0]
        message = f"The model {name[:200]!r} does not exist here; served: {', '.join(served)}"
        raise NotFound(message, param="model", code="model_not_found")

    @contextmanager
    def occupied(self, key: int | None) -> Generator[None]:
        """Count a request of this API key. Raises Overloaded beyond `limits.max_concurrent_per_key`."""
        limit = self.plan.limits.max_concurrent_per_key
        if key is None or limit == 0:
            yield
            return
        if self._in_flight[key] >= limit:
            self.metrics.rejected("key_concurrency")
            message = f"this API key has {limit} requests running, the most it may have; wait for one to end"
            raise Overloaded(message, code="key_concurrency", retry_after_s=BUSY_RETRY_AFTER_S)
        self._in_flight[key] += 1
        try:
            yield
        finally:
            self._in_flight[key] -= 1

    def _not_ready(self, state: str) -> NotReady:
        message = f"{_WHY.get(state, state)}; try again later"
        loading = self.engine.loading
        if state == "loading" and loading is not None:
            share = f" {100 * loading.done // loading.total} %" if loading.total else ""
            message = f"{_WHY[state]} ({loading.phase}{share}); try again later"
        return NotReady(message, code=state, retry_after_s=RETRY_AFTER_S.get(state, 2.0))
