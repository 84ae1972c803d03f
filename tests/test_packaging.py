"""What the distribution holds, and what importing its parts needs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from refitd.engine_start import WORKER_EXTENSION

ROOT = Path(__file__).parents[1]
PACKAGES = {"refitd", "refit_protocol", "refit_trainer"}
SERVICE_MODULES = ("fastapi", "prometheus_client", "psutil", "pydantic", "rich", "structlog", "typer")
ENGINE_MODULES = ("cupy", "torch", "transformers", "vllm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The wheel, built from this working tree."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return ZipFile(next(directory.glob("*.whl")))


def metadata(wheel: ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def run_without(modules: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new interpreter where importing any of `modules` fails as if it were not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, check=False)


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: ZipFile) -> None:
    """No tests, scripts or generic top-level names land in anybody's site-packages."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_holds_every_source_file(wheel: ZipFile) -> None:
    """A module that the repository has is not missing from an install."""
    roots = [ROOT / "daemon", ROOT / "protocol", ROOT / "trainer_side"]
    sources = {str(path.relative_to(root)) for root in roots for path in root.rglob("*.py")}
    assert sources <= set(wheel.namelist())


def test_the_wheel_holds_the_service(wheel: ZipFile) -> None:
    """Its units and what installs them: an operator has no checkout."""
    files = ("refitd.service", "refitd@.service", "sandbox.conf", "refitd.toml", "install-service")
    assert {f"refitd/systemd/{file}" for file in files} <= set(wheel.namelist())


def test_the_wheel_is_typed(wheel: ZipFile) -> None:
    """Type checkers read the annotations of all three packages."""
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_a_base_install_is_light(wheel: ZipFile) -> None:
    """A trainer's environment gets five small dependencies; the rest comes with an extra."""
    required = [line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split(">")[0] for line in required} == {"msgpack", "msgspec", "numpy", "pyzmq", "uvloop"}


def test_every_way_to_install_the_service_is_an_extra(wheel: ZipFile) -> None:
    """The extras that the documentation names exist."""
    assert {"tools", "cpu", "cuda12", "cuda13", "dev"} <= set(metadata(wheel).get_all("Provides-Extra", []))


def test_the_lock_pins_every_direct_dependency() -> None:
    """Everything the project asks for on a CPU machine is in the lock, and nothing in it floats."""
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert direct_dependencies() <= {pin.split("==")[0] for pin in pins}


def direct_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["tools"], *extras["service"], *extras["cpu"], *extras["dev"]]
    return {line.split(">")[0].split("==")[0] for line in asked} - {"refitd[service]", "refitd[tools]"}


@pytest.mark.parametrize("absent", ["torchvision", "torchaudio", "torchcodec", "triton"])
def test_the_lock_leaves_out_what_breaks_or_only_serves_gpus(absent: str) -> None:
    """A package index has these as CUDA builds, which cannot be imported beside a CPU torch or are never used."""
    assert f"\n{absent}==" not in (ROOT / "requirements" / "cpu.lock").read_text()


def test_the_trainer_side_needs_no_engine_and_no_service() -> None:
    """`import refit_trainer` works in an environment that has only the base install."""
    done = run_without(SERVICE_MODULES + ENGINE_MODULES, "from refit_trainer import Daemon; print(Daemon.__name__)")
    assert (done.stdout, done.stderr) == ("Daemon\n", "")


def test_a_base_install_says_which_extra_has_the_service() -> None:
    """The command `refitd` without an extra ends with one line that says what to install, for it or for all of it."""
    done = run_without(SERVICE_MODULES + ENGINE_MODULES, "from refitd.cli import main; main()")
    assert done.returncode == 1
    assert "pip install 'refitd[tools]'" in done.stderr
    assert "pip install 'refitd[cpu]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_trainer_makes_keys_without_the_service(tmp_path: Path) -> None:
    """`refitd keygen` runs where a client does, which has the extra `tools` and no more."""
    service = ("fastapi", "prometheus_client", "psutil", "pydantic_settings", "structlog", "uvicorn")
    arguments = ["keygen", str(tmp_path), "--name", "trainer"]
    code = f"import sys; sys.argv[1:] = {arguments!r}; from refitd.cli import main; main()"
    done = run_without(service + ENGINE_MODULES, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"trainer.key", "trainer.key_secret"}


def test_the_worker_extension_that_the_engine_names_exists() -> None:
    """vLLM gets the extension as a string, which no import check sees."""
    module, _, name = WORKER_EXTENSION.rpartition(".")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = ast.parse(Path(spec.origin).read_text())
    assert name in {node.name for node in source.body if isinstance(node, ast.ClassDef)}
