"""Tests of the OpenAI endpoint."""  # noqa: A005 - it is `tests.http`
