"""What a log line looks like, from a real process: logging is global, so each case gets an interpreter of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from transformers import PreTrainedModel

from refit_trainer import Daemon, RefitdError
from refitd import log
from refitd.vllm_noise import CAST, ENDED_AT_ONCE, LEFT_ALONE
from tests.cases.test_torn import AFTER_THREE_BUCKETS, SMALL_BUCKET_BYTES, failing_after
from tests.daemon_process import DaemonProcess
from tests.trainers import specs_of

LINES = """
import asyncio, logging, structlog
from refitd import log
log.configure(level="info", json={json})
async def serve():
    log.bind(session="s-1", request=7)
    structlog.get_logger("refitd.refit").info("refit committed", version=3)
asyncio.run(serve())
logging.getLogger("uvicorn").warning("port %d is busy", 80)
structlog.get_logger("refitd.engine").debug("not at this level")
try:
    secret_prompt = "a prompt"
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("refitd.engine").exception("bug")
"""


def lines_of(code: str, **environment: str) -> list[str]:
    """What the code writes to stderr, run in a fresh interpreter whose stderr is a pipe."""
    finished = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert finished.stdout == ""
    return finished.stderr.splitlines()


def test_json_lines_carry_bound_ids_and_libraries() -> None:
    """One JSON object a line, ids bound by the task in it, `logging` users in the same shape, levels respected."""
    refit, uvicorn, bug = (json.loads(line) for line in lines_of(LINES.format(json=True)))
    assert refit["event"] == "refit committed"
    assert (refit["session"], refit["request"], refit["version"]) == ("s-1", 7, 3)
    assert (refit["level"], refit["logger"]) == ("info", "refitd.refit")
    assert (uvicorn["event"], uvicorn["level"], uvicorn.get("session")) == ("port 80 is busy", "warning", None)
    assert "ZeroDivisionError" in bug["exception"]
    assert "a prompt" not in json.dumps({key: value for key, value in bug.items() if key != "exception"})


def test_text_lines_are_readable() -> None:
    """Without the journal a line has no colours in a pipe, and shows event, level and bound ids."""
    text = "\n".join(lines_of(LINES.format(json=None)))
    assert "refit committed" in text
    assert "session=s-1" in text
    assert "\x1b[" not in text
    assert "ZeroDivisionError" in text


def test_journal_lines_carry_their_priority(tmp_path: Path) -> None:
    """Under systemd each line starts with the syslog priority that journald files it under."""
    path = tmp_path / "journal"
    with path.open("wb") as stream:
        stat = os.fstat(stream.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
        command = [sys.executable, "-c", LINES.format(json=None)]
        subprocess.run(command, env=environment, stderr=stream, check=True)
    priorities = {line[:3]: json.loads(line[3:])["level"] for line in path.read_text().splitlines()}
    assert priorities == {"<6>": "info", "<4>": "warning", "<3>": "error"}


def test_an_inherited_journal_variable_is_not_believed() -> None:
    """A terminal inside a systemd session inherits JOURNAL_STREAM, which names another stream."""
    assert not any(line.startswith("<") for line in lines_of(LINES.format(json=None), JOURNAL_STREAM="1:1"))


@pytest.mark.parametrize(
    ("wanted", "journal", "style"),
    [
        (None, True, log.Style.JOURNAL),
        (None, False, log.Style.TEXT),
        (True, False, log.Style.JSON),
        (False, True, log.Style.TEXT),
    ],
)
def test_style_follows_the_setting_then_the_stream(wanted: bool | None, journal: bool, style: log.Style) -> None:
    """The operator's choice wins; without one the stream decides."""
    assert log.choose_style(wanted, journal) is style


def test_vllm_processes_write_like_the_daemon() -> None:
    """vLLM sets up logging itself, in each of its processes, from the file that `export` names."""
    environment: dict[str, str] = {}
    log.export(environment, vllm_level="WARNING", json=True)
    code = (
        "import json, logging.config, os\n"
        "logging.config.dictConfig(json.load(open(os.environ['VLLM_LOGGING_CONFIG_PATH'])))\n"
        "logging.getLogger('vllm.engine').warning('KV cache is %s', 'small')\n"
        "logging.getLogger('vllm.engine').info('chatter')\n"
    )
    [line] = lines_of(code, **environment)
    assert fields(line, "event", "logger", "level") == ["KV cache is small", "vllm.engine", "warning"]


