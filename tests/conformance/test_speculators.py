"""Our speculators through our own kit."""

from deepinfra.interfaces.speculator import Speculator
from deepinfra.speculators import Ngram
from deepinfra.testing.speculator import SpeculatorConformance
from deepinfra.testing.speculators import Oracle


class TestNgram(SpeculatorConformance):
    def make(self) -> Speculator:
        return Ngram(max_drafts=3, min_match=1, max_match=3)


class TestNgramWithTheDefaults(SpeculatorConformance):
    def make(self) -> Speculator:
        return Ngram()


class TestOracle(SpeculatorConformance):
    def make(self) -> Speculator:
        return Oracle(lambda tokens: sum(tokens) % 5, p=0.7)
