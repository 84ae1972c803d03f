"""vLLM's own OpenAI app on our engine: what passes between the two, and the differences between vLLM's releases.

The app gets an engine client that goes through the daemon's gate, and a renderer that keeps exact tokens. Both know
which HTTP request they work for by a context variable: vLLM calls them in the task of that request.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from vllm.utils.argparse_utils import FlexibleArgumentParser

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import ModelInfo
from refitd.adapters import AdapterUses
from refitd.compat import StampedLLM, lora_request
from refitd.config import HttpConfig
from refitd.engine import Adapter
from refitd.exact_chat import ExactPrompt, Messages, Vocabulary, exact_prompt
from refitd.gate import Gate
from refitd.http_call import HttpCall, current_call
from refitd.http_errors import error_response
from refitd.http_requests import HttpRequests
from refitd.http_trace import stamp_response, stamped_events
from refitd.prefix import PrefixError, TokenTexts, earlier_tokens

try:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # earlier releases, 0.26 for one
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.entrypoints.openai.cli_args import make_arg_parser


class OpenAIEndpoint:
    """vLLM's app around a loaded engine. `app` is what the HTTP door opens to."""

    def __init__(
        self,
        llm: StampedLLM,
        model: ModelInfo,
        config: HttpConfig,
        gate: Gate,
        logprobs_mode: str,
        adapters: AdapterUses,
    ) -> None:
        self._llm = llm
        self._model = model
        self._config = config
        self._gate = gate
        self._logprobs_mode = logprobs_mode
        self._requests = HttpRequests(llm, gate, adapters)
        self.on_prefix: Callable[[str], None] = lambda _outcome: None
        self.app = FastAPI()

    async def build(self) -> None:
        """Builds the app; `ValueError` or `KeyError` from vLLM for a parser or a template it does not know."""
        args = _arguments(self._config, self._model.name)
        tasks = await self._llm.get_supported_tasks()
        app = build_app(args, tasks, self._llm.model_config)
        renderer = _Delegate(self._llm.renderer, render_chat_async=self._render)
        client = _Delegate(self._llm, generate=self._requests.generate, renderer=renderer)
        await init_app_state(client, app.state, args, tasks)
        # vLLM's error handlers stop this server when the engine dies; ours is stopped by the daemon.
        app.state.server = SimpleNamespace(should_exit=False)
        app.add_exception_handler(ProtocolError, _answer_error)
        app.middleware_stack = None  # one of vLLM's add-ons has built it already, without our handler
        self._take_over(app.state)
        self.app = app

    async def abort_all(self, error: ErrorCode) -> None:
        """Ends all running requests: with what they have, or with `error`."""
        await self._requests.abort_all(error)

    def serve_adapters(self, adapters: Iterable[Adapter]) -> None:
        """From now on these are models of their own, by name."""
        served = self.app.state.openai_serving_models.lora_requests
        served.clear()
        served.update({adapter.name: lora_request(adapter) for adapter in adapters})

    def _take_over(self, state: Any) -> None:
        chat, completion, tokenization = (
            state.openai_serving_chat,
            state.openai_serving_completion,
            state.serving_tokenization,
        )
        chat.create_chat_completion = self._generating(chat.create_chat_completion)
        completion.create_completion = self._generating(completion.create_completion)
        tokenization.create_tokenize = self._tokenizing(tokenization.create_tokenize)
        tokenization.create_detokenize = self._naming(tokenization.create_detokenize)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _generating(self, create: Callable[..., Any]) -> Callable[..., Any]:
        async def stamped(request: Any, raw_request: Request) -> Any:
            call = await self._begin(request, raw_request, generates=True)
            _want_ids_and_logprobs(request)
            _check_prompt_ids((await raw_request.json()).get("prompt"))
            # Refused or kept waiting here, an answer can still have a status; once a stream has begun it has one.
            await self._gate.admit(call.min_version, call.wait_seconds)
            answer = await create(request, raw_request)
            if isinstance(answer, AsyncGenerator):
                return stamped_events(answer, call.trace, call.report)
            if hasattr(answer, "choices"):
                stamp_response(answer, call.trace, call.report())
            return answer

        return stamped

    def _tokenizing(self, create: Callable[..., Any]) -> Callable[..., Any]:
        async def kept(request: Any, raw_request: Request) -> Any:
            call = await self._begin(request, raw_request, generates=False)
            answer = await create(request, raw_request)
            if hasattr(answer, "tokens"):
                call.require_exact()
            if call.earlier is not None and hasattr(answer, "tokens"):
                answer.refitd = call.report()
            return answer

        return kept

    def _naming(self, create: Callable[..., Any]) -> Callable[..., Any]:
        async def named(request: Any, raw_request: Request) -> Any:
            self._use_name(request)
            return await create(request, raw_request)

        return named

    def _use_name(self, request: Any) -> None:
        """Who asks for the configured path means the model; vLLM would list every name it is given."""
        if request.model == self._model.path:
            request.model = self._model.name

    async def _begin(self, request: Any, raw_request: Request, *, generates: bool) -> HttpCall:
        self._use_name(request)
        body = await raw_request.json()
        messages = body.get("messages") or []
        earlier = earlier_tokens(messages, body.get("required_prefix_token_ids"), self._model.vocab_size)
        call = HttpCall(request, messages, earlier, *_patience(body), generates)
        call.resolved["logprobs_mode"] = self._logprobs_mode
        current_call.set(call)
        return call

    # --- prompts ------------------------------------------------------------------------------------------------------

    async def _render(
        self, conversations: Sequence[Any], chat_params: Any, tok_params: Any = None, **options: Any
    ) -> tuple[list[Any], list[Any]]:
        """vLLM's `render_chat_async`; lengths are judged here, after the splice, not on the template's rendering."""
        call = current_call.get()
        assert call is not None, "vLLM rendered a chat outside of a request"
        if tok_params is not None and tok_params.truncate_prompt_tokens is None:
            tok_params = replace(tok_params, max_total_tokens=None, max_output_tokens=0)
        conversation, prompts = await self._llm.renderer.render_chat_async(
            conversations, chat_params, tok_params, **options
        )
        if call.earlier is not None:
            await self._keep_earlier(call, prompts[0], chat_params, tok_params, options)
        if call.generates:
            self._fit(call, len(prompts[0]["prompt_token_ids"]))
        return conversation, prompts

    async def _keep_earlier(
        self, call: HttpCall, prompt: dict[str, Any], chat_params: Any, tok_params: Any, options: Mapping[str, Any]
    ) -> None:
        assert call.earlier is not None
        if prompt.get("type") == "multimodal":
            raise PrefixError("earlier tokens are kept in text conversations only")

        async def render(messages: Messages, *, generation_prompt: bool) -> list[int]:
            params = _with_template_arguments(chat_params, generation_prompt)
            _, (rendered,) = await self._llm.renderer.render_chat_async([list(messages)], params, tok_params, **options)
            token_ids: list[int] = rendered["prompt_token_ids"]
            return token_ids

        exact = await self._exact_prompt(call, prompt["prompt_token_ids"], render, chat_params)
        call.prefix_mismatch = exact.mismatch
        prompt["prompt_token_ids"] = exact.token_ids
        prompt.pop("prompt", None)
        call.is_exact = True

    async def _exact_prompt(self, call: HttpCall, template: list[int], render: Any, chat_params: Any) -> ExactPrompt:
        assert call.earlier is not None
        try:
            exact = await exact_prompt(
                call.earlier,
                call.messages,
                template,
                render,
                self._vocabulary(),
                strict=self._config.strict_prefix,
                continues_turn=bool(chat_params.chat_template_kwargs.get("continue_final_message")),
            )
        except PrefixError as error:
            self.on_prefix(error.kind)
            raise
        self.on_prefix("kept" if exact.mismatch is None else "kept_despite_mismatch")
        return exact

    def _vocabulary(self) -> Vocabulary:
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None
        eos = frozenset(self._model.eos_token_ids)
        eos_texts = frozenset(text for token in eos if (text := _decode(tokenizer, [token])))
        return Vocabulary(
            decode=lambda token_ids: _decode(tokenizer, token_ids),
            eos_token_ids=eos,
            texts=TokenTexts(eos_texts, eos_texts | frozenset(map(str, tokenizer.all_special_tokens))),
        )

    def _fit(self, call: HttpCall, prompt_tokens: int) -> None:
        """Clamps to what the context leaves; vLLM clamps `max_tokens` itself, from the length that we return."""
        limit = self._model.max_model_len
        if prompt_tokens >= limit:
            raise ProtocolError(
                ErrorCode.INVALID_PROMPT,
                f"the prompt has {prompt_tokens} tokens, the context length of {limit} leaves no room to generate",
                max_model_len=limit,
            )
        room = limit - prompt_tokens
        request = call.request
        asked = getattr(request, "max_completion_tokens", None) or request.max_tokens
        if asked is not None and room < request.min_tokens <= asked:
            request.min_tokens = room
        call.resolved["max_tokens"] = room if asked is None else min(asked, room)
        call.resolved["clamped"] = asked is not None and asked > room