@pytest.mark.parametrize(("level", "lines"), [("WARNING", 2), ("DEBUG", 5)])
def test_vllm_warns_once_of_what_is_well(level: str, lines: int) -> None:
    """Of dtypes that differ one line a pair instead of one a tensor, of layers without any none, nor of an engine that
    was to end at once; unless debugging."""
    environment: dict[str, str] = {}
    log.export(environment, vllm_level=level, json=True)
    code = (
        "import json, logging.config, os\n"
        "logging.config.dictConfig(json.load(open(os.environ['VLLM_LOGGING_CONFIG_PATH'])))\n"
        "log = logging.getLogger('vllm.model_executor')\n"
        "for name in ('embed', 'norm'):\n"
        "    text = 'Attempted to load weight %s with dtype %s into parameter with dtype %s'\n"
        "    log.warning(text, name, 'torch.float32', 'torch.bfloat16')\n"
        "log.warning('%s: Failed to load weights', 'RotaryEmbedding')\n"
        "killing = '[shutdown] Process manager: force killing remaining processes count=%d'\n"
        "logging.getLogger('vllm.v1.utils').warning(killing, 1)\n"
        "log.warning('%s: Failed to find weights', 'Other')\n"
    )
    found = lines_of(code, **environment)
    assert len(found) == lines
    if level == "WARNING":
        assert "brought as torch.float32 and held as torch.bfloat16" in found[0]
    assert "Failed to find" in found[-1]


def test_vllm_says_what_is_left_out_in_these_words() -> None:
    """Another release may word it otherwise; then it is loud again, and the texts have to follow."""
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    vllm = Path(package.origin).parent
    loaders = vllm / "model_executor"
    assert CAST in (loaders / "models" / "utils.py").read_text()
    assert f'"{LEFT_ALONE}"' in (loaders / "model_loader" / "reload" / "layerwise.py").read_text()
    assert f'"{ENDED_AT_ONCE}' in (vllm / "v1" / "utils.py").read_text()


def test_an_operators_own_vllm_logging_wins() -> None:
    """VLLM_LOGGING_CONFIG_PATH stays what the operator made it."""
    environment = {"VLLM_LOGGING_CONFIG_PATH": "/etc/vllm-logging.json"}
    log.export(environment)
    assert environment["VLLM_LOGGING_CONFIG_PATH"] == "/etc/vllm-logging.json"


def test_bound_ids_end_with_their_task() -> None:
    """Ids of one request do not stick to the next, nor to whoever receives them."""

    async def serve() -> None:
        log.bind(request=1)
        assert structlog.contextvars.get_contextvars()["request"] == 1

    async def receive() -> None:
        await asyncio.create_task(serve())
        assert "request" not in structlog.contextvars.get_contextvars()

    asyncio.run(receive())


def fields(line: str, *names: str) -> list[Any]:
    parsed = json.loads(line)
    return [parsed[name] for name in names]


def test_lines_name_the_request_and_the_refit(
    daemon_process: DaemonProcess, daemon: Daemon, model: PreTrainedModel
) -> None:
    """A commit's line has the request's id; that of a refit that ends half-way also the refit's own."""
    report = daemon.refit(model)
    committed = line_of(daemon, daemon_process, "weights committed", f"version={report.version}")
    assert re.search(r"\brequest=\d+", committed)
    with daemon_process.connect(bucket_bytes=SMALL_BUCKET_BYTES) as trainer:
        trainer.acquire_writer(takeover=True)
        with pytest.raises(RuntimeError, match="the trainer's own bug"):
            trainer.refit(failing_after(1, AFTER_THREE_BUCKETS), specs=specs_of())
    failed = line_of(daemon, daemon_process, "refit failed", "the trainer aborted")
    assert re.search(r"\brequest=\d+", failed)
    assert re.search(r"\brefit=\d+", failed)


def test_a_refusal_is_no_failure(daemon_process: DaemonProcess, daemon: Daemon, model: PreTrainedModel) -> None:
    """Where nothing was written nothing is wrong with the daemon: its log says so, and does not warn."""
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(RefitdError, match="not_finite"):
        daemon.refit(model, check_finite=True)
    refused = line_of(daemon, daemon_process, "refit refused", "not_finite")
    assert re.search(r"\binfo\b", refused)


def line_of(daemon: Daemon, process: DaemonProcess, *parts: str) -> str:
    """The last such line of the daemon's log, which is written a moment after the answer."""
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        daemon.status()
        found = [line for line in process.log.read_text().splitlines() if all(part in line for part in parts)]
        if found:
            return found[-1]
    raise AssertionError(f"no line with {parts}")
