"""DeepSeek's own prompt format, V4 and V4.1: exact text, and control tokens only where the format puts them."""
