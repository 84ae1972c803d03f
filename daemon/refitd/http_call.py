"""One HTTP request while vLLM's app works on it, and how the code that vLLM calls back finds it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from refitd.exact_chat import Messages
from refitd.http_trace import Trace
from refitd.prefix import EarlierTokens, PrefixError


@dataclass
class HttpCall:
    """One request on its way through vLLM's app. `messages` are as sent: vLLM's own copies can be read only once."""

    request: Any
    messages: Messages
    earlier: EarlierTokens | None
    min_version: int | None
    wait_seconds: float | None
    generates: bool
    trace: Trace = field(default_factory=Trace)
    prefix_mismatch: str | None = None
    is_exact: bool = False
    resolved: dict[str, object] = field(default_factory=dict)

    def require_exact(self) -> None:
        """Raises `PrefixError` where vLLM has made the prompt in a way that does not pass the splice.

        It writes gpt-oss's conversations (Harmony) without a chat template.
        """
        if self.earlier is not None and not self.is_exact:
            raise PrefixError(
                "this model's conversations are not written by a chat template, so earlier tokens cannot be kept: "
                "send the messages without token ids"
            )

    def report(self) -> dict[str, object]:
        prefix = (
            None if self.earlier is None else {"tokens": len(self.earlier.token_ids), "mismatch": self.prefix_mismatch}
        )
        return {**self.resolved, "prefix": prefix}


# vLLM calls back in the task of the request, or in a copy of its context.
current_call: ContextVar[HttpCall | None] = ContextVar("refitd_http_call", default=None)
