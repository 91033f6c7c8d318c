"""Executors: the model on a device. Import each from its own module; none is loaded here."""