class _Delegate:
    """Another object with some of its attributes replaced."""

    def __init__(self, target: object, **replaced: object) -> None:
        self._target = target
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _want_ids_and_logprobs(request: Any) -> None:
    """What a trainer needs comes without asking; only an explicit `logprobs` of the client's own is left as it is."""
    if getattr(request, "use_beam_search", False):
        raise ProtocolError(ErrorCode.UNSUPPORTED, "beam search does not say which weights made a token: leave it out")
    request.return_token_ids = True
    if "logprobs" not in request.model_fields_set:
        request.logprobs = True if hasattr(request, "top_logprobs") else 0


def _check_prompt_ids(prompt: object) -> None:
    """vLLM takes `true` and `"1"` for the id 1."""
    if not isinstance(prompt, list):
        return
    for ids in prompt if any(isinstance(part, list) for part in prompt) else [prompt]:
        texts = isinstance(ids, str) or all(isinstance(part, str) for part in ids)
        if not texts and any(type(token_id) is not int for token_id in ids):
            raise ProtocolError(ErrorCode.INVALID_PROMPT, "a prompt is a text or a list of token ids, whole numbers")


def _patience(body: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """The version a request waits for at the gate, and for how many seconds at most."""
    version, seconds = body.get("min_version"), body.get("wait_seconds")
    if version is not None and (type(version) is not int or version < 0):
        raise ProtocolError(ErrorCode.INVALID_SAMPLING, f"min_version is {version!r}, not a weights version")
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0):
        raise ProtocolError(ErrorCode.INVALID_SAMPLING, f"wait_seconds is {seconds!r}, not a number of seconds")
    return version, seconds


def _with_template_arguments(chat_params: Any, generation_prompt: bool) -> Any:
    arguments = {
        **chat_params.chat_template_kwargs,
        "add_generation_prompt": generation_prompt,
        "continue_final_message": False,
    }
    return replace(chat_params, chat_template_kwargs=arguments)


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text


def _arguments(config: HttpConfig, model: str) -> Namespace:
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = model
    args.served_model_name = [model]
    args.api_key = None if config.api_key is None else [config.api_key]
    args.chat_template = None if config.chat_template is None else str(config.chat_template)
    args.tool_call_parser = config.tool_call_parser
    args.enable_auto_tool_choice = config.tool_call_parser is not None
    args.structured_outputs_config.reasoning_parser = config.reasoning_parser or ""
    args.enable_prompt_tokens_details = True
    args.disable_fastapi_docs = True
    return args


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ProtocolError)
    return error_response(error)
