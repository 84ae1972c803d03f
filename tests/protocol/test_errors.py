from __future__ import annotations

from refit_protocol.errors import ERROR_RULES, MAX_MESSAGE_CHARACTERS, ErrorCode, Fault, ProtocolError


def test_every_code_has_a_rule() -> None:
    assert set(ERROR_RULES) == set(ErrorCode)


def test_codes_are_their_names_in_lower_case() -> None:
    """What travels is what the document lists."""
    assert all(code.value == code.name.lower() for code in ErrorCode)


def test_error_says_whose_fault_it_is_and_whether_to_retry() -> None:
    error = ProtocolError(ErrorCode.SESSION_LIMIT, "full", limit=2)
    assert (error.fault, error.retryable, error.details) == (Fault.DAEMON, True, {"limit": 2})
    assert str(error) == "session_limit: full"


def test_a_message_that_quotes_too_much_is_cut_off() -> None:
    """It is shown in the status and written to logs, whatever a client chose for a name."""
    error = ProtocolError(ErrorCode.MANIFEST_MISMATCH, "x" * 60_000)
    assert error.message == "x" * (MAX_MESSAGE_CHARACTERS - 3) + "..."
    whole = "x" * MAX_MESSAGE_CHARACTERS
    assert ProtocolError(ErrorCode.MANIFEST_MISMATCH, whole).message == whole
