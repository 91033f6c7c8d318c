"""A model's tensors: `headers` checks them by name and shape without torch, `read` reads them in the compute type."""
