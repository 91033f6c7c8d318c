"""Tool syntaxes: one module per way of writing calls."""
