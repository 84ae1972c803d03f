"""The splice by numbers: each case that went wrong somewhere, as ids."""

from __future__ import annotations

import pytest

from refitd.prefix import PrefixMismatchError, RenderingsDisagreeError, TurnNotClosedError, splice

EOS = 2
OTHER_EOS = 3


def test_the_earlier_tokens_replace_the_templates_tokenisation_of_the_same_text() -> None:
    model = [11, 12, 13, 40, 41, 220, 17, EOS]
    template_prefix = [11, 12, 13, 40, 41, 1001, EOS]
    template = [11, 12, 13, 40, 41, 1001, EOS, 21, 22, 40, 41]
    assert splice(model, template_prefix, template, {EOS}) == [11, 12, 13, 40, 41, 220, 17, EOS, 21, 22, 40, 41]


def test_without_earlier_tokens_the_template_stays_as_it_is() -> None:
    assert splice([], [11, 1001, EOS], [11, 1001, EOS, 21], {EOS}) == [11, 1001, EOS, 21]


def test_reasoning_that_the_template_strips_once_messages_follow_stays_and_later_turns_are_not_skipped() -> None:
    model = [11, 12, 99, 99, 99, 55, EOS]
    template_prefix = [11, 12, 88, 88, 88, 56, EOS]
    template = [11, 12, 56, EOS, 70, 71, EOS, 40, 41]
    assert splice(model, template_prefix, template, {EOS}) == [11, 12, 99, 99, 99, 55, EOS, 70, 71, EOS, 40, 41]


@pytest.mark.parametrize("closed", [None, True, False])
def test_a_prefix_that_shares_nothing_with_the_rendering_is_refused(closed: bool | None) -> None:
    with pytest.raises(PrefixMismatchError):
        splice([7, EOS], [9, 9, 9], [9, 9, 9, EOS, 10], {EOS}, prefix_is_closed=closed)


def test_every_id_of_the_eos_set_ends_a_turn_and_the_models_own_is_kept() -> None:
    """The model stopped at one EOS where the template writes another."""
    model = [11, 50, OTHER_EOS]
    assert splice(model, [11, 51, EOS], [11, 51, EOS, 20, 21], {EOS, OTHER_EOS}) == [11, 50, OTHER_EOS, 20, 21]


def test_a_turn_that_was_cut_short_is_closed_by_the_template() -> None:
    assert splice([11, 50], [11, 51, EOS], [11, 51, EOS, 20, 21], {EOS}) == [11, 50, EOS, 20, 21]


@pytest.mark.parametrize("ending", [[EOS], []], ids=["stopped", "cut short"])
def test_the_newline_after_the_turn_comes_exactly_once(ending: list[int]) -> None:
    newline = 9
    template_prefix = [11, 51, EOS, newline]
    template = [11, 51, EOS, newline, 20, 21]
    assert splice([11, 50, *ending], template_prefix, template, {EOS}) == [11, 50, EOS, newline, 20, 21]


@pytest.mark.parametrize("closed", [None, False])
@pytest.mark.parametrize("ending", [[EOS], []], ids=["stopped", "cut short"])
def test_a_template_that_leaves_out_the_last_eos_does_not_repeat_the_turn(
    ending: list[int], closed: bool | None
) -> None:
    """The only EOS of the prefix rendering closes the user's turn."""
    template_prefix = [11, 30, EOS, 12, 51]
    template = [11, 30, EOS, 12, 51, EOS, 20, 21]
    model = [11, 30, EOS, 12, 50, 52, *ending]
    expected = [11, 30, EOS, 12, 50, 52, EOS, 20, 21]
    assert splice(model, template_prefix, template, {EOS}, prefix_is_closed=closed) == expected


def test_a_missing_last_eos_together_with_stripped_reasoning_is_refused() -> None:
    template_prefix = [11, 30, EOS, 12, 88, 51]
    template = [11, 30, EOS, 12, 51, EOS, 20, 21]
    with pytest.raises(RenderingsDisagreeError):
        splice([11, 30, EOS, 12, 87, 51, EOS], template_prefix, template, {EOS})


def test_a_separator_that_is_an_eos_too_is_no_end_of_an_open_turn() -> None:
    """Some models begin every message with the id that ends the turns."""
    template = [EOS, 30, 51, EOS, 9, EOS, 31]
    spliced = splice([EOS, 30, 50, EOS], [EOS, 30, 51, EOS, 9], template, {EOS}, prefix_is_closed=True)
    assert spliced == [EOS, 30, 50, EOS, 9, EOS, 31]


def test_a_template_without_the_models_eos_is_refused_with_the_ids_it_lacks() -> None:
    with pytest.raises(TurnNotClosedError, match=r"\[2, 3\]"):
        splice([11, 50, EOS], [11, 51, 4], [11, 51, 4, 20], {EOS, OTHER_EOS})


def test_only_user_turns_are_closed() -> None:
    """The caller knows that the EOS in the prefix is not the assistant's."""
    with pytest.raises(TurnNotClosedError):
        splice([11, EOS, 50, EOS], [11, EOS, 51], [11, EOS, 51, 12, EOS], {EOS}, prefix_is_closed=False)


def test_an_eos_inside_of_stripped_reasoning_does_not_swallow_the_next_message() -> None:
    template_prefix = [11, 12, 88, EOS, 89, 51, EOS]
    template = [11, 12, 51, EOS, 13, 14, 60, EOS, 11, 12]
    with pytest.raises(RenderingsDisagreeError):
        splice([11, 12, 88, EOS, 89, 51, EOS], template_prefix, template, {EOS})


def test_a_template_that_drops_earlier_turns_is_refused() -> None:
    with pytest.raises(RenderingsDisagreeError):
        splice([11, 30, EOS, 12, 50, EOS], [11, 30, EOS, 12, 51, EOS], [11, 31, EOS], {EOS})


def test_a_prompt_of_a_million_tokens_is_spliced() -> None:
    """Would take hours if any step were quadratic."""
    turn = [11, *range(100, 300), EOS]
    prefix = turn * 5_000
    assert splice(prefix, prefix, [*prefix, 20, 21], {EOS}) == [*prefix, 20, 21]
    stripped = [11, 100, EOS, *prefix[len(turn) :]]
    assert splice(prefix, prefix, [*stripped, 20, 21], {EOS}) == [*prefix, 20, 21]
