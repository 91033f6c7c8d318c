"""`deepinfra simulate`: the real engine in virtual time, and a plan for a fleet."""
