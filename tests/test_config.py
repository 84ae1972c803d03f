"""Settings: read once, from three places, unknown ones refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from refitd.config import Config, ConfigError, fixed_changes, load_config

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def all_settings() -> list[str]:
    names = []
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            names += [f"{name}.{key}" for key in section.model_fields]
        else:
            names.append(name)
    return names


@pytest.mark.parametrize("setting", all_settings())
def test_every_setting_is_documented(setting: str) -> None:
    """docs/configuration.md has a row for each."""
    assert f"| `{setting}` |" in DOCUMENT.read_text()


def test_flags_win_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place overrides only what it names."""
    file = tmp_path / "refitd.toml"
    file.write_text('model = "m"\n[refit]\npolicy = "finish"\nattest = "full"\nplan = "off"\n')
    monkeypatch.setenv("REFITD_REFIT__POLICY", "abort")
    monkeypatch.setenv("REFITD_REFIT__ATTEST", "off")
    config = load_config({"refit": {"policy": "recompute"}}, file)
    assert (config.refit.policy, config.refit.attest, config.refit.plan) == ("recompute", "off", "off")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('model = "m"\n[refit]\npolcy = "keep"\n', "refit.polcy"),
        ('model = "m"\nmodle = "m"\n', "modle"),
        ('model = "m"\n[refit]\npolicy = "hope"\n', "refit.policy"),
        ("[refit]\n", "model"),
        ('model = "m"\n[http]\nenabled = true\n[engine]\ntokenizer = false\n', "engine.tokenizer"),
        ('model = "m"\n[http]\nmax_total_body_bytes = 1000\n', "max_body_bytes"),
        ('model = "m"\nendpoint = "tcp://0.0.0.0:1"\n', "endpoint"),
        ("model = m\n", "refitd.toml"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    """Misspelt, impossible and missing settings."""
    file = tmp_path / "refitd.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config({}, file)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable is as wrong as a misspelt key."""
    monkeypatch.setenv("REFITD_REFITT__POLICY", "keep")
    with pytest.raises(ConfigError, match="REFITD_REFITT__POLICY"):
        load_config({"model": "m"}, None)


def test_the_configuration_is_frozen() -> None:
    """Nobody changes a setting behind another's back."""
    config = load_config({"model": "m"}, None)
    with pytest.raises(ValidationError):
        config.refit.policy = "finish"  # type: ignore[misc]


def test_a_reload_knows_what_it_cannot_change() -> None:
    """Everything outside `log` and `shutdown` needs a restart, and is named."""
    before = load_config({"model": "m"}, None)
    after = load_config({"model": "m", "log": {"level": "debug"}, "refit": {"policy": "finish"}}, None)
    assert fixed_changes(before, after) == ["refit"]


def test_the_served_name_is_short_unless_it_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part of a directory, however it is written; names on a hub are left whole."""
    (tmp_path / "qwen3-8b").mkdir()
    monkeypatch.chdir(tmp_path / "qwen3-8b")
    for model in (str(tmp_path / "qwen3-8b"), f"{tmp_path}/qwen3-8b/", "."):
        assert load_config({"model": model}, None).served_model_name == "qwen3-8b"
    assert load_config({"model": "Qwen/Qwen3-8B"}, None).served_model_name == "Qwen/Qwen3-8B"
    named = {"model": str(tmp_path), "engine": {"served_model_name": "policy"}}
    assert load_config(named, None).served_model_name == "policy"
