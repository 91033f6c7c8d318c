"""Text in which given ranges are control tokens to ids, and ids to bytes: what every recipe encodes with."""
