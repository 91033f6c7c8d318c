"""From token ids to typed events: one incremental engine, one declarative grammar per model family."""
