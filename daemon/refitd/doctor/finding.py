"""What a check has found, and what that means for all of them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what is so, and for a warning or a failure what to do about it."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def passed(check: str, found: str) -> Finding:
    return Finding(check, Verdict.PASS, found)


def warned(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Verdict.WARN, found, advice)


def failed(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Verdict.FAIL, found, advice)


def skipped(check: str, reason: str) -> Finding:
    """What was not looked at, and why not."""
    return Finding(check, Verdict.SKIP, reason)


def any_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAIL for finding in findings)
