"""Records and pure functions that every part shares; standard library only, frozen, free of behaviour that waits."""
