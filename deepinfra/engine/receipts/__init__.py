"""Receipts: what decided an answer's tokens, so that it can be computed again and compared."""

from deepinfra.engine.receipts.reading import MAX_NBYTES, decoded, receipt_in, receipt_of
from deepinfra.engine.receipts.record import VERSION, Answered, Asked, Demanded, Drawn, ExecutorFacts, Receipt
from deepinfra.engine.receipts.replaying import Compared, Obstacle, Outcome, replay
from deepinfra.engine.receipts.writing import joined, receipt_json

__all__ = (
    "MAX_NBYTES",
    "VERSION",
    "Answered",
    "Asked",
    "Compared",
    "Demanded",
    "Drawn",
    "ExecutorFacts",
    "Obstacle",
    "Outcome",
    "Receipt",
    "decoded",
    "joined",
    "receipt_in",
    "receipt_json",
    "receipt_of",
    "replay",
)
