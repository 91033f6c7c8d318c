from __future__ import annotations

from deepinfra_plugin_template.repeat import Repeat

from deepinfra.core.drafts import TokenView
from deepinfra.core.ids import SeqId
from deepinfra.testing import SpeculatorConformance


class TestRepeat(SpeculatorConformance):
    def make(self) -> Repeat:
        return Repeat()


def test_it_guesses_what_followed_last_time() -> None:
    (draft,) = Repeat().propose([TokenView(SeqId(1), [1, 2, 3, 4, 2], 3)])
    assert draft.tokens == (3, 4, 2)


def test_it_keeps_silent_about_a_new_token() -> None:
    assert Repeat().propose([TokenView(SeqId(1), [1, 2, 3], 3)]) == []
