"""Our expert placers through our own kit."""

from deepinfra.interfaces.placer import ExpertPlacer
from deepinfra.placers import Eplb, StaticPlacer
from deepinfra.testing.placer import ExpertPlacerConformance


class TestStaticPlacer(ExpertPlacerConformance):
    def make(self) -> ExpertPlacer:
        return StaticPlacer()


class TestEplb(ExpertPlacerConformance):
    def make(self) -> ExpertPlacer:
        return Eplb()
